"""`DiskLog`: the log in a data directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Final

from runnel.config import Keep, Settings
from runnel.errors import ClientFault, ClosedError, Unavailable
from runnel.formats.batch import Batch
from runnel.log.backup import checkpoint
from runnel.log.disk import migration
from runnel.log.disk.checkpoints import Checkpoints
from runnel.log.disk.directory import (
    check_no_nodes,
    check_present_format,
    checked_directory,
    lock_directory,
    lock_node,
)
from runnel.log.disk.directory_metadata import DirectoryMetadata
from runnel.log.disk.directory_recovery import DirectoryRecovery
from runnel.log.disk.disk_metadata import DiskMetadata
from runnel.log.disk.folders import ShardFolders
from runnel.log.disk.group_writer import MakeGroupStore
from runnel.log.disk.owned_shards import OwnedShards
from runnel.log.disk.recovery import FoundShard, Recovery
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.shard_factory import ShardFactory
from runnel.log.disk.topic_creation import TopicCreation
from runnel.log.disk.topic_removal import TopicRemoval
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
    TermRecords,
    Trimmed,
    Turn,
)
from runnel.log.metadata.catalogue import MetadataJournal
from runnel.log.metadata.format_one import FormatOne
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.metadata_state import MetadataState
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.records import (
    Closed,
    MetadataRecord,
    Opened,
    SubscriptionRemoved,
    SubscriptionSet,
    TermTaken,
    TopicDeleted,
    TopicMade,
)
from runnel.log.metadata.shared_metadata import MetadataRecords, SharedMetadata
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import Partition, Topic, check_append, check_offset
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.format_file import (
    FIRST_FORMAT,
    FORMAT,
    SHARED_FORMAT,
    keep_account,
    read_format,
)
from runnel.log.segments.scan import Damage
from runnel.log.segments.synced_marks import MarksFound, SyncedMarks
from runnel.log.shard_view import ShardView, moved
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.platform.disk import Disk, DiskLock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies

logger = get_logger("runnel")

_NS_PER_MS: Final = 1_000_000
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
    records changes of topics, cursors and subscriptions.
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
        shared: SharedMetadata | None = None,
        terms: TermRecords | None = None,
        *,
        is_locked: bool = False,
    ) -> None:
        self._tables = LogTables(
            settings.limits,
            policies,
            self._on_topic_made,
            journal_shards=settings.log.journal_shards,
        )
        self._topics = self._tables.topics
        self._directory = directory.rstrip("/")
        self._settings = settings
        self._policies = policies
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._files = OpenFiles(disk, settings.limits.open_files_max)
        self._tasks = OwnedTasks("the log")
        self._shared = shared
        self._listener = listener
        self._is_locked = is_locked
        member = "" if shared is None else shared.member
        self._marks = SyncedMarks(disk, self._directory, member)
        self._state = MetadataState(policies, self._tables)
        self._journal = MetadataJournal(
            disk,
            workers,
            f"{self._directory}/{paths.METADATA}",
            marks=self._marks,
            bytes_max=settings.log.catalogue_log_bytes_max,
            snapshot=self.snapshot_of_metadata,
        )
        self._own = DirectoryMetadata(
            self._directory, disk, workers, self._journal, self.snapshot_of_metadata
        )
        recorded: MetadataRecords = self._own if shared is None else shared
        folders = ShardFolders(disk, self._directory, self._topics.shard_count, member)
        self._states = StateJournals(
            disk,
            workers,
            self._directory,
            marks=self._marks,
            bytes_max=settings.log.state_log_bytes_max,
            make_shard_folder=folders.make,
        )
        self._factory = ShardFactory(
            self._directory,
            settings,
            policies,
            self._tables,
            disk,
            clock,
            workers,
            self._files,
            self._marks,
            folders,
            self._tasks,
            listener,
            holds,
            make_group_store,
            of_journal=lambda journal: self._owned.of_journal(journal),
            on_damage=self._on_damage,
        )
        self._owned = OwnedShards(
            self._factory,
            self._load_shard,
            self._topics,
            self._states,
            disk,
            workers,
            self._tasks,
            is_exclusive=shared is None,
            terms=terms,
            on_new_shard=lambda shard: self._checkpoints.on_new_shard(shard),
        )
        self._creation = TopicCreation(
            self._topics, recorded.add_made, self._owned.find_or_begin, self._tasks, listener
        )
        self._removal = TopicRemoval(
            self._topics, recorded, self._creation, self._owned.get, self._owned.find, listener
        )
        self.metadata: Final = DiskMetadata(
            self._tables,
            recorded,
            self._creation,
            self._removal,
            clock,
            self._check_open,
            self._stored_term,
            member,
        )
        self._checkpoints = Checkpoints(
            self._directory,
            self._owned.shards,
            self._states,
            self._own,
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
        shared: SharedMetadata | None = None,
        terms: TermRecords | None = None,
        is_locked: bool = False,
    ) -> DiskLog:
        """Lock the directory, and recover what a crash left.

        `make_group_store` makes what stores the groups of a shard, if that is not its segment files alone.

        With `shared` metadata this is one of several logs that serve the directory. It locks its own name alone: who
        starts these logs holds the directory's lock (`ClusterDirectory`). It serves the shards that it acquires, each
        under the lock of the shard's folder. `is_locked`: the caller holds the directory's lock also for a log that
        serves it alone. `terms` records when.

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
            shared,
            terms,
            is_locked=is_locked,
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
        if self._shared is None:
            await self._open_alone()
        else:
            await self._open_beside_others(self._shared)

    async def _open_beside_others(self, shared: SharedMetadata) -> None:
        submit = self._workers.submit
        await submit(check_present_format, self._disk, self._directory)
        self._lock = await submit(lock_node, self._disk, self._directory, shared.member)
        await submit(self._marks.open)
        self._state.apply_all(await shared.load(self._follow))

    def _follow(self, found: Sequence[MetadataRecord]) -> None:
        """Apply what another log of the directory has recorded."""
        for record in found:
            match record:
                case TopicMade(name, generation=generation):
                    self._creation.give_way(record)
                    known = self._topics.recorded(name)
                    if known is None or known.generation < generation:
                        self._state.apply(record)
                        made = self._topics.recorded(name)
                        assert made is not None
                        self._creation.follow(made)
                case TopicDeleted(name):
                    self._removal.apply_deletion(name)
                case SubscriptionSet(name) | SubscriptionRemoved(name):
                    self._state.apply(record)
                    self._listener.on_subscription_changed(name)
                case TermTaken(producer, term):
                    self._state.apply(record)
                    self._listener.on_term_taken(producer, term)
                case _:
                    self._state.apply(record)

    async def _open_alone(self) -> None:
        submit = self._workers.submit
        if not self._is_locked:
            self._lock = await submit(lock_directory, self._disk, self._directory)
        names = self._disk.list(self._directory)
        if paths.NODES in names:
            await submit(check_no_nodes, self._disk, self._directory)
        if paths.CHECKPOINT in names:  # left by a killed process
            await submit(checkpoint.discard, self._directory)
        marks = await submit(self._marks.open)
        written = await submit(read_format, self._disk, self._directory)
        is_shared = written.format == SHARED_FORMAT
        if is_shared and paths.CLUSTER_FILE in names:
            await submit(migration.discard_journal, self._disk, self._directory, self._marks)
        if not is_shared and paths.METADATA in names and any(map(paths.is_cluster_file, names)):
            await submit(migration.discard_unshared, self._disk, self._directory)
        if written.format == FIRST_FORMAT:
            recovery = await self._migrate(marks, keeps_account=written.keeps_account)
        else:
            recovery = await self._recover(
                marks, keeps_account=written.keeps_account, is_shared=is_shared
            )
        with suppress(OSError):  # then later starts do not report missing segments as losses
            await submit(keep_account, self._disk, self._directory)
        await self._own.add(Opened(self._state.epoch, self._clock.time_ns(), has_marks=True))
        self.recovered = self._report(recovery)
        self._damage = list(self.recovered.damage[:_DAMAGE_SHOWN_MAX])

    async def _recover(
        self, marks: MarksFound, *, keeps_account: bool, is_shared: bool
    ) -> Recovery:
        submit = self._workers.submit
        await submit(migration.discard_former, self._disk, self._directory, self._marks)
        loaded = await self._own.load(is_shared=is_shared)
        self._state.apply_all(loaded.records)
        self._state.has_marks = True
        recovery = self._recovery(keeps_account=keeps_account)
        directory = self._directory_recovery(recovery)
        directory.judge_metadata(
            loaded,
            marks,
            is_closed=self._state.is_closed and not loaded.damage,
            has_marks=bool(loaded.records),
        )
        found = await submit(directory.find, lambda _: None, ())
        await self._restore(recovery, found)
        if recovery.are_topics_incomplete and found:
            with suppress(OSError, Unavailable):  # then the next start finds it damaged again
                await self._own.renew()
        return recovery

    async def _migrate(self, marks: MarksFound, *, keeps_account: bool) -> Recovery:
        """Recover a directory of format 1, and write it in the present format."""
        submit = self._workers.submit
        disk, state = self._disk, self._state
        await submit(migration.discard_unfinished, disk, self._directory, self._marks)
        mark = self._marks.get(f"{self._directory}/{paths.CATALOGUE}")
        loaded = await submit(migration.load_former, disk, self._directory, mark)
        former = FormatOne(state, self._tables)
        former.apply_all(loaded.records)
        # If an older Runnel ran here last, it may have removed segments and the records of removals.
        is_older = bool(state.epoch) and not state.has_marks
        # If records behind it are lost, the last one left does not tell how the process ended.
        is_closed = state.is_closed and not loaded.damage
        recovery = self._recovery(keeps_account=keeps_account and not is_older)
        recovery.has_format_one = True
        directory = self._directory_recovery(recovery)
        directory.judge_metadata(loaded, marks, is_closed=is_closed, has_marks=state.has_marks)
        recorded = former.recorded(is_closed=is_closed)
        found = await submit(
            directory.find,
            lambda shard: recorded.get(shard) or RecordedShard(state.epoch, is_closed),
            former.shards,
        )
        await self._restore(recovery, found)
        former.take_terms()
        state.has_marks = True
        await submit(self._write_present_format)
        logger.info("the data directory was migrated", from_format=1, to_format=FORMAT)
        return recovery

    def _write_present_format(self) -> None:
        partitions: dict[ShardId, list[tuple[Topic, Partition]]] = {}
        for topic in self._topics:
            for part in topic.partitions:
                partitions.setdefault(part.shard, []).append((topic, part))
        migration.migrate(
            self._disk,
            self._directory,
            self._journal,
            self.snapshot_of_metadata(),
            (
                (shard.catalogue, shard.snapshot(partitions.get(shard.id, ())))
                for shard in self._owned
            ),
            self._marks,
        )

    def _recovery(self, *, keeps_account: bool) -> Recovery:
        return Recovery(
            self._disk,
            self._files,
            self._workers,
            self._policies,
            self._topics,
            self._marks,
            self._states,
            self._factory.catalogue,
            keeps_account=keeps_account,
        )

    def _directory_recovery(self, recovery: Recovery) -> DirectoryRecovery:
        return DirectoryRecovery(
            self._directory, self._disk, self._files, self._topics, self._marks, recovery
        )

    async def _restore(self, recovery: Recovery, found: Sequence[FoundShard]) -> None:
        self._owned.first_epoch = self._state.epoch + 1
        for shard in await recovery.restore(found, self._make_shard):
            self._owned.add(shard)
        # Shards whose files are gone begin anew with their first use. Their topics may have been made again.
        await self._creation.record_generations(
            topic
            for topic in self._topics
            if topic.generation > 1
            and any(part.shard not in self._owned.shards for part in topic.partitions)
        )

    def _make_shard(self, found: FoundShard, above: int = 0) -> DiskShard:
        """A shard for the next term of what was found."""
        epoch = max(found.recorded.epoch, self._state.epoch, above) + 1
        if found.is_lost:  # later epochs may have been recorded: no clock counts as fast as that
            epoch = max(epoch, self._clock.time_ns() // _NS_PER_MS)
        return self._factory.shard(found.id, found.catalogue, epoch)

    async def _load_shard(self, shard_id: ShardId, above: int) -> DiskShard:
        """Load a shard that another log may have served meanwhile, for a term with an epoch above this one."""
        async with self._checkpoints.resting:
            self._check_open()
            recovery = self._recovery(keeps_account=True)
            for _, partition in self._topics.partitions_in(shard_id):
                partition.reset()
            folder = self._factory.folder(shard_id)
            folders = (folder, paths.catalogue_folder(folder), paths.state_folder(folder))
            await self._workers.submit(self._marks.take_over, folders)
            found = await self._workers.submit(recovery.read, shard_id, folder)
            [shard] = await recovery.restore([found], lambda each: self._make_shard(each, above))
            for damage in recovery.all_damage():
                self._on_damage(damage)
            return shard

    def snapshot_of_metadata(self) -> list[MetadataRecord]:
        """Records of everything that the metadata must have now. For a worker."""
        return self._state.snapshot(self._clock.time_ns())

    def _report(self, recovery: Recovery) -> Recovered:
        differences = [
            difference
            for topic in self._topics
            if not topic.is_deleted
            for difference in self._policies.differences(topic.name, topic.policy.fixed)
        ]
        damage = recovery.all_damage()
        return Recovered(
            recovery.was_clean and not recovery.torn and not recovery.damage,
            [str(torn) for torn in recovery.torn],
            [str(bad) for bad in damage],
            differences,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

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
        shard = self._owned.get(partitions[0].shard)
        unrecorded = self._creation.unrecorded(batch.envelope.topics)
        return shard.append(batch, partitions, level, unrecorded)

    async def wait_room(self, shard: ShardId) -> None:
        self._check_open()
        known = self._owned.find(shard)
        if known is not None:
            await known.writer.wait_room()
        elif self._owned.is_away(shard):
            raise moved(shard)

    async def sync(self) -> None:
        self._check_open()
        for shard in self._owned:
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
        return await self._owned.get(found.shard).read(found, offset, bytes_max)

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = SCAN_BYTES
    ) -> EntryPage:
        self._check_open()
        return await self._owned.known(shard).read_entries(position, bytes_max)

    async def bounds(self, topic: str, partition: int) -> OffsetBounds:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await self._owned.get(found.shard).bounds(found)

    async def offset_at(self, topic: str, partition: int, time_ns: int) -> int:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await self._owned.get(found.shard).offset_at(found, time_ns)

    async def entry_at(self, shard: ShardId, time_ns: int) -> int:
        self._check_open()
        return await self._owned.known(shard).entry_at(time_ns)

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        self._check_open()
        return await self._owned.known(shard).count(entry, patterns, turn)

    def shard(self, shard: ShardId) -> ShardView:
        self._check_open()
        return self._owned.view(shard)

    def shards(self) -> list[ShardId]:
        return list(self._owned.shards)

    def _stored_term(self, producer: str) -> int:
        return max((shard.producers.term(producer) for shard in self._owned), default=-1)

    def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        self._check_open()
        known = self._owned.known(shard)
        return known.messages_at(wanted, self._tables.last_of(wanted), known.last_values.at)

    # --- Ownership ---

    async def acquire(self, shard: ShardId, above: int = 0) -> ShardView:
        self._check_open()
        return await self._owned.acquire(shard, above)

    async def release(self, shard: ShardId) -> None:
        self._check_open()
        await self._owned.release(shard)

    async def drop(self, shard: ShardId) -> None:
        self._check_open()
        await self._owned.drop(shard)

    async def is_still_mine(self, shard: ShardId) -> bool:
        """A lock settles it, on the directory or on the shard's folder: no other log has it meanwhile."""
        return shard in self._owned.shards and not self._is_closed

    # --- Rules ---

    async def follow_rules(self) -> Sequence[Difference]:
        self._check_open()
        for shard in self._owned:
            shard.use_policy(self._policies.for_journal(shard.id.journal, keep=Keep.DISK))
        return await self._topics.follow_rules()

    # --- Backups ---

    async def checkpoint(self) -> tuple[str, str]:
        if self._shared is not None:
            raise ClientFault(
                "several brokers serve this data directory, and one of them cannot stop the others for a copy"
            )
        return await self._checkpoints.make()

    async def drop_checkpoint(self) -> None:
        await self._checkpoints.drop()

    # --- Maintenance ---

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        self._check_open()
        return await self._owned.known(shard).trim()

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        self._check_open()
        opened = await self._owned.known(shard).reopen()
        damage = [str(bad) for item in opened for bad in item.damage]
        self._damage += damage[: max(0, _DAMAGE_SHOWN_MAX - len(self._damage))]
        return damage

    def statistics(self) -> LogStatistics:
        return LogStatistics(
            topics=len(self._topics),
            shards=[shard.statistics() for shard in self._owned],
            open_files=len(self._files),
            damage=list(self._damage),
            ended=self._owned.ended_terms.statistics(),
        )

    def _on_damage(self, damage: Damage) -> None:
        if len(self._damage) < _DAMAGE_SHOWN_MAX and str(damage) not in self._damage:
            self._damage.append(str(damage))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._owned.refuse(
            ClosedError("the log is closed")
        )  # at once: a checkpoint may wait for an unknown outcome
        await self._owned.settle()
        async with self._checkpoints.resting:  # a checkpoint under way ends soon
            await self._close()

    async def _close(self) -> None:
        try:
            # Close all of them before raising a failure: every waiting caller gets an answer.
            outcomes = [*await self._owned.close()]
            outcomes += await asyncio.gather(self._states.close(), return_exceptions=True)
            await self._tasks.finish()
            failure = next((item for item in outcomes if item is not None), None)
            if self._shared is not None:
                await self._shared.close()
            else:
                await self._own.close(*(() if failure else (Closed(self._state.epoch),)))
            await self._workers.submit(self._marks.close)
            if failure is not None:
                raise failure
        finally:
            self._release()

    def _release(self) -> None:
        self._own.release()
        if self._shared is not None:
            self._shared.release()
        self._states.release()
        self._owned.release_locks()
        self._marks.release()
        self._files.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
