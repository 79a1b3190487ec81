"""All shards of a data directory: opened and recovered, topics and cursors recorded, batches sent to their shard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runnel.config import Keep, Settings
from runnel.errors import (
    ClientFault,
    ClosedError,
    FormatVersionError,
    UnknownTopicError,
)
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import BODY_BYTES_CEILING
from runnel.log import catalogue as records
from runnel.log import paths
from runnel.log.catalogue import Catalogue, Record
from runnel.log.cursors import CursorTable
from runnel.log.files import Files
from runnel.log.index import Key
from runnel.log.last_values import LastValues, fits
from runnel.log.log import (
    Appended,
    Bounds,
    Cursor,
    CursorPosition,
    Level,
    Page,
    Position,
    ShardId,
    ShardPage,
    Statistics,
    TopicInfo,
    Trimmed,
)
from runnel.log.producers import ProducerTable
from runnel.log.scan import Damage
from runnel.log.segments import IndexCache, Opened, SegmentFolder, write_whole
from runnel.log.shard import Shard
from runnel.log.tasks import OwnedTasks
from runnel.log.topic_table import Partition, Topic, TopicTable
from runnel.log.writer import Parts
from runnel.topics.policies import Difference, FixedPolicy, Policies
from runnel.world.clock import Clock
from runnel.world.disk import Access, Disk, DiskLock
from runnel.world.workers import Workers

FORMAT: Final = 1
_DAMAGE_SHOWN_MAX: Final = 100
# A plain body has 4 bytes a message or more. A compressed one may have next to none, but not more than this.
_DAMAGED_MESSAGES_MAX: Final = BODY_BYTES_CEILING // 4


class Recovered(msgspec.Struct, frozen=True):
    """What opening found: nothing to tell after a clean close."""

    was_clean: bool
    torn: Sequence[str]  # tails that a crash left, cut off
    damage: Sequence[str]  # stored once, unreadable now
    differences: Sequence[Difference]  # topics whose fixed policy the rules would choose otherwise


class _FormatFile(msgspec.Struct):
    format: int


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
    ) -> None:
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
        self._made_folders: set[ShardId] = set()
        self._cursors = CursorTable(settings.limits.cursors_max, self._shard_of)
        self._last_values = LastValues()
        self._catalogue = Catalogue(
            disk,
            workers,
            f"{self._directory}/{paths.CATALOGUE}",
            bytes_max=settings.log.catalogue_log_bytes_max,
            snapshot=self._snapshot,
        )
        self._epoch = 0
        self._unrecorded: dict[
            str, asyncio.Future[None]
        ] = {}  # topics on their way to the catalogue
        self._damage: list[str] = []
        self._lock: DiskLock | None = None
        self._is_closed = False
        self.recovered = Recovered(was_clean=True, torn=(), damage=(), differences=())

    # --- Opening ---

    @classmethod
    async def open(
        cls,
        directory: str,
        *,
        settings: Settings,
        policies: Policies,
        disk: Disk,
        clock: Clock,
        workers: Workers,
    ) -> DiskLog:
        """Lock the directory, recover what a crash left, and begin a new epoch.

        LockedError if another process has it, FormatVersionError if a newer Runnel wrote it.
        """
        log = cls(directory, settings, policies, disk, clock, workers)
        try:
            await log._open()
        except BaseException:
            log._let_go()
            raise
        return log

    async def _open(self) -> None:
        await self._workers.submit(self._claim)
        loaded = await self._workers.submit(self._catalogue.open)
        is_clean = False
        checkpoints: list[records.ShardAt] = []
        for record in loaded.records:
            is_clean = isinstance(record, records.Closed)
            self._apply(record, checkpoints)
        self._epoch += 1
        damage = [str(item) for item in loaded.damage]
        found = await self._workers.submit(self._find_shards, damage, is_clean)
        torn = [str(loaded.torn)] if loaded.torn else []
        passed_over: list[Record] = []
        for shard_id, opened in found:
            self._load_shard(shard_id, opened, checkpoints)
            if opened and opened[-1].damage:
                passed_over += self._pass_over_damage(self._shard(shard_id), opened[-1])
            torn += [str(item.torn) for item in opened if item.torn]
            damage += [str(bad) for item in opened for bad in item.damage]
        with_segments = {shard_id for shard_id, _ in found}
        for checkpoint in checkpoints:
            shard_id = ShardId(checkpoint.journal, checkpoint.shard)
            if shard_id not in with_segments:
                self._shard(shard_id).restore(checkpoint)
        # A record at the end that rots looks like one that was torn; a file may be missing altogether.
        is_incomplete = bool(loaded.damage or loaded.torn or not loaded.records)
        if is_incomplete:
            await self._reconcile()
        for shard in self._shards.values():
            await self._workers.submit(shard.resume)
        self._mark_hidden()
        self._damage = damage[:_DAMAGE_SHOWN_MAX]
        if is_incomplete and found:
            with suppress(OSError):  # then it is found damaged again
                await self._workers.submit(self._catalogue.renew)
        await self._catalogue.add(*passed_over, records.Opened(self._epoch, self._clock.time_ns()))
        is_new = not loaded.records
        was_clean = (is_clean or is_new) and not torn and not damage
        self.recovered = Recovered(was_clean, torn, damage, self._differences())

    def _claim(self) -> None:
        self._disk.make_directory(self._directory)
        self._lock = self._disk.lock(f"{self._directory}/{paths.LOCK_FILE}")
        path = f"{self._directory}/{paths.FORMAT_FILE}"
        if paths.FORMAT_FILE in self._disk.list(self._directory):
            check_format(self._disk, path)
        else:
            write_whole(self._disk, path, msgspec.json.encode(_FormatFile(FORMAT)))
            self._disk.sync_directory(self._directory)

    def _apply(self, record: Record, checkpoints: list[records.ShardAt]) -> None:
        match record:
            case records.TopicMade(name, keep, partitions, journal):
                fixed = FixedPolicy(keep=keep, partitions=partitions, journal=journal)
                self._topics.restore(name, self._policies.for_recorded(name, fixed))
            case records.TopicDeleted(name):
                self._topics.delete(name)
                self._last_values.forget(name)
            case records.PartitionAt(topic, partition, next_offset, floor):
                at = self._topics.recorded_partition(topic, partition)
                if at is not None:
                    at.advance(next_offset)
                    at.floor = max(at.floor, floor)
            case records.Opened(epoch, _):
                self._epoch = max(self._epoch, epoch)
            case records.ShardAt():
                checkpoints.append(record)
                for topic, partition, next_offset in record.offsets:
                    at = self._topics.recorded_partition(topic, partition)
                    if at is not None:
                        at.advance(next_offset)
            case records.CursorSet(cursor):
                self._cursors.put(cursor)
            case records.CursorRemoved(name):
                self._cursors.remove(name)
            case records.LastValue(topic, partition, block):
                self._last_values.put((topic, partition), block)
            case records.Closed():
                pass

    def _find_shards(
        self,
        damage: list[str],
        is_clean: bool,  # noqa: FBT001 - workers take no keywords
    ) -> list[tuple[ShardId, list[Opened]]]:
        """In a worker: every shard on disk, its last segment mended if a crash cut it."""
        recorded = {paths.folder_name(topic.policy.journal): topic for topic in self._topics}
        found = []
        root = f"{self._directory}/{paths.JOURNALS}"
        for name in self._disk.list(root):
            folder = f"{root}/{name}"
            children = self._disk.list(folder)
            if paths.NAME_FILE not in children:
                continue  # a crash before anything was stored in it: the name comes first
            path = f"{folder}/{paths.NAME_FILE}"
            with self._files.use(path, Access.READ) as file:
                journal = file.read(0, file.size()).decode(errors="replace")
            if paths.folder_name(journal) != name:
                damage.append(str(Damage(path, 0, len(journal), "does not name this folder")))
                known = recorded.get(name)
                journal = known.policy.journal if known else paths.journal_name(name)
            for child in children:
                if child.isdecimal():
                    shard = SegmentFolder(self._disk, self._files, f"{folder}/{child}")
                    opened = shard.open_all(is_clean=is_clean)
                    found.append((ShardId(journal, int(child)), opened))
        return found

    def _load_shard(
        self,
        shard_id: ShardId,
        opened: Sequence[Opened],
        checkpoints: Sequence[records.ShardAt],
    ) -> None:
        shard = self._shard(shard_id)
        for checkpoint in checkpoints:
            if (checkpoint.journal, checkpoint.shard) == (shard_id.journal, shard_id.shard):
                shard.restore(checkpoint)
        shard.load(opened)
        for found in opened:
            shard.replay(found)
            if found.segment.growing is not None:
                for key, next_offset in found.segment.growing.next_offsets().items():
                    self._partition_found(shard_id, key).advance(next_offset)

    def _pass_over_damage(self, shard: Shard, last: Opened) -> list[Record]:
        """What damaged bytes of the last segment may have held, nobody knows: leave its numbers out.

        Segments before it do not matter: the catalogue knows where each of them ended.
        """
        growing = last.segment.growing
        blocks = [bad for bad in last.damage if bad.position]  # without the segment's header
        if growing is None or not blocks:
            return []
        begin = max(bad.position for bad in blocks)
        size = sum(bad.size for bad in blocks)
        shard.writer.skip_entries(size // block.HEADER_BYTES + 1)
        found: list[Record] = [shard.checkpoint()]
        for topic in self._topics:
            for part in topic.partitions:
                if part.shard == shard.id and growing.last_position(part.key) < begin:
                    part.advance(part.next_offset + size // 4 + _DAMAGED_MESSAGES_MAX)
                    found.append(records.PartitionAt(*part.key, part.next_offset, part.floor))
        return found

    def _partition_found(self, shard: ShardId, key: Key) -> Partition:
        """The partition of messages met in a segment; made anew if the catalogue has lost it."""
        topic, number = key
        partition = self._topics.recorded_partition(topic, number)
        if partition is not None:
            return partition
        rules = self._policies.for_topic(topic)
        fixed = FixedPolicy(
            keep=Keep.DISK, partitions=max(rules.partitions, number + 1), journal=shard.journal
        )
        restored = self._topics.restore(topic, self._policies.for_recorded(topic, fixed))
        return restored.partitions[number]

    async def _reconcile(self) -> None:
        """The catalogue is damaged: learn from all segments what it may have forgotten."""
        for shard in self._shards.values():
            for key, next_offset in await shard.next_offsets():
                self._partition_found(shard.id, key).advance(next_offset)

    def _mark_hidden(self) -> None:
        for topic in self._topics:
            for partition in topic.partitions:
                if topic.is_deleted or partition.floor > 1:
                    shard = self._shards.get(partition.shard)
                    if shard is not None:
                        shard.hide()

    def _differences(self) -> list[Difference]:
        return [
            difference
            for topic in self._topics
            if not topic.is_deleted
            for difference in self._policies.differences(topic.name, topic.policy.fixed)
        ]

    def _shard(self, shard_id: ShardId) -> Shard:
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = self._new_shard(shard_id)
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
                self._epoch,
            ),
            self._policies.for_journal(shard_id.journal, keep=Keep.DISK),
            SegmentFolder(self._disk, self._files, folder),
            self._cache,
            producers(),
            producers(),
            make_folder=lambda: self._make_folder(shard_id, folder),
            find=self._find_partition,
            holds=lambda: self._cursors.holds_on(shard_id),
            before_removal=self._keep_last_values,
            on_damage=self._on_damage,
        )

    def _make_folder(self, shard_id: ShardId, folder: str) -> None:
        """In a worker: the journal's folder, with its real name in a file, before its first segment."""
        if shard_id in self._made_folders:
            return
        journal = paths.journal_folder(self._directory, shard_id.journal)
        self._disk.make_directory(journal)
        if paths.NAME_FILE not in self._disk.list(journal):
            write_whole(self._disk, f"{journal}/{paths.NAME_FILE}", shard_id.journal.encode())
        self._disk.sync_directory(journal)  # also for one who was killed before he could
        self._disk.make_directory(folder)
        self._made_folders.add(shard_id)

    # --- Appending ---

    def append(self, batch: Batch, level: Level = Level.STORED) -> asyncio.Future[Appended]:
        self._check_open()
        partitions = self._topics.resolve(batch.envelope)
        shard = self._shards.get(partitions[0].shard) or self._shard(partitions[0].shard)
        unrecorded: Sequence[asyncio.Future[None]] = ()
        if self._unrecorded:
            names = dict.fromkeys(batch.envelope.topics)
            unrecorded = [self._unrecorded[name] for name in names if name in self._unrecorded]
        return shard.append(batch, partitions, level, unrecorded)

    async def wait_room(self, shard: ShardId) -> None:
        self._check_open()
        if shard in self._shards:
            await self._shards[shard].writer.wait_room()

    async def sync(self) -> None:
        self._check_open()
        for shard in list(self._shards.values()):
            await shard.writer.wait_idle()

    def _on_topic_made(self, topic: Topic) -> None:
        fixed = topic.policy.fixed
        if fixed.keep is not Keep.DISK:
            self._topics.forget(topic)
            raise ClientFault(f"topic {topic.name!r} is kept in {fixed.keep}, not on disk")
        recorded = self._unrecorded[topic.name] = self._catalogue.add(
            records.TopicMade(topic.name, fixed.keep, fixed.partitions, fixed.journal),
            # Made again, it hides what was on its way to its predecessor, which no other record tells.
            *(
                records.PartitionAt(*part.key, part.next_offset, part.floor)
                for part in topic.partitions
                if part.floor > 1
            ),
        )

        def done(future: asyncio.Future[None]) -> None:
            if self._unrecorded.get(topic.name) is future:
                del self._unrecorded[topic.name]
            if future.exception() is not None:
                self._topics.forget(topic)

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
        return await self._shard(found.shard).read(found, offset, bytes_max)

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = 2**20
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

    def entries(self, shard: ShardId) -> Bounds:
        """The first entry of a shard and the next to come."""
        return self._known_shard(shard).entries()

    def _known_shard(self, shard: ShardId) -> Shard:
        known = self._shards.get(shard)
        if known is None:
            if not self._topics.uses(shard):
                raise UnknownTopicError(f"there is no shard {shard}")
            known = self._shard(shard)  # nothing has been published there yet
        return known

    async def last(self, topic: str, partition: int) -> Batch | None:
        """The last message of a partition, if the log still has it or its topic keeps last values."""
        self._check_open()
        found = self._topics.partition(topic, partition)
        shard = self._shard(found.shard)
        bounds = await shard.bounds(found)
        keeps = self._keeps_last(found)
        if bounds.first_offset < bounds.next_offset or keeps:
            message = await shard.last(found)
            if message is not None or not keeps:
                return message
            return self._last_values.of(found)
        return None

    # --- Topics ---

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
        topic = self._topics.ensure(name)
        if name in self._unrecorded:
            await asyncio.shield(self._unrecorded[name])  # batches wait for it too
        return topic.info()

    async def purge_topic(self, name: str) -> None:
        """Hide all messages that are there now; their room is freed by and by."""
        self._check_open()
        topic = self._topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        floors = [(partition, partition.visible_next) for partition in topic.partitions]

        def apply() -> None:
            for partition, floor in floors:
                partition.floor = max(partition.floor, floor)
                self._shard(partition.shard).hide()
            self._last_values.forget(name)

        await self._catalogue.add(
            *(records.PartitionAt(*part.key, floor, floor) for part, floor in floors), apply=apply
        )

    async def delete_topic(self, name: str) -> None:
        """Hide the topic and its messages. Made again, it goes on after its last offset."""
        await self.purge_topic(name)
        await self._catalogue.add(
            records.TopicDeleted(name), apply=lambda: self._topics.delete(name)
        )

    # --- Last values ---

    def _keeps_last(self, partition: Partition) -> bool:
        topic = self._topics.find(partition.key[0])
        return topic is not None and topic.policy.last_value

    async def _keep_last_values(self, partitions: Sequence[Partition]) -> None:
        """Their last messages are about to go with a segment: the catalogue takes them over."""
        kept: list[records.LastValue] = []
        for partition in partitions:
            if self._keeps_last(partition):
                message = await self._shard(partition.shard).last(partition)
                if message is not None and fits(message, self._settings.log):
                    kept.append(records.LastValue(*partition.key, message.pack()))

        def apply() -> None:
            for value in kept:
                self._last_values.put((value.topic, value.partition), value.block)

        if kept:
            await self._catalogue.add(*kept, apply=apply)

    # --- Cursors ---

    async def set_cursor(self, name: str, positions: Sequence[CursorPosition]) -> None:
        """Store a named position. It holds retention back for what lies behind it, until removed."""
        self._check_open()
        cursor = self._cursors.make(name, positions, self._clock.time_ns())
        await self._catalogue.add(
            records.CursorSet(cursor), apply=lambda: self._cursors.put(cursor)
        )

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        await self._catalogue.add(
            records.CursorRemoved(name), apply=lambda: self._cursors.remove(name)
        )

    def cursors(self) -> list[Cursor]:
        return self._cursors.all()

    def _shard_of(self, key: Key) -> ShardId | None:
        partition = self._find_partition(key)
        return None if partition is None else partition.shard

    def _find_partition(self, key: Key) -> Partition | None:
        topic = self._topics.find(key[0])
        if topic is None or key[1] >= len(topic.partitions):
            return None
        return topic.partitions[key[1]]

    # --- Keeping house ---

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
        """In a worker: everything the catalogue must know, from memory. Only what is stored counts."""
        found: list[Record] = [records.Opened(self._epoch, self._clock.time_ns())]
        for topic in list(self._topics):
            fixed = topic.policy.fixed
            found.append(records.TopicMade(topic.name, fixed.keep, fixed.partitions, fixed.journal))
            found += [
                records.PartitionAt(*part.key, part.visible_next, part.floor)
                for part in topic.partitions
                if part.visible_next > 1
            ]
            if topic.is_deleted:
                found.append(records.TopicDeleted(topic.name))
        found += [shard.checkpoint() for shard in list(self._shards.values())]
        found += [records.CursorSet(cursor) for cursor in self._cursors.all()]
        found += [records.LastValue(*key, value) for key, value in self._last_values.items()]
        return found

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for shard in self._shards.values():
                shard.writer.refuse(ClosedError("the log is closed"))
            # All of them before any failure is told: nobody may be left without an answer.
            outcomes = await asyncio.gather(
                *(shard.close() for shard in self._shards.values()), return_exceptions=True
            )
            await self._tasks.wait()
            failure = next((item for item in outcomes if item is not None), None)
            await self._catalogue.close(*(() if failure else (records.Closed(self._epoch),)))
            if failure is not None:
                raise failure
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._files.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def check_format(disk: Disk, path: str) -> None:
    """FormatVersionError unless this Runnel can read the data directory."""
    file = disk.open(path, Access.READ)
    try:
        found = msgspec.json.decode(file.read(0, 4096), type=_FormatFile)
    except msgspec.DecodeError as error:
        raise FormatVersionError(
            f"{path} does not say which format this directory has: {error}"
        ) from None
    finally:
        file.close()
    if found.format != FORMAT:
        raise FormatVersionError(
            f"{path}: the directory has format {found.format}, this Runnel reads format {FORMAT}; "
            "use the Runnel that wrote it, or a newer one"
        )
