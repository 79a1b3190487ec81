"""Stores the batches of a shard in memory, in entry order, and finds the runs of each topic-partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from runnel.log.memory.stored_batch import PartitionSlice, SortedQueue, StoredBatch
from runnel.topics.names import TopicPartition


def _entry(stored: StoredBatch) -> int:
    return stored.entry


def _batch_time(stored: StoredBatch) -> int:
    return stored.time_ns


def _slice_end(part: PartitionSlice) -> int:
    return part.next_offset


def _slice_time(part: PartitionSlice) -> int:
    return part.stored.time_ns


def _slice_entry(part: PartitionSlice) -> int:
    return part.stored.entry


class JournalSize:
    """The bytes of all shards of a journal."""

    __slots__ = ("stored_bytes",)

    def __init__(self) -> None:
        self.stored_bytes = 0


class BatchStore:
    """Adds, finds and removes batches, and counts their bytes in the journal's size too. It decides nothing.

    A batch stays until all its messages are removed. A purged topic-partition has no slices of a batch any more, even
    if the batch stays for other topic-partitions.
    """

    def __init__(self, journal: JournalSize) -> None:
        self._batches: SortedQueue[StoredBatch] = SortedQueue()
        self._slices: dict[TopicPartition, SortedQueue[PartitionSlice]] = {}
        self._journal = journal
        self.stored_bytes = 0

    # --- Finding ---

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[StoredBatch]:
        return iter(self._batches)

    @property
    def first(self) -> StoredBatch:
        return self._batches.first

    def keys(self) -> list[TopicPartition]:
        return list(self._slices)

    def slices(self, key: TopicPartition) -> SortedQueue[PartitionSlice] | None:
        """All slices of a topic-partition; None if it has none."""
        return self._slices.get(key)

    def offsets(self, key: TopicPartition) -> tuple[int, int]:
        """The first offset of a topic-partition that has slices, and the one behind its last."""
        queue = self._slices[key]
        return queue.first.base_offset, queue.last.next_offset

    def at_entry(self, entry: int) -> StoredBatch | None:
        found = next(self.from_entry(entry), None)
        return found if found is not None and found.entry == entry else None

    def from_entry(self, entry: int) -> Iterator[StoredBatch]:
        """The batches from this entry on."""
        return self._batches.from_number(self._batches.number_from(entry, _entry))

    def first_from_time(self, time_ns: int) -> StoredBatch | None:
        """The first batch received at this time or later."""
        number = self._batches.number_from(time_ns, _batch_time)
        return next(self._batches.from_number(number), None)

    def slices_behind(self, key: TopicPartition, offset: int) -> Iterator[PartitionSlice]:
        """The slices of a topic-partition that end behind an offset."""
        queue = self._slices.get(key)
        if queue is None:
            return iter(())
        return queue.from_number(queue.number_above(offset, _slice_end))

    def slice_with(self, key: TopicPartition, offset: int) -> PartitionSlice | None:
        """The slice that holds a message."""
        part = next(self.slices_behind(key, offset), None)
        return part if part is not None and part.has(offset) else None

    def slice_from_time(self, key: TopicPartition, time_ns: int) -> PartitionSlice | None:
        """The first slice of a topic-partition received at this time or later."""
        return self._first_slice(key, time_ns, _slice_time)

    def slice_from_entry(self, key: TopicPartition, entry: int) -> PartitionSlice | None:
        """The first slice of a topic-partition in this entry or a later one."""
        return self._first_slice(key, entry, _slice_entry)

    def _first_slice(
        self, key: TopicPartition, value: int, by: Callable[[PartitionSlice], int]
    ) -> PartitionSlice | None:
        queue = self._slices.get(key)
        if queue is None:
            return None
        return next(queue.from_number(queue.number_from(value, by)), None)

    # --- Changing ---

    def add(self, stored: StoredBatch, slices: Mapping[TopicPartition, PartitionSlice]) -> None:
        self._batches.append(stored)
        self._grow(len(stored.packed))
        for key, part in slices.items():
            queue = self._slices.get(key)
            if queue is None:
                queue = self._slices[key] = SortedQueue()
            queue.append(part)

    def drop_first(self) -> StoredBatch:
        """Remove the oldest batch."""
        stored = self._batches.first
        self._batches.drop_first()
        self._grow(-len(stored.packed))
        for key in dict.fromkeys(stored.keys):
            queue = self._slices.get(key)
            if queue is None or queue.first.stored is not stored:
                continue  # purged
            queue.drop_first()
            if not queue:
                del self._slices[key]
        return stored

    def drop(self, entries: set[int]) -> None:
        """Remove the batches with these entries, also from the middle."""
        leaving = [stored for stored in self._batches if stored.entry in entries]
        self._batches = SortedQueue(each for each in self._batches if each.entry not in entries)
        for key in {key for stored in leaving for key in stored.keys}:
            left = [part for part in self._slices.get(key, ()) if part.stored.entry not in entries]
            if left:
                self._slices[key] = SortedQueue(left)
            else:
                self._slices.pop(key, None)
        self._count_bytes()

    def drop_below(self, key: TopicPartition, floor: int) -> None:
        """Remove a topic-partition's slices below an offset, and batches without any slice left."""
        queue = self._slices[key]
        while queue and queue.first.next_offset <= floor:
            queue.first.stored.messages -= queue.first.messages
            queue.drop_first()
        if not queue:
            del self._slices[key]
        self._batches = SortedQueue(stored for stored in self._batches if stored.messages)
        self._count_bytes()

    def replace(
        self,
        new: Mapping[int, StoredBatch],
        slices_of: Callable[[StoredBatch], Mapping[TopicPartition, PartitionSlice]],
    ) -> None:
        """Replace the batches that have the entries of `new`. `slices_of` gives the slices of the other batches."""
        former, self._batches, self._slices = self._batches, SortedQueue(), {}
        self._grow(-self.stored_bytes)
        for stored in former:
            other = new.get(stored.entry)
            if other is None:
                self.add(stored, slices_of(stored))
            else:
                self.add(other, other.slices())

    def is_last(self, stored: StoredBatch, key: TopicPartition) -> bool:
        """Whether a batch has the last slice of a topic-partition."""
        queue = self._slices.get(key)
        return queue is not None and queue.last.stored is stored

    def _count_bytes(self) -> None:
        stored_bytes = sum(len(stored.packed) for stored in self._batches)
        self._grow(stored_bytes - self.stored_bytes)

    def _grow(self, added_bytes: int) -> None:
        self.stored_bytes += added_bytes
        self._journal.stored_bytes += added_bytes
