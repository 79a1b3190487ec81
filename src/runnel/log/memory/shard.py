"""`MemoryShard`: one shard in memory, which numbers batches and serves reads.

A batch has the same bytes as on disk. Readers see it at once, and its publisher is answered with `received`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import msgspec

from runnel.config import LogSettings
from runnel.errors import OffsetAheadError, OffsetGoneError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.log import (
    Appended,
    Chosen,
    EntryPage,
    FoundBatch,
    Level,
    LogListener,
    OffsetBounds,
    PartitionPage,
    PassedRun,
    Position,
    ShardId,
    ShardStatistics,
    Trimmed,
    Turn,
    VisibleBatch,
)
from runnel.log.match_count import KEYS_PER_STEP, floors
from runnel.log.memory.batch_store import BatchStore
from runnel.log.memory.stored_batch import PartitionSlice, StoredBatch
from runnel.log.memory.trimmer import MemoryJournal, MemoryTrimmer
from runnel.log.metadata.producers import ProducerTable, check_same_batch
from runnel.log.metadata.topic_table import Partition, number_runs
from runnel.log.retention import rules
from runnel.log.retention.holds import ShardHolds
from runnel.log.retention.rules import IsServed, passed_runs, served_runs
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy


class MemoryShard:
    """The twin of `DiskShard`: a store of batches, a trimmer, and the sequences of named publishers.

    `find` returns a partition by its name and number. `keep_last` is passed to the trimmer.
    """

    def __init__(
        self,
        shard: ShardId,
        policy: JournalPolicy,
        clock: Clock,
        producers: ProducerTable,
        settings: LogSettings,
        epoch: int,
        *,
        journal: MemoryJournal,
        find: Callable[[TopicPartition], Partition | None],
        shard_holds: ShardHolds,
        keep_last: Callable[[Batch, Sequence[Partition]], None],
        listener: LogListener,
    ) -> None:
        self._listener = listener
        self.id = shard
        self._clock = clock
        self._producers = producers
        self._epoch = epoch
        self._find = find
        self._shard_holds = shard_holds
        self._journal = journal
        self._store = BatchStore(journal.size)
        self._trimmer = MemoryTrimmer(
            shard.shard,
            journal,
            self._store,
            policy,
            clock,
            settings,
            find=find,
            shard_holds=shard_holds,
            keep_last=keep_last,
        )
        self._next_entry = 1
        self._last_time_ns = 0
        self._entries = self._messages = self._bytes = 0  # since the log was made

    def use_policy(self, policy: JournalPolicy) -> None:
        self._trimmer.use_policy(policy)

    def leave_journal(self) -> None:
        """Count no longer for the journal: the shard is not served any more."""
        self._journal.remove(self.id.shard, self._store.stored_bytes)

    # --- Appending ---

    def append(self, batch: Batch, partitions: Sequence[Partition], level: Level) -> Appended:
        head = batch.envelope
        if head.producer is not None:
            repeated = self._producers.check(head.producer, head.term, head.number)
            if repeated is not None:
                return self._repeat(repeated.entry, head)
        self._last_time_ns = max(self._last_time_ns, self._clock.time_ns())
        entry = self._next_entry
        if head.producer is not None:
            self._producers.accept(head.producer, head.term, head.number, entry, self._last_time_ns)
            level = Level.RECEIVED
        numbered = number_runs(
            head,
            partitions,
            shard=self.id.shard,
            epoch=self._epoch,
            entry=entry,
            receive_time_ns=self._last_time_ns,
        )
        self._next_entry = entry + 1
        keys = [partition.key for partition in partitions]
        stored = StoredBatch(Batch(numbered, batch.body), keys)
        self._store.add(stored, stored.slices())
        for partition in partitions:
            partition.visible_next = partition.next_offset
        self._entries += 1
        self._messages += stored.messages
        self._bytes += len(stored.packed)
        if self._journal.size.stored_bytes > self._trimmer.bytes_cap:
            self._trimmer.shed()
        self._listener.on_stored(
            self.id, (VisibleBatch(numbered, stored.body, packed=stored.packed),)
        )
        return _answer(stored, Level.NONE if level is Level.NONE else Level.RECEIVED)

    def _repeat(self, entry: int | None, repeated: Envelope) -> Appended:
        """The answer to the original batch; without offsets if the batch is no longer complete."""
        stored = self._store.at_entry(entry) if entry is not None else None
        if stored is None or stored.envelope.rows:
            return Appended((), entry or 0, 0, 0, Level.RECEIVED, is_repeated=True)
        check_same_batch(stored.envelope, repeated)
        return msgspec.structs.replace(_answer(stored, Level.RECEIVED), is_repeated=True)

    # --- Reading ---

    def _is_served(self) -> IsServed:
        return rules.served_at(
            self._clock.time_ns(),
            self._trimmer.policy,
            floor_of=self._trimmer.floor_of if self._trimmer.has_hidden else None,
            holds=self._shard_holds.of_all_readers,
        )

    def _served(
        self, partition: Partition, offset: int, is_served: IsServed
    ) -> Iterator[PartitionSlice]:
        """The partition's slices that end behind an offset and that readers get."""
        key = partition.key
        for part in self._store.slices_behind(key, offset):
            if is_served(key, part.next_offset, part.stored.time_ns, part.stored.entry):
                yield part

    def bounds(self, partition: Partition) -> OffsetBounds:
        return self._bounds(partition, self._is_served())

    def _bounds(self, partition: Partition, is_served: IsServed) -> OffsetBounds:
        next_offset = partition.visible_next
        first = next(self._served(partition, partition.floor, is_served), None)
        if first is None:
            return OffsetBounds(next_offset, next_offset)
        return OffsetBounds(max(first.base_offset, partition.floor), next_offset)

    def offset_at(self, partition: Partition, time_ns: int) -> int:
        bounds = self.bounds(partition)
        later = self._store.slice_from_time(partition.key, time_ns)
        return bounds.next_offset if later is None else max(later.base_offset, bounds.first_offset)

    def entry_at(self, time_ns: int) -> int:
        """The first entry received at this time or later; the next entry if there is none."""
        later = self._store.first_from_time(time_ns)
        return self._next_entry if later is None else later.entry

    def newest_term(self, producer: str) -> int:
        return self._producers.term(producer)

    def read(self, partition: Partition, offset: int, bytes_max: int) -> PartitionPage:
        # One time for bounds and page: messages that pass their age meanwhile must not be missed.
        is_served = self._is_served()
        bounds = self._bounds(partition, is_served)
        if offset > bounds.next_offset:
            raise OffsetAheadError(*partition.key, offset, bounds.next_offset)
        if offset < bounds.first_offset:
            raise OffsetGoneError(*partition.key, offset, bounds.first_offset)
        found: list[FoundBatch] = []
        size = 0
        next_offset = bounds.next_offset
        for place in self._served(partition, offset, is_served):
            size += len(place.stored.packed)
            if found and size > bytes_max:
                break
            found.append(place.stored.found(place.runs))
            next_offset = place.next_offset
        return PartitionPage(found, next_offset)

    def entries(self) -> OffsetBounds:
        first = self._store.first.entry if len(self._store) else self._next_entry
        return OffsetBounds(first, self._next_entry)

    async def count(self, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Count messages from this entry on whose topics match. The count is exact or too high."""
        floor_of = floors(patterns, self._find)
        keys = self._store.keys()
        total = 0
        for begin in range(0, len(keys), KEYS_PER_STEP):
            await turn()
            for key in keys[begin : begin + KEYS_PER_STEP]:
                floor = floor_of(key)
                first = None if floor is None else self._store.slice_from_entry(key, entry)
                if floor is not None and first is not None:
                    end = self._store.offsets(key)[1]
                    total += max(0, end - max(first.base_offset, floor))
        return total

    def read_entries(self, position: Position, bytes_max: int) -> EntryPage:
        bounds = self.entries()
        first = bounds.first_offset
        if position.epoch not in (0, self._epoch):
            # An entry number of another epoch says nothing about the entries of this one.
            raise OffsetGoneError(str(self.id), self.id.shard, min(position.entry, first), first)
        if position.entry > bounds.next_offset:
            raise OffsetAheadError(str(self.id), self.id.shard, position.entry, bounds.next_offset)
        if position.entry < first:
            raise OffsetGoneError(str(self.id), self.id.shard, position.entry, first)
        trimmer = self._trimmer
        needs_filter = trimmer.has_hidden or trimmer.policy.retain.age_ns is not None
        is_served = self._is_served() if needs_filter else None
        found: list[FoundBatch] = []
        passed: list[PassedRun] = []
        size = 0
        next_entry = bounds.next_offset
        for stored in self._store.from_entry(position.entry):
            if size and size + len(stored.packed) > bytes_max:
                next_entry = stored.entry
                break
            size += len(stored.packed)
            runs = None if is_served is None else served_runs(stored.envelope, is_served)
            if runs is None or runs:
                found.append(stored.found(runs))
            if runs is not None:
                passed += passed_runs(stored.envelope, runs)
        return EntryPage(found, Position(self._epoch, next_entry), (), passed)

    def entries_with(self, wanted: Mapping[TopicPartition, int]) -> dict[int, list[TopicPartition]]:
        """The entries that hold these messages, one offset per partition. Missing messages are left out."""
        entries: dict[int, list[TopicPartition]] = {}
        for key, offset in wanted.items():
            place = self._store.slice_with(key, offset)
            if place is not None:
                entries.setdefault(place.stored.entry, []).append(key)
        return entries

    def choose(
        self,
        entry: int,
        keys: Sequence[TopicPartition],
        wanted: Mapping[TopicPartition, int],
        left: dict[TopicPartition, int],
        lasting: Container[TopicPartition],
    ) -> Sequence[Chosen]:
        """The messages of one entry that are still stored. They are removed from `left`.

        For partitions in `lasting` a message is also found if it has passed its age.
        """
        is_served = self._is_served()
        places: dict[TopicPartition, PartitionSlice] = {}
        for key in keys:
            place, partition = self._store.slice_with(key, wanted[key]), self._find(key)
            if place is None or partition is None or wanted[key] < partition.floor:
                continue
            if key in lasting or is_served(key, place.next_offset, place.stored.time_ns, entry):
                places[key] = place
                del left[key]
        if not places:
            return ()
        stored = next(iter(places.values())).stored
        head = stored.envelope
        starts, bases = head.run_starts(), head.vector64(head.base_offsets)
        rows: list[int] = []
        for key, place in places.items():
            # The last run of the topic-partition that begins at or before the message holds it.
            run = max(run for run in place.runs if bases[run] <= wanted[key])
            rows.append(int(starts[run] + wanted[key] - bases[run]))
        return (Chosen(stored.batch(), sorted(rows)),)

    # --- Retention ---

    @property
    def hide_count(self) -> int:
        """Rises whenever messages are hidden."""
        return self._trimmer.hide_count

    def hide(self, partition: Partition) -> None:
        """Hide the messages below the partition's floor: it was purged, or its topic deleted."""
        self._trimmer.hide(partition)

    def trim(self) -> Trimmed:
        """One round of retention."""
        return self._trimmer.trim(self._next_entry)

    def statistics(self) -> ShardStatistics:
        return ShardStatistics(
            shard=self.id,
            entries=self._entries,
            messages=self._messages,
            bytes=self._bytes,
            stored_bytes=self._store.stored_bytes,
            segments=len(self._store),
            syncs=0,
            sync_time_ns=0,
            sync_time_max_ns=0,
            queued_batches=0,
            queued_bytes=0,
            failed_batches=0,
            is_read_only=False,
            producers=len(self._producers),
        )


def _answer(stored: StoredBatch, level: Level) -> Appended:
    head = stored.envelope
    return Appended(
        base_offsets=head.column64(head.base_offsets),
        entry=stored.entry,
        epoch=head.column64(head.epochs)[0],
        receive_time_ns=stored.time_ns,
        level=level,
    )
