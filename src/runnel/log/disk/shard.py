"""`DiskShard`: one shard on disk, with its segments, writer, reader and trimmer."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar

from runnel.errors import (
    OffsetAheadError,
    OffsetGoneError,
    ProducerFault,
    RunnelError,
    Unavailable,
)
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.disk.message_picker import MessagePicker
from runnel.log.disk.reader import ShardReader
from runnel.log.disk.trimmer import ShardTrimmer
from runnel.log.disk.writer import ShardParts, ShardWriter
from runnel.log.log import (
    Appended,
    Chosen,
    EntryPage,
    Level,
    OffsetBounds,
    PartitionPage,
    Position,
    ShardId,
    ShardStatistics,
    Trimmed,
    Turn,
)
from runnel.log.losses.shard_losses import ShardLosses
from runnel.log.match_count import MessageCounter
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.producers import ProducerTable, check_same_batch
from runnel.log.metadata.recorded_shard import RecordedShard, shard_snapshot
from runnel.log.metadata.records import ShardAt, ShardRecord
from runnel.log.metadata.topic_table import Partition, Topic
from runnel.log.retention import rules
from runnel.log.retention.holds import ShardHolds
from runnel.log.retention.rewriter import KeepOffsets
from runnel.log.retention.rules import IsServed
from runnel.log.segments import paths
from runnel.log.segments.index import Index, StaleIndexError
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import IndexCache, OpenedSegment, Segment, SegmentFolder
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy

_READ_ATTEMPTS = 3
_T = TypeVar("_T")


class DiskShard:
    """Appends to, reads and trims one shard, for one term of ownership. Decides which messages readers get."""

    def __init__(
        self,
        shard: ShardId,
        parts: ShardParts,
        policy: JournalPolicy,
        folder: SegmentFolder,
        cache: IndexCache,
        producers: ProducerTable,
        stored_producers: ProducerTable,
        *,
        make_folder: Callable[[], None],
        of_journal: Callable[[], Sequence[DiskShard]],
        find: Callable[[TopicPartition], Partition | None],
        partitions: Callable[[], Iterable[tuple[Topic, Partition]]],
        shard_holds: ShardHolds,
        before_removal: Callable[[DiskShard, Sequence[Partition]], Awaitable[None]],
        on_damage: Callable[[Damage], None],
    ) -> None:
        """`find` looks up a partition; `partitions` walks over all that lie in the shard."""
        self.id = shard
        self.epoch = parts.epoch
        self.catalogue = parts.catalogue
        self.catalogue.snapshot = self._snapshot
        self.last_values = LastValues()
        self._partitions = partitions
        self.policy = policy
        self.producers = producers
        self.stored_producers = stored_producers
        self._parts = parts
        self._folder = folder
        self._cache = cache
        self._find = find
        self._shard_holds = shard_holds
        self._segments: list[Segment] = []
        self._report_damage = on_damage
        self.losses = ShardLosses(parts.disk, folder.folder, make_folder)
        self.writer = ShardWriter(
            shard, parts, policy, folder, self._segments, producers, stored_producers, make_folder
        )
        self._reader = ShardReader(
            folder, parts.files, parts.workers, cache, self._segments, self._on_damage
        )
        self.trimmer = ShardTrimmer(
            shard,
            parts,
            policy,
            folder,
            cache,
            self._segments,
            self.writer,
            self._reader,
            self.losses,
            of_journal=lambda: [each.trimmer for each in of_journal()],
            find=find,
            shard_holds=shard_holds,
            before_removal=lambda partitions: before_removal(self, partitions),
            on_damage=self._on_damage,
            on_removed=self._forget_first_offsets,
        )
        self._counter = MessageCounter(self._reader, parts.workers, find)
        self.hide_count = 0  # rises whenever messages are hidden
        self.has_hidden = False  # purged or deleted messages may lie here
        self._resumed: Segment | None = None  # its index on disk is whole until something is stored
        # Replaced when messages may have been removed.
        self._first_offsets: dict[TopicPartition, int] = {}

    def use_policy(self, policy: JournalPolicy) -> None:
        """Rotate and retain by this policy from now on."""
        self.policy = policy
        self.writer.use_policy(policy)
        self.trimmer.use_policy(policy)
        self._first_offsets = {}  # another age may hide more, or less

    # --- Opening and closing ---

    def load(self, opened: Sequence[OpenedSegment]) -> None:
        """Take over segments found on disk. The last one, if it has room, is written to again."""
        for found in opened:
            self._segments.append(found.segment)
            if found.segment.growing is not None and found is not opened[-1]:
                self.writer.unsealed.append(found.segment)
            self.writer.continue_from(found.segment.last_entry + 1, found.segment.last_time_ns)
            self.writer.last_number = max(self.writer.last_number, found.segment.number)

    def restore(self, recorded: RecordedShard) -> None:
        """Restore the shard from its catalogue. Later segments are replayed on top."""
        for checkpoint in recorded.checkpoints:
            self.writer.continue_from(checkpoint.next_entry, checkpoint.last_time_ns)
            self.producers.load(checkpoint.producers)
            self.stored_producers.load(checkpoint.producers)
        for key, block in recorded.last_values.items():
            self.last_values.put(key, block)

    def replay(self, found: OpenedSegment) -> None:
        """Record the named publishers' batches found while a segment was scanned."""
        for seen in found.producers:
            for table in (self.producers, self.stored_producers):
                table.replay(seen.producer, seen.term, seen.number, seen.entry, seen.time_ns)

    def checkpoint(self) -> ShardAt:
        """The record of what is stored in the shard. Offsets are recorded per partition."""
        return ShardAt(
            self.id.journal,
            self.id.shard,
            self.writer.visible_next_entry,
            self.writer.last_time_ns,
            [],
            self.stored_producers.states(),
        )

    def _snapshot(self) -> list[ShardRecord]:
        return self.snapshot(self._partitions())

    def snapshot(self, partitions: Iterable[tuple[Topic, Partition]]) -> list[ShardRecord]:
        """The records that a file of the catalogue begins with, for the partitions of the shard. Runs in a worker."""
        return shard_snapshot(
            self.epoch if self.writer.is_begun else self.epoch - 1,
            self._parts.clock.time_ns(),
            self.checkpoint(),
            partitions,
            self.last_values,
        )

    async def next_offsets(self) -> list[tuple[TopicPartition, int]]:
        """The offset behind the last message of every topic-partition, segment by segment."""
        found: list[tuple[TopicPartition, int]] = []
        for segment in list(self._segments):
            index = await self._reader.index(segment)
            found += [(key, index.next_offset(key)) for key in index.keys()]  # noqa: SIM118
        return found

    def resume(self) -> None:
        """Make a sealed last segment writable again, if it has room. Runs in a worker."""
        last = self._segments[-1] if self._segments else None
        if last is None or last.growing is not None or last.is_short:
            return
        if last.end < self.policy.rotate.bytes_max:
            last.growing = self._folder.resume_index(last)
            self._resumed = last

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Within this context no segment is removed, rewritten or sealed. Messages are still stored."""
        async with self.trimmer.at_work, self.writer.sealing:
            yield

    def growing_ends(self) -> dict[str, int]:
        """The current ends of the segments that are not sealed yet, by path."""
        return {
            segment.path: segment.end for segment in self._segments if segment.growing is not None
        }

    async def close(self) -> None:
        """Store what is queued and seal the shard. It must refuse batches by now.

        Raises if it was dropped: it is left as a crash leaves it then.
        """
        try:
            async with self.trimmer.at_work:
                self.trimmer.stop()
                await self.writer.wait_idle()
                self.writer.check_kept()
                await self.seal_all()
                await self.save_losses()
            await self.catalogue.end(self.epoch)
        finally:
            self.catalogue.release()

    def drop(self, reason: RunnelError) -> None:
        """Give the shard up without writing anything more. `let_go` waits for what is under way."""
        self.trimmer.stop()
        self.writer.drop(reason)

    async def let_go(self) -> None:
        """After `drop`: wait until nothing touches a file of the shard any more."""
        await self.catalogue.abandon()  # first: the writer and the trimmer may be waiting for it
        async with self.trimmer.at_work, self.writer.sealing:
            await self.writer.wait_idle()

    def forget_files(self) -> None:
        """Close the shard's files, and drop its cached indexes: another log may replace them."""
        for segment in self._segments:
            self._parts.files.forget(segment.path)
            self._parts.files.forget(segment.index_path)
            self._cache.drop(segment.path)

    def index_of(self, segment: Segment) -> Index:
        """The index of any segment. Runs in a worker while there are no readers."""
        if segment.growing is not None:
            return segment.growing
        return self._folder.resume_index(segment)

    async def save_losses(self) -> None:
        """Store new losses. If that fails, the next start finds them again, or reports less."""
        # Numbers of missing segments are not used again.
        self.writer.last_number = max(self.writer.last_number, self.losses.remembered.last_number)
        if not self.losses.is_saved:
            with suppress(OSError):
                await self._parts.workers.submit(self.losses.save)

    def _on_damage(self, damage: Damage) -> None:
        """Remember damage that a reader found, so that the next start reports it too."""
        numbered = paths.segment_number(damage.path.rpartition("/")[2])
        if numbered is not None:
            self.losses.add_place(numbered[0], damage)
        self._report_damage(damage)

    async def seal_all(self) -> None:
        """Record and index everything on disk, so that the next start need not scan."""
        active = self.writer.active
        is_whole = active is self._resumed and not self.writer.is_begun
        if active is not None and not is_whole:
            await self.writer.checkpoint(active)
            self.writer.unsealed.append(active)
        for segment in list(self.writer.unsealed):
            await self.writer.seal(segment)

    async def reopen(self) -> Sequence[OpenedSegment]:
        """After a failed sync: cut off what is not known to be stored, then recover as at start."""
        async with self.trimmer.at_work, self.writer.sealing:
            await self.writer.wait_idle()
            self.writer.check_kept()
            opened = await self._parts.workers.submit(self._recover)
            if self.catalogue.is_broken:
                await self._parts.workers.submit(self.catalogue.renew)
            self._segments.clear()
            self.writer.unsealed.clear()
            self.load(opened)
            self._first_offsets = {}
            self.writer.accept_again()
            return opened

    def _recover(self) -> list[OpenedSegment]:
        active = self.writer.active
        if active is not None:
            with self._parts.files.use(active.path) as file:
                file.truncate(active.end)
                file.sync()
        if self._segments:
            self._folder.check_exists()
        self._folder.discard_beyond(self._segments[-1].number if self._segments else 0)
        return self._folder.open_all()

    # --- Appending ---

    def append(
        self,
        batch: Batch,
        partitions: Sequence[Partition],
        level: Level,
        unrecorded: Sequence[asyncio.Future[None]],
    ) -> asyncio.Future[Appended]:
        head = batch.envelope
        if head.producer is not None:
            repeated = self.producers.check(head.producer, head.term, head.number)
            if repeated is not None:
                return self._repeat(repeated.entry, head)
            level = Level.STORED
        return self.writer.append(batch, partitions, level, unrecorded)

    def _repeat(self, entry: int | None, repeated: Envelope) -> asyncio.Future[Appended]:
        if entry is not None and (queued := self.writer.repeat(entry, repeated)) is not None:
            return queued
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._parts.tasks.start(self._answer_repeated(future, entry, repeated))
        return future

    async def _answer_repeated(
        self, future: asyncio.Future[Appended], entry: int | None, repeated: Envelope
    ) -> None:
        try:
            answer = await self._original_answer(entry, repeated)
        except OSError as error:
            if not future.done():
                future.set_exception(Unavailable(f"entry {entry} cannot be looked up: {error}"))
        except ProducerFault as fault:
            if not future.done():
                future.set_exception(fault)
        else:
            if not future.done():
                future.set_result(answer)

    async def _original_answer(self, entry: int | None, repeated: Envelope) -> Appended:
        """Look up the answer to the original batch; without offsets if the batch is no longer complete.

        ProducerFault if the entry is another batch: answering `repeated` as a repetition would lose it.
        """
        unknown = Appended((), entry or 0, 0, 0, Level.STORED, is_repeated=True)
        if entry is None:
            return unknown
        try:
            page = await self._reader.read_entries(Position(0, entry), entry + 1, 0, 1, None)
        except FileNotFoundError:
            return unknown  # retention has removed it
        head = page.found[0].batch.envelope if page.found else None
        if head is None or head.entry != entry or head.rows:
            return unknown
        check_same_batch(head, repeated)
        return Appended(
            head.column64(head.base_offsets),
            entry,
            head.column64(head.epochs)[0],
            head.column64(head.receive_times)[0],
            Level.STORED,
            is_repeated=True,
        )

    # --- Reading ---

    def _is_served(self, now_ns: int) -> IsServed:
        return rules.served_at(
            now_ns,
            self.policy,
            floor_of=self._floor_of if self.has_hidden else None,
            holds=self._shard_holds.of_all_readers,
        )

    def _floor_of(self, key: TopicPartition) -> int | None:
        partition = self._find(key)
        return None if partition is None else partition.floor

    async def bounds(self, partition: Partition) -> OffsetBounds:
        first_offsets = self._first_offsets
        known = first_offsets.get(partition.key)
        if known is None:
            is_served = self._is_served(self._parts.clock.time_ns())
            next_offset = partition.visible_next
            known = await self._reader.first_offset(partition.key, partition.floor, is_served)
            if self.losses:
                lost = self.losses.first_offset(partition.key, partition.floor, is_served)
                known = min(
                    [offset for offset in (known, lost) if offset is not None], default=None
                )
            if known is None:
                return OffsetBounds(next_offset, next_offset)
            if self.policy.retain.age_ns is None:  # otherwise it moves with the clock
                first_offsets[partition.key] = known
        return OffsetBounds(known, partition.visible_next)

    async def offset_at(self, partition: Partition, time_ns: int) -> int:
        async def find() -> int:
            bounds = await self.bounds(partition)
            offset = await self._reader.offset_at(partition.key, time_ns)
            if offset is None:
                return bounds.next_offset
            return min(max(offset, bounds.first_offset), bounds.next_offset)

        return await _retry_removed(find)

    async def entry_at(self, time_ns: int) -> int:
        """The first entry received at this time or later; the next entry if there is none."""
        entry = await _retry_removed(lambda: self._reader.entry_at(time_ns))
        return self.writer.visible_next_entry if entry is None else entry

    def hide(self) -> None:
        """Note that messages of a partition have been hidden: purged, or deleted with their topic."""
        self.has_hidden = True
        self.hide_count += 1
        self._counter.forget()
        self._first_offsets = {}
        self.trimmer.recheck_all()

    async def read(self, partition: Partition, offset: int, bytes_max: int) -> PartitionPage:
        topic, number = partition.key
        for attempt in range(_READ_ATTEMPTS):
            bounds = await self.bounds(partition)
            if offset > bounds.next_offset:
                raise OffsetAheadError(topic, number, offset, bounds.next_offset)
            if offset < bounds.first_offset:
                raise OffsetGoneError(topic, number, offset, bounds.first_offset)
            if offset == bounds.next_offset:
                return PartitionPage((), offset)
            is_served = self._is_served(self._parts.clock.time_ns())
            is_last = attempt == _READ_ATTEMPTS - 1
            try:
                page = await self._reader.read(
                    partition.key,
                    offset,
                    bounds.next_offset,
                    bytes_max,
                    is_served,
                    is_mended=is_last,
                )
            except FileNotFoundError:  # retention has removed a segment: try again
                if is_last:
                    raise
                continue
            except StaleIndexError:
                await self._mend_indexes(partition.key)
                continue
            if self.losses:
                page = self.losses.add_gaps(
                    page,
                    partition.key,
                    offset,
                    bounds.next_offset,
                    partition.floor,
                    is_served,
                )
            if page.first_offset > offset:  # a hole, or messages removed during the read
                first_offset = (await self.bounds(partition)).first_offset
                if offset < first_offset:
                    raise OffsetGoneError(topic, number, offset, first_offset)
            return page
        raise AssertionError("the last attempt returns or raises")

    async def _mend_indexes(self, key: TopicPartition) -> None:
        for segment in list(self._segments):
            if segment.growing is None and not segment.is_short:
                index = await self._reader.index(segment)
                if index.next_offset(key):
                    await self._reader.rebuild_index(segment)

    def entries(self) -> OffsetBounds:
        """The first entry that retention has left, lost or not, and the entry behind the last stored one."""
        end = self.writer.visible_next_entry
        first = self._segments[0].first_entry if self._segments else end
        return OffsetBounds(min(first, self.losses.first_entry or first), end)

    async def count(self, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Count messages from this entry on whose topics match. The count is exact or too high."""
        return await self._counter.count(list(self._segments), entry, patterns, turn)

    def _check_position(self, position: Position) -> int:
        """The entry behind the last one. An error if the position is not between the ends."""
        bounds = self.entries()
        first, end = bounds.first_offset, bounds.next_offset
        if position.entry > end:
            raise OffsetAheadError(str(self.id), self.id.shard, position.entry, end)
        if position.entry < first:
            raise OffsetGoneError(str(self.id), self.id.shard, position.entry, first)
        return end

    def _served_filter(self) -> IsServed | None:
        """Decides which messages readers get; None: all of them."""
        if not self.has_hidden and self.policy.retain.age_ns is None:
            return None
        return self._is_served(self._parts.clock.time_ns())

    async def read_entries(self, position: Position, bytes_max: int) -> EntryPage:
        async def read() -> EntryPage:
            end = self._check_position(position)
            page = await self._reader.read_entries(
                position, end, self.epoch, bytes_max, self._served_filter()
            )
            return self.losses.add_entry_gaps(page, position) if self.losses else page

        return await _retry_removed(read)

    async def messages_at(
        self,
        wanted: Mapping[TopicPartition, int],
        lasting: Mapping[TopicPartition, Partition],
        kept: Callable[[Partition, int], Batch | None],
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        """Find these messages, one offset per partition, with the batches that hold them. Missing ones are left out.

        For partitions in `lasting` a message is also found if it has passed its age, or if it is `kept` elsewhere.
        """

        def served_now() -> IsServed:
            is_served = self._is_served(self._parts.clock.time_ns())

            def is_wanted(key: TopicPartition, next_offset: int, time_ns: int, entry: int) -> bool:
                partition = self._find(key)
                if partition is None or wanted[key] < partition.floor:
                    return False
                return key in lasting or is_served(key, next_offset, time_ns, entry)

            return is_wanted

        picker = MessagePicker(self._reader, self._segments, wanted, served_now)
        async with aclosing(picker.pick()) as found:
            with suppress(StopAsyncIteration):
                while True:
                    yield await anext(found)  # no variable, see `pick`
        for key, offset in picker.left.items():
            if key in lasting and (message := kept(lasting[key], offset)) is not None:
                yield (Chosen(message, (0,)),)

    # --- Retention ---

    async def trim(self) -> Trimmed:
        """One round of retention."""
        return await self.trimmer.trim(self._is_served)

    async def rewrite(self, keep: KeepOffsets) -> int:
        """Rewrite every sealed segment, keeping only these offsets. Returns the number of segments."""
        return await self.trimmer.rewrite(keep)

    def _forget_first_offsets(self) -> None:
        self._first_offsets = {}

    # --- Statistics ---

    def statistics(self) -> ShardStatistics:
        counters = self.writer.counters
        return ShardStatistics(
            shard=self.id,
            entries=counters.entries,
            messages=counters.messages,
            bytes=counters.bytes,
            stored_bytes=sum(segment.end for segment in self._segments),
            segments=len(self._segments),
            syncs=counters.syncs,
            sync_time_ns=counters.sync_time_ns,
            sync_time_max_ns=counters.sync_time_max_ns,
            queued_batches=self.writer.queued_batches,
            queued_bytes=self.writer.queued_bytes,
            failed_batches=counters.failed_batches,
            is_read_only=self.writer.is_read_only or self.catalogue.is_broken,
            unknown_outcomes=counters.unknown_outcomes,
            producers=len(self.producers),
        )


async def _retry_removed(read: Callable[[], Awaitable[_T]]) -> _T:
    """Read, and try again if retention removes a segment meanwhile."""
    for _ in range(_READ_ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            return await read()
    return await read()
