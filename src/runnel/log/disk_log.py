"""All shards of a data directory: opened and recovered, topics and cursors recorded, batches sent to their shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from os import PathLike
from typing import Final
from uuid import uuid4

from runnel.config import Keep, Settings
from runnel.errors import ClientFault, ClosedError, Unavailable, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log import catalogue as records
from runnel.log import checkpoint, paths
from runnel.log.catalogue import Catalogue, Record
from runnel.log.catalogue_state import CatalogueState, made
from runnel.log.counting import Turn
from runnel.log.cursors import CursorTable
from runnel.log.definitions import DefinitionTable
from runnel.log.files import Files
from runnel.log.folders import ShardFolders
from runnel.log.last_value_keeper import LastValueKeeper
from runnel.log.last_values import LastValues, only
from runnel.log.log import (
    SCAN_BYTES,
    Appended,
    Bounds,
    Chosen,
    Creator,
    Cursor,
    CursorPosition,
    Level,
    Listener,
    Nobody,
    Page,
    Position,
    ShardId,
    ShardPage,
    Statistics,
    TopicInfo,
    Trimmed,
)
from runnel.log.pins import ShardPins
from runnel.log.producers import ProducerTable
from runnel.log.recovery import Recovered, Recovery, checked_directory, claim
from runnel.log.removing import TopicRemoval
from runnel.log.retention import Claims
from runnel.log.scan import Damage
from runnel.log.segments import IndexCache, SegmentFolder
from runnel.log.shard import Shard
from runnel.log.state_journal import StateJournal, StateJournals
from runnel.log.synced_marks import SyncedMarks
from runnel.log.tasks import OwnedTasks
from runnel.log.topic_table import (
    Partition,
    SomeMade,
    Topic,
    TopicTable,
    check_append,
    check_offset,
    kept_elsewhere,
)
from runnel.log.writer import Parts, ShardWriter
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk, DiskLock
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies, Policy

_DAMAGE_SHOWN_MAX: Final = 100


class DiskLog:
    """The log on a file system. Make one with `await DiskLog.open(…)`."""

    def __init__(
        self,
        directory: str,
        settings: Settings,
        policies: Policies,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        listener: Listener,
    ) -> None:
        self._listener = listener
        self._directory = directory.rstrip("/")
        self._settings = settings
        self._policies = policies
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._files = Files(disk, settings.limits.open_files_max)
        self._cache = IndexCache(settings.log.index_cache_bytes_max)
        self._tasks = OwnedTasks()
        self._topics = TopicTable(policies, settings.limits.topics_max, self._on_topic_made)
        self._shards: dict[ShardId, Shard] = {}
        self._folders = ShardFolders(disk, self._directory)
        self._cursors = CursorTable(settings.limits.cursors_max, self._shard_of)
        self._last_values = LastValues()
        self._subscriptions = DefinitionTable(settings.limits.durable_subscriptions_max)
        # What acknowledged subscriptions owe, told by whoever runs them; None: retention asks nobody.
        self.claims: Claims | None = None
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
            policies, self._topics, self._cursors, self._last_values, self._subscriptions
        )
        self._states = StateJournals(
            disk,
            workers,
            self._directory,
            marks=self._marks,
            bytes_max=settings.log.state_log_bytes_max,
            make_shard_folder=self._folders.make,
        )
        self._removal = TopicRemoval(
            self._topics, self._last_values, self._catalogue, self._shard, listener
        )
        self._last_keeper = LastValueKeeper(
            self._topics, self._last_values, self._catalogue, self._shard, workers, settings.log
        )
        self._made: list[Topic] = []  # by the call that is under way
        # Topics on their way to the catalogue.
        self._unrecorded: dict[str, asyncio.Future[None]] = {}
        self._damage: list[str] = []
        self._lock: DiskLock | None = None
        self._has_checkpoint = False
        self._resting = asyncio.Lock()
        self._paused: list[ShardWriter] | None = None  # None: the log is not at rest
        self._is_closed = False
        self.recovered = Recovered(was_clean=True, torn=(), damage=(), differences=())

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
        listener: Listener | None = None,
    ) -> DiskLog:
        """Lock the directory, recover what a crash left, and begin a new epoch.

        LockedError if another process has it, FormatVersionError if a newer Runnel wrote it, SettingsError
        if it cannot be a data directory.
        """
        log = cls(
            checked_directory(directory),
            settings,
            policies,
            disk,
            clock,
            workers,
            listener or Nobody(),
        )
        opening = asyncio.get_running_loop().create_task(log._open())
        try:
            await asyncio.shield(opening)
        except BaseException as error:
            # What a worker has locked or opened meanwhile must be let go, even if nobody waits for it.
            while not opening.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({opening})
            if isinstance(error, asyncio.CancelledError) and opening.exception() is None:
                await log.close()
            log._let_go()
            raise
        return log

    async def _open(self) -> None:
        submit = self._workers.submit
        self._lock = await submit(claim, self._disk, self._directory)
        if paths.CHECKPOINT in self._disk.list(self._directory):  # of a process that was killed
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
            with suppress(OSError):  # then it is found damaged again
                await submit(self._catalogue.renew)
        opened = records.Opened(self._state.epoch, self._clock.time_ns(), has_marks=True)
        await self._catalogue.add(*news, opened)
        self.recovered = recovery.outcome()
        self._damage = list(self.recovered.damage[:_DAMAGE_SHOWN_MAX])

    def _shard(self, shard_id: ShardId) -> Shard:
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = self._new_shard(shard_id)
            if self._paused is not None:
                shard.writer.pause_at_once()
                self._paused.append(shard.writer)
        return shard

    def _new_shard(self, shard_id: ShardId) -> Shard:
        settings = self._settings
        folder = paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)

        def producers() -> ProducerTable:
            return ProducerTable(settings.limits.producers_max, settings.log.producer_age_max_ns)

        return Shard(
            shard_id,
            Parts(
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
            ),
            self._policies.for_journal(shard_id.journal, keep=Keep.DISK),
            SegmentFolder(self._disk, self._files, folder),
            self._cache,
            producers(),
            producers(),
            make_folder=lambda: self._folders.make(shard_id),
            find=self._find_partition,
            pins=ShardPins(shard_id, self._cursors, lambda: self.claims),
            before_removal=self._last_keeper.take_over,
            on_damage=self._on_damage,
        )

    # --- Appending ---

    def append(
        self,
        batch: Batch,
        level: Level = Level.STORED,
        creator: Creator | None = None,
        *,
        topics_made_max: int | None = None,
    ) -> asyncio.Future[Appended]:
        """See `Log`. ManyTopicsError: more than so many topics would have to be made."""
        self._check_open()
        level = check_append(batch, level, self._settings.limits)
        try:
            partitions = self._topics.resolve(batch.envelope, creator, topics_made_max)
        finally:
            self._record_made()  # also what a batch has made that is then refused
        shard = self._shards.get(partitions[0].shard) or self._shard(partitions[0].shard)
        unrecorded: Sequence[asyncio.Future[None]] = ()
        if self._unrecorded:
            waiting = map(self._unrecorded.get, batch.envelope.topics)
            unrecorded = [future for future in dict.fromkeys(waiting) if future is not None]
        return shard.append(batch, partitions, level, unrecorded)

    def make_topics(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None = None
    ) -> SomeMade:
        """Make topics of a batch before it is appended, from a run on: at most so many."""
        self._check_open()
        try:
            return self._topics.make_some(envelope, run, made_max, creator)
        finally:
            self._record_made()

    async def wait_room(self, shard: ShardId) -> None:
        self._check_open()
        if shard in self._shards:
            await self._shards[shard].writer.wait_room()

    async def sync(self) -> None:
        self._check_open()
        for shard in list(self._shards.values()):
            await shard.writer.sync()

    def _on_topic_made(self, topic: Topic) -> None:
        if topic.policy.keep is not Keep.DISK:
            self._topics.forget(topic)
            raise ClientFault(kept_elsewhere(topic, "on disk"))
        self._made.append(topic)
        self._listener.on_topic_made(topic.info())

    def _record_made(self) -> None:
        """Topics that were made by one call are recorded together: a batch may make thousands."""
        if not self._made:
            return
        topics, self._made = self._made, []
        # Made again, one hides what was on its way to its predecessor, which no other record tells.
        floors = [
            records.PartitionAt(*part.key, part.next_offset, part.floor)
            for topic in topics
            for part in topic.partitions
            if part.floor > 1
        ]
        recorded = self._catalogue.add_made(lambda: [*map(made, topics), *floors])
        self._unrecorded.update(dict.fromkeys((topic.name for topic in topics), recorded))

        def done(future: asyncio.Future[None]) -> None:
            for topic in topics:
                if self._unrecorded.get(topic.name) is future:
                    del self._unrecorded[topic.name]
                if future.exception() is not None:
                    self._topics.forget(topic)
                    self._listener.on_topic_deleted(topic.name)

        recorded.add_done_callback(done)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

    # --- Reading ---

    async def read(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 2**20
    ) -> Page:
        self._check_open()
        found = self._topics.partition(topic, partition)
        check_offset(offset)
        return await self._shard(found.shard).read(found, offset, bytes_max)

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = SCAN_BYTES
    ) -> ShardPage:
        self._check_open()
        return await self._known_shard(shard).read_entries(position, bytes_max)

    async def bounds(self, topic: str, partition: int) -> Bounds:
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

    def floor(self, topic: str, partition: int) -> int:
        """Below this offset messages are hidden: purged, or of a topic that was deleted before it was made again."""
        return self._topics.partition(topic, partition).floor

    def next_offset(self, topic: str, partition: int) -> int:
        """What follows the partition's last message that readers can see."""
        return self._topics.partition(topic, partition).visible_next

    @property
    def epoch(self) -> int:
        """This opening's term of ownership."""
        return self._state.epoch

    def policy(self, name: str) -> Policy:
        """How a topic that exists is kept."""
        topic = self._topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return topic.policy

    def has_topic(self, name: str) -> bool:
        return self._topics.find(name) is not None

    def newest_term(self, producer: str) -> int:
        """The highest term of a named publisher in any shard; -1 if it is not known."""
        return max((shard.producers.term(producer) for shard in self._shards.values()), default=-1)

    def entries(self, shard: ShardId) -> Bounds:
        """The first entry of a shard and the next to come."""
        return self._known_shard(shard).entries()

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Messages of a shard from an entry on whose topics match: right, or too high."""
        self._check_open()
        return await self._known_shard(shard).count(entry, patterns, turn)

    def count_stamp(self, shard: ShardId) -> tuple[int, int]:
        """While this is the same, so is `count`."""
        known = self._known_shard(shard)
        return known.entries().next_offset, known.hidings

    def _known_shard(self, shard: ShardId) -> Shard:
        known = self._shards.get(shard)
        if known is None:
            if not self._topics.uses(shard):
                raise UnknownTopicError(f"there is no shard {shard}")
            known = self._shard(shard)  # nothing has been published there yet
        return known

    def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        """These messages of one shard, an offset a partition: the batches that hold them, a few at a time.

        Each batch is read once, however many of its messages are wanted. What is not there is left out; the last
        message of a topic that keeps last values is there, however old it is.
        """
        self._check_open()
        lasting = {
            key: partition
            for key, offset in wanted.items()
            if (partition := self._find_partition(key)) is not None
            and offset == partition.visible_next - 1
            and self._last_keeper.keeps(partition)
        }
        return self._known_shard(shard).messages_at(wanted, lasting, self._last_values.at)

    async def last(self, topic: str, partition: int) -> Batch | None:
        """The last message of a partition, if the log still has it or its topic keeps last values."""
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await only(self.messages_at(found.shard, {found.key: found.visible_next - 1}))

    # --- Topics ---

    def topics_owned_by(self, owner: str) -> int:
        """How many there are that this token made."""
        return self._topics.owned_by(owner)

    def topics(self) -> list[TopicInfo]:
        return [topic.info() for topic in self._topics if not topic.is_deleted]

    def topic(self, name: str) -> TopicInfo:
        found = self._topics.find(name)
        if found is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return found.info()

    async def ensure_topic(self, name: str) -> TopicInfo:
        """The topic, made now if there is none; it is recorded when this returns."""
        self._check_open()
        try:
            topic = self._topics.ensure(name)
        finally:
            self._record_made()
        if name in self._unrecorded:
            await asyncio.shield(self._unrecorded[name])  # batches wait for it too
        return topic.info()

    async def purge_topic(self, name: str) -> None:
        """Hide all messages that are there now; their room is freed by and by."""
        self._check_open()
        await self._removal.purge(name)

    async def delete_topic(self, name: str) -> None:
        """Hide the topic and its messages. Made again, it goes on after its last offset."""
        self._check_open()
        await self._removal.delete(name)

    # --- Cursors ---

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        """Store a named position. It holds retention back for what lies behind it, until removed."""
        self._check_open()
        cursor = self._cursors.make(name, positions, self._clock.time_ns(), owner)
        await self._catalogue.add(
            records.CursorSet(cursor), apply=lambda: self._cursors.put(cursor)
        )

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        await self._catalogue.add(
            records.CursorRemoved(name), apply=lambda: self._cursors.remove(name)
        )

    def cursors_owned_by(self, owner: str) -> int:
        """How many there are that this token made."""
        return self._cursors.owned_by(owner)

    def cursor_owner(self, name: str) -> str | None:
        """The token that made a cursor; None: there is no such cursor."""
        return self._cursors.owner(name)

    def cursors(self) -> list[Cursor]:
        return self._cursors.all()

    # --- Subscriptions ---

    async def set_subscription(self, name: str, content: bytes) -> None:
        """Store the definition of a durable subscription, or another one in its place."""
        self._check_open()
        self._subscriptions.check(name)
        await self._catalogue.add(
            records.SubscriptionSet(name, content),
            apply=lambda: self._subscriptions.put(name, content),
        )

    async def remove_subscription(self, name: str) -> None:
        self._check_open()
        await self._catalogue.add(
            records.SubscriptionRemoved(name), apply=lambda: self._subscriptions.remove(name)
        )

    def subscriptions(self) -> dict[str, bytes]:
        """Definitions by name."""
        return self._subscriptions.all()

    def state(self, shard: ShardId) -> StateJournal:
        """Where subscriptions write down what they have done in this shard."""
        return self._states.of(shard)

    # --- Rules ---

    async def follow_rules(self) -> Sequence[Difference]:
        """Rotate and retain as the rules say now; what stays as it was made, though they say otherwise."""
        self._check_open()
        for shard_id, shard in self._shards.items():
            shard.use_policy(self._policies.for_journal(shard_id.journal, keep=Keep.DISK))
        return await self._topics.follow_rules()

    # --- Copies ---

    async def checkpoint(self) -> tuple[str, str]:
        """Every file as of one moment, in a folder of the data directory: its path, and the checkpoint's id.

        Stays until `drop_checkpoint`; ClientFault while there is one. Publishers wait for as long as it takes to make
        a link for each file.
        """
        self._check_open()
        if self._has_checkpoint:
            raise ClientFault("a copy of this broker is being made; wait until it is done")
        self._has_checkpoint = True
        contents_id = uuid4().hex
        try:
            async with self._at_rest():
                prefix = f"{self._directory}/"
                ends = {
                    path.removeprefix(prefix): end
                    for shard in self._shards.values()
                    for path, end in shard.growing_ends().items()
                }
                contents = checkpoint.Contents(contents_id, self._clock.time_ns(), ends)
                path = await self._workers.submit(checkpoint.make, self._directory, contents)
        except OSError as error:
            self._has_checkpoint = False
            raise Unavailable(
                f"a checkpoint could not be made: {error.strerror or error}"
            ) from error
        except BaseException:
            self._has_checkpoint = False
            raise
        return path, contents_id

    async def drop_checkpoint(self) -> None:
        """Remove the checkpoint's files, and let another be made."""
        try:
            await self._workers.submit(checkpoint.discard, self._directory)
        finally:
            self._has_checkpoint = False

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        """Nothing is written to any file meanwhile; whoever wants something stored waits."""
        async with self._resting, AsyncExitStack() as ends:
            self._check_open()
            # First what may take long and keeps no publisher waiting.
            undisturbed: set[ShardId] = set()
            while undisturbed != self._shards.keys():
                for shard_id, shard in list(self._shards.items()):
                    if shard_id not in undisturbed:
                        await ends.enter_async_context(shard.undisturbed())
                        undisturbed.add(shard_id)
            self._paused = []
            ends.callback(self._resume_writers)
            for shard in list(self._shards.values()):  # those made from now on begin paused
                await shard.writer.pause()
                self._paused.append(shard.writer)
            # Last: the writers may have waited for these.
            ends.callback(self._states.resume)
            await self._states.pause()
            ends.callback(self._catalogue.resume)
            await self._catalogue.pause()
            yield

    def _resume_writers(self) -> None:
        assert self._paused is not None
        paused, self._paused = self._paused, None
        for writer in paused:
            writer.resume()

    # --- Where partitions live ---

    def _shard_of(self, key: TopicPartition) -> ShardId | None:
        partition = self._find_partition(key)
        return None if partition is None else partition.shard

    def _find_partition(self, key: TopicPartition) -> Partition | None:
        topic = self._topics.find(key[0])
        if topic is None or key[1] >= len(topic.partitions):
            return None
        return topic.partitions[key[1]]

    # --- Keeping house ---

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        """Apply retention to one shard."""
        self._check_open()
        return await self._known_shard(shard).trim()

    async def trim(self) -> Trimmed:
        self._check_open()
        return Trimmed.of([await shard.trim() for shard in list(self._shards.values())])

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        """Take a shard that became read-only through recovery; returns what was found damaged."""
        self._check_open()
        opened = await self._known_shard(shard).reopen()
        damage = [str(bad) for item in opened for bad in item.damage]
        self._damage += damage[: max(0, _DAMAGE_SHOWN_MAX - len(self._damage))]
        return damage

    def shards(self) -> list[ShardId]:
        return list(self._shards)

    def statistics(self) -> Statistics:
        return Statistics(
            topics=len(self._topics),
            shards=[shard.statistics() for shard in self._shards.values()],
            open_files=len(self._files),
            damage=list(self._damage),
        )

    def _on_damage(self, damage: Damage) -> None:
        if len(self._damage) < _DAMAGE_SHOWN_MAX and str(damage) not in self._damage:
            self._damage.append(str(damage))

    def _snapshot(self) -> list[Record]:
        """In a worker: what a new file of the catalogue begins with."""
        checkpoints = [shard.checkpoint() for shard in list(self._shards.values())]
        return self._state.snapshot(self._clock.time_ns(), checkpoints)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        async with self._resting:  # a checkpoint that is being made is soon done
            await self._close()

    async def _close(self) -> None:
        try:
            for shard in self._shards.values():
                shard.writer.refuse(ClosedError("the log is closed"))
            # All of them before any failure is told: nobody may be left without an answer.
            outcomes = await asyncio.gather(
                *(shard.close() for shard in self._shards.values()),
                self._states.close(),
                return_exceptions=True,
            )
            await self._tasks.wait()
            failure = next((item for item in outcomes if item is not None), None)
            await self._catalogue.close(*(() if failure else (records.Closed(self._state.epoch),)))
            await self._workers.submit(self._marks.close)
            if failure is not None:
                raise failure
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._catalogue.let_go()
        self._states.let_go()
        self._marks.let_go()
        self._files.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
