"""`DiskLog`: the log in a data directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Final

from runnel.config import Keep, Settings
from runnel.errors import ClosedError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.log.backup import checkpoint
from runnel.log.disk.checkpoints import Checkpoints
from runnel.log.disk.disk_metadata import DiskMetadata
from runnel.log.disk.folders import ShardFolders
from runnel.log.disk.group_writer import FileGroupStore, GroupWriter, MakeGroupStore
from runnel.log.disk.last_value_keeper import LastValueKeeper
from runnel.log.disk.recovery import Recovery, checked_directory, lock_directory
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.topic_creation import TopicCreation
from runnel.log.disk.topic_removal import TopicRemoval
from runnel.log.disk.writer import ShardParts
from runnel.log.log import (
    SCAN_BYTES,
    Appended,
    Capabilities,
    Chosen,
    Creator,
    EntryPage,
    Level,
    LogListener,
    LogStatistics,
    NullListener,
    OffsetBounds,
    PartitionPage,
    Position,
    Recovered,
    ShardId,
    SubscriptionHolds,
    Trimmed,
    Turn,
)
from runnel.log.metadata import catalogue as records
from runnel.log.metadata.catalogue import Catalogue, Record
from runnel.log.metadata.catalogue_state import CatalogueState
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import Topic, check_append, check_offset
from runnel.log.retention.holds import ShardHolds
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import IndexCache, SegmentFolder
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.log.shard_view import ShardView
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk, DiskLock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies

_DAMAGE_SHOWN_MAX: Final = 100
_CAPABILITIES: Final = Capabilities(
    is_durable=True,
    is_reopenable=True,
    has_segment_files=True,
    has_free_space=True,
    keeps_positions=True,
)


class DiskLog:
    """The log on a file system. Make one with `await DiskLog.open(…)`.

    It opens and recovers the shards of a data directory, and sends each batch and each read to its shard. `metadata`
    records changes of topics, cursors and subscriptions in the catalogue.
    """

    def __init__(
        self,
        directory: str,
        settings: Settings,
        policies: Policies,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        listener: LogListener,
        holds: SubscriptionHolds | None,
        make_group_store: MakeGroupStore | None = None,
    ) -> None:
        self._tables = LogTables(
            settings.limits,
            policies,
            self._on_topic_made,
            journal_shards=settings.log.journal_shards,
        )
        self._topics = self._tables.topics
        self._listener = listener
        self._holds = holds
        self._directory = directory.rstrip("/")
        self._settings = settings
        self._policies = policies
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._make_group_store = make_group_store or self._make_file_store
        self._files = OpenFiles(disk, settings.limits.open_files_max)
        self._cache = IndexCache(settings.log.index_cache_bytes_max)
        self._tasks = OwnedTasks("the log")
        self._shards: dict[ShardId, DiskShard] = {}
        self._views: dict[ShardId, ShardView] = {}
        self._folders = ShardFolders(disk, self._directory, self._topics.shard_count)
        self._marks = SyncedMarks(disk, self._directory)
        self._catalogue = Catalogue(
            disk,
            workers,
            f"{self._directory}/{paths.CATALOGUE}",
            marks=self._marks,
            bytes_max=settings.log.catalogue_log_bytes_max,
            snapshot=self._snapshot,
        )
        self._state = CatalogueState(
            policies,
            self._topics,
            self._tables.cursors,
            self._tables.last_values,
            self._tables.subscriptions,
        )
        self._states = StateJournals(
            disk,
            workers,
            self._directory,
            marks=self._marks,
            bytes_max=settings.log.state_log_bytes_max,
            make_shard_folder=self._folders.make,
        )
        self._creation = TopicCreation(self._topics, self._catalogue, listener)
        self._removal = TopicRemoval(
            self._topics, self._tables.last_values, self._catalogue, self._shard, listener
        )
        self.metadata: Final = DiskMetadata(
            self._tables,
            self._catalogue,
            self._creation,
            self._removal,
            clock,
            self._check_open,
            self._stored_term,
        )
        self._last_keeper = LastValueKeeper(
            self._tables.keeps_last_value,
            self._tables.last_values,
            self._catalogue,
            self._shard,
            workers,
            settings.log,
        )
        self._checkpoints = Checkpoints(
            self._directory,
            self._shards,
            self._states,
            self._catalogue,
            clock,
            workers,
            self._check_open,
        )
        self._damage: list[str] = []
        self._lock: DiskLock | None = None
        self._is_closed = False
        self.recovered = Recovered()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # --- Opening ---

    @classmethod
    async def open(
        cls,
        directory: str | PathLike[str],
        *,
        settings: Settings,
        policies: Policies,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        listener: LogListener | None = None,
        holds: SubscriptionHolds | None = None,
        make_group_store: MakeGroupStore | None = None,
    ) -> DiskLog:
        """Lock the directory, recover what a crash left, and begin a new epoch.

        `make_group_store` makes what stores the groups of a shard, if that is not its segment files alone.

        LockedError if another process holds it, FormatVersionError if a newer Runnel wrote it, SettingsError
        if it cannot be a data directory.
        """
        log = cls(
            checked_directory(directory),
            settings,
            policies,
            disk,
            clock,
            workers,
            listener or NullListener(),
            holds,
            make_group_store,
        )
        opening = asyncio.get_running_loop().create_task(log._open())
        try:
            await asyncio.shield(opening)
        except BaseException as error:
            # A worker may have locked or opened files meanwhile: release them even if no caller waits.
            while not opening.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({opening})
            if isinstance(error, asyncio.CancelledError) and opening.exception() is None:
                await log.close()
            log._release()
            raise
        return log

    async def _open(self) -> None:
        submit = self._workers.submit
        self._lock = await submit(lock_directory, self._disk, self._directory)
        if paths.CHECKPOINT in self._disk.list(self._directory):  # left by a killed process
            await submit(checkpoint.discard, self._directory)
        marks = await submit(self._marks.open)
        loaded = await submit(self._catalogue.open)
        self._state.apply_all(loaded.records)
        recovery = Recovery(
            self._directory,
            self._disk,
            self._files,
            self._policies,
            self._state,
            loaded,
            self._shard,
            self._states,
            self._marks,
        )
        recovery.judge_marks(marks)
        self._state.epoch += 1
        self._state.has_marks = True
        found = await submit(recovery.find_shards)
        news = recovery.load(found)
        if recovery.is_incomplete:
            await recovery.reconcile(self._shards.values())
        await recovery.remember_losses(self._workers, list(self._shards.values()))
        for shard in self._shards.values():
            await submit(shard.resume)
        self._removal.hide_again(self._shards)
        if recovery.is_incomplete and found:
            with suppress(OSError):  # then the next start finds it damaged again
                await submit(self._catalogue.renew)
        opened = records.Opened(self._state.epoch, self._clock.time_ns(), has_marks=True)
        await self._catalogue.add(*news, opened)
        self.recovered = recovery.outcome()
        self._damage = list(self.recovered.damage[:_DAMAGE_SHOWN_MAX])

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

    def _shard(self, shard_id: ShardId) -> DiskShard:
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = self._new_shard(shard_id)
            self._checkpoints.on_new_shard(shard)
        return shard

    def _new_shard(self, shard_id: ShardId) -> DiskShard:
        settings = self._settings
        folder = paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)

        def producers() -> ProducerTable:
            return ProducerTable(settings.limits.producers_max, settings.log.producer_age_max_ns)

        return DiskShard(
            shard_id,
            ShardParts(
                self._disk,
                self._clock,
                self._workers,
                self._files,
                self._catalogue,
                self._tasks,
                settings.log,
                self._state.epoch,
                self._listener,
                self._marks,
                self._make_group_store,
            ),
            self._policies.for_journal(shard_id.journal, keep=Keep.DISK),
            SegmentFolder(self._disk, self._files, folder),
            self._cache,
            producers(),
            producers(),
            make_folder=lambda: self._folders.make(shard_id),
            of_journal=lambda: self._of_journal(shard_id.journal),
            find=self._tables.find_partition,
            shard_holds=ShardHolds(shard_id, self._tables.cursors, self._holds),
            before_removal=self._last_keeper.take_over,
            on_damage=self._on_damage,
        )

    def _make_file_store(self, shard_id: ShardId, writer: GroupWriter) -> FileGroupStore:
        return FileGroupStore(shard_id, writer, self._workers)

    def _of_journal(self, journal: str) -> list[DiskShard]:
        """The shards of a journal that have been opened."""
        shards = map(self._shards.get, self._topics.shards_of(journal))
        return [shard for shard in shards if shard is not None]

    # --- Appending ---

    def append(
        self,
        batch: Batch,
        level: Level = Level.STORED,
        creator: Creator | None = None,
        *,
        topics_made_max: int | None = None,
    ) -> asyncio.Future[Appended]:
        """See `MessageLog`."""
        self._check_open()
        level = check_append(batch, level, self._settings.limits)
        try:
            partitions = self._topics.resolve(batch.envelope, creator, topics_made_max)
        finally:
            self._creation.record()  # also for a batch that is refused after its topics were made
        shard = self._shards.get(partitions[0].shard) or self._shard(partitions[0].shard)
        unrecorded = self._creation.unrecorded(batch.envelope.topics)
        return shard.append(batch, partitions, level, unrecorded)

    async def wait_room(self, shard: ShardId) -> None:
        self._check_open()
        if shard in self._shards:
            await self._shards[shard].writer.wait_room()

    async def sync(self) -> None:
        self._check_open()
        for shard in list(self._shards.values()):
            await shard.writer.sync()

    def _on_topic_made(self, topic: Topic) -> None:
        self._creation.on_made(topic)

    # --- Reading ---

    async def read(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 2**20
    ) -> PartitionPage:
        self._check_open()
        found = self._topics.partition(topic, partition)
        check_offset(offset)
        return await self._shard(found.shard).read(found, offset, bytes_max)

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = SCAN_BYTES
    ) -> EntryPage:
        self._check_open()
        return await self._known_shard(shard).read_entries(position, bytes_max)

    async def bounds(self, topic: str, partition: int) -> OffsetBounds:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await self._shard(found.shard).bounds(found)

    async def offset_at(self, topic: str, partition: int, time_ns: int) -> int:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await self._shard(found.shard).offset_at(found, time_ns)

    async def entry_at(self, shard: ShardId, time_ns: int) -> int:
        self._check_open()
        return await self._known_shard(shard).entry_at(time_ns)

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        self._check_open()
        return await self._known_shard(shard).count(entry, patterns, turn)

    def count_stamp(self, shard: ShardId) -> tuple[int, int]:
        """A value that changes whenever `count` may change."""
        known = self._known_shard(shard)
        return known.entries().next_offset, known.hide_count

    def shard(self, shard: ShardId) -> ShardView:
        view = self._views.get(shard)
        if view is None:
            self._check_open()
            known = self._known_shard(shard)
            view = self._views[shard] = ShardView(
                known, self._state.epoch, self._topics, self._states.of
            )
        return view

    def shards(self) -> list[ShardId]:
        return list(self._shards)

    async def is_still_mine(self, shard: ShardId) -> bool:
        """The lock of the directory settles it: no other log has it while this one is open."""
        return shard in self._shards and not self._is_closed

    def _stored_term(self, producer: str) -> int:
        return max((shard.producers.term(producer) for shard in self._shards.values()), default=-1)

    def _known_shard(self, shard: ShardId) -> DiskShard:
        known = self._shards.get(shard)
        if known is None:
            if not self._topics.uses(shard):
                raise UnknownTopicError(f"there is no shard {shard}")
            known = self._shard(shard)  # nothing has been published there yet
        return known

    def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        self._check_open()
        lasting = self._tables.last_of(wanted)
        return self._known_shard(shard).messages_at(wanted, lasting, self._tables.last_values.at)

    # --- Rules ---

    async def follow_rules(self) -> Sequence[Difference]:
        self._check_open()
        for shard_id, shard in self._shards.items():
            shard.use_policy(self._policies.for_journal(shard_id.journal, keep=Keep.DISK))
        return await self._topics.follow_rules()

    # --- Backups ---

    async def checkpoint(self) -> tuple[str, str]:
        return await self._checkpoints.make()

    async def drop_checkpoint(self) -> None:
        await self._checkpoints.drop()

    # --- Maintenance ---

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        self._check_open()
        return await self._known_shard(shard).trim()

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        self._check_open()
        opened = await self._known_shard(shard).reopen()
        damage = [str(bad) for item in opened for bad in item.damage]
        self._damage += damage[: max(0, _DAMAGE_SHOWN_MAX - len(self._damage))]
        return damage

    def statistics(self) -> LogStatistics:
        return LogStatistics(
            topics=len(self._topics),
            shards=[shard.statistics() for shard in self._shards.values()],
            open_files=len(self._files),
            damage=list(self._damage),
        )

    def _on_damage(self, damage: Damage) -> None:
        if len(self._damage) < _DAMAGE_SHOWN_MAX and str(damage) not in self._damage:
            self._damage.append(str(damage))

    def _snapshot(self) -> list[Record]:
        """The records that a new file of the catalogue begins with. Runs in a worker."""
        checkpoints = [shard.checkpoint() for shard in list(self._shards.values())]
        return self._state.snapshot(self._clock.time_ns(), checkpoints)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for shard in self._shards.values():  # at once: a checkpoint may wait for an unknown outcome
            shard.writer.refuse(ClosedError("the log is closed"))
        async with self._checkpoints.resting:  # a checkpoint under way ends soon
            await self._close()

    async def _close(self) -> None:
        try:
            # Close all of them before raising a failure: every waiting caller gets an answer.
            outcomes = await asyncio.gather(
                *(shard.close() for shard in self._shards.values()),
                self._states.close(),
                return_exceptions=True,
            )
            await self._tasks.finish()
            failure = next((item for item in outcomes if item is not None), None)
            await self._catalogue.close(*(() if failure else (records.Closed(self._state.epoch),)))
            await self._workers.submit(self._marks.close)
            if failure is not None:
                raise failure
        finally:
            self._release()

    def _release(self) -> None:
        self._catalogue.release()
        self._states.release()
        self._marks.release()
        self._files.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
