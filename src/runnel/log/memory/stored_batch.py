"""The parts of a shard in memory: packed batches, their slices per topic-partition, and sorted queues."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.log.log import FoundBatch
from runnel.log.retention.acked import Range, length, within
from runnel.topics.names import TopicPartition

T = TypeVar("T")


class StoredBatch:
    """A batch in memory: its bytes, and the number of its messages that have not been purged."""

    __slots__ = ("body", "entry", "envelope", "keys", "messages", "packed", "time_ns")

    def __init__(self, batch: Batch, keys: Sequence[TopicPartition]) -> None:
        head, body, padding = block.pack(envelopes.encode(batch.envelope), batch.body)
        self.packed = b"".join((head, body, padding))
        self.body = memoryview(self.packed)[len(head) : len(head) + len(body)]
        self.envelope = batch.envelope
        self.keys = keys  # by run
        self.entry = batch.envelope.entry
        self.time_ns = batch.envelope.column64(batch.envelope.receive_times)[0]
        self.messages = batch.envelope.message_count

    def batch(self) -> Batch:
        """A new batch for each reader: what a reader decodes must not stay with the stored bytes."""
        return Batch(self.envelope, self.body)

    def found(self, runs: Sequence[int] | None) -> FoundBatch:
        is_all = runs is None or len(runs) == self.envelope.run_count
        return FoundBatch(memoryview(self.packed), self.batch(), None if is_all else runs)

    def cut(self, runs: Sequence[int]) -> StoredBatch:
        """A batch of these runs only."""
        return StoredBatch(self.batch().cut(runs), [self.keys[run] for run in runs])

    def taken(
        self,
        places: Mapping[TopicPartition, PartitionSlice],
        ranges: Mapping[TopicPartition, Sequence[Range]],
    ) -> StoredBatch:
        """A batch of the messages in these places whose offsets lie in `ranges`."""
        head = self.envelope
        starts, bases = head.run_starts().tolist(), head.column64(head.base_offsets)
        counts = head.column32(head.counts)
        rows: list[int] = []
        for run, key in enumerate(self.keys):
            if key in places:
                shift = starts[run] - bases[run]
                for begin, end in within(ranges[key], bases[run], bases[run] + counts[run]):
                    rows.extend(range(begin + shift, end + shift))
        batch = self.batch().take(rows)
        head = batch.envelope
        return StoredBatch(
            batch, list(zip(head.topics, head.column32(head.partitions), strict=True))
        )

    def slices(self) -> dict[TopicPartition, PartitionSlice]:
        """The slice of each topic-partition in this batch."""
        places: dict[TopicPartition, PartitionSlice] = {}
        head = self.envelope
        spans = zip(head.column64(head.base_offsets), head.column32(head.counts), strict=True)
        for run, (key, (base, count)) in enumerate(zip(self.keys, spans, strict=True)):
            place = places.get(key)
            if place is None:
                places[key] = PartitionSlice(self, base, base + count, count, (run,))
            else:
                first, messages = place.base_offset, place.messages + count
                places[key] = PartitionSlice(
                    self, first, base + count, messages, (*place.runs, run)
                )
        return places


class PartitionSlice(msgspec.Struct, frozen=True):
    """A topic-partition's messages in one batch: its runs in order, with holes for removed acknowledged messages."""

    stored: StoredBatch
    base_offset: int
    next_offset: int
    messages: int
    runs: tuple[int, ...]

    def has(self, offset: int) -> bool:
        return self.count_in([(offset, offset + 1)]) > 0

    def count_in(self, ranges: Sequence[Range]) -> int:
        """The number of messages in these ranges."""
        first, end = self.base_offset, self.next_offset
        if self.messages == end - first:
            return length(within(ranges, first, end))
        head = self.stored.envelope
        bases, counts = head.column64(head.base_offsets), head.column32(head.counts)
        return sum(
            length(within(ranges, bases[run], bases[run] + counts[run])) for run in self.runs
        )


class SortedQueue(Generic[T]):
    """Items in order that are added at the end and mostly removed at the beginning."""

    __slots__ = ("_begin", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items: list[T] = list(items)
        self._begin = 0  # items before it are removed, and deleted once they are more than half

    def __len__(self) -> int:
        return len(self._items) - self._begin

    def __iter__(self) -> Iterator[T]:
        return self.from_number(0)

    def from_number(self, number: int) -> Iterator[T]:
        items = self._items
        return (items[at] for at in range(self._begin + number, len(items)))

    @property
    def first(self) -> T:
        return self._items[self._begin]

    @property
    def last(self) -> T:
        return self._items[-1]

    def append(self, item: T) -> None:
        self._items.append(item)

    def drop_first(self) -> None:
        self._items[self._begin] = self._items[-1]  # frees the item's memory at once
        self._begin += 1
        if self._begin * 2 > len(self._items):
            del self._items[: self._begin]
            self._begin = 0

    def number_from(self, value: int, key: Callable[[T], int]) -> int:
        """The number of the first item whose key is not below the value."""
        return bisect_left(self._items, value, lo=self._begin, key=key) - self._begin

    def number_above(self, value: int, key: Callable[[T], int]) -> int:
        """The number of the first item whose key is above the value."""
        return bisect_right(self._items, value, lo=self._begin, key=key) - self._begin
