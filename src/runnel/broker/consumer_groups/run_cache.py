"""A cache of recently stored runs, from which consumers are served before the log is read.

New messages are delivered from here, and a batch that several consumers or subscriptions share is read once. It is
only a cache: a run that is missing is read again.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from runnel.formats import block, envelope
from runnel.formats.batch import Batch
from runnel.formats.columns import first_event_time_ns
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.log.log import VisibleBatch
from runnel.topics.names import TopicPartition

# About what a run takes beside its body.
_RUN_BYTES: Final = 512


class StoredRun:
    """Messages of one partition with consecutive offsets, as a batch of their own."""

    __slots__ = ("_batch", "_block", "_row_keys", "_run", "base", "count", "size")

    def __init__(
        self,
        batch: Batch,
        base: int,
        count: int,
        packed: Sequence[bytes | memoryview] | None = None,
        *,
        run: int | None = None,
    ) -> None:
        """`run`: the number of this run in a batch of several; it is cut out of the batch on first use."""
        self.base = base
        self.count = count
        self.size = len(batch.body) // batch.envelope.run_count + _RUN_BYTES
        self._batch = batch
        self._run = run
        self._block = packed
        self._row_keys: Sequence[bytes | None] | None = None

    @property
    def batch(self) -> Batch:
        if self._run is not None:
            self._batch, self._run = self._batch.cut([self._run]), None
        return self._batch

    @property
    def end(self) -> int:
        return self.base + self.count

    @property
    def event_time_ns(self) -> int:
        """The event time of the first message; 0 if it is not set, or the batch is compressed."""
        batch = self.batch
        return first_event_time_ns(batch.body) if batch.envelope.codec == Codec.NONE else 0

    def row_keys(self) -> Sequence[bytes | None]:
        """The key of each message, decoded once: several offers may need it."""
        if self._row_keys is None:
            self._row_keys = self.batch.columns.keys.to_optional_list(self.count)
        return self._row_keys

    def block_of(self, begin: int, mask: int) -> Sequence[bytes | memoryview]:
        """The block of the messages at `begin + i` for every bit i of the mask. The block of a whole run is kept."""
        first = begin - self.base
        width = mask.bit_length()
        is_gapless = mask & (mask + 1) == 0
        if is_gapless and not first and width == self.count:
            if self._block is None:
                self._block = _packed(self.batch)
            return self._block
        if is_gapless:
            return _packed(self.batch.slice(first, first + width))
        return _packed(self.batch.take(_rows(mask, first)))

    def messages_of(self, begin: int, mask: int) -> list[Message]:
        """The messages that `block_of` packs, as objects."""
        batch, first = self.batch, begin - self.base
        count = mask.bit_count()
        if count == self.count:
            return batch.messages()
        if count == 1:  # saves a consumer of single messages the cost of numpy
            return [batch.message(first + mask.bit_length() - 1)]
        return [batch.message(row) for row in _rows(mask, first).tolist()]


def _rows(mask: int, first: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """`first` + i for every bit i of the mask."""
    bits = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")) + first


def _packed(batch: Batch) -> Sequence[bytes | memoryview]:
    return block.pack(envelope.encode(batch.envelope), batch.body)


class RunCache:
    """The latest runs by partition and offset, up to a limit in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.forgotten = 0  # how often `forget` was called
        self._bytes = 0
        self._runs: OrderedDict[tuple[TopicPartition, int], StoredRun] = OrderedDict()
        self._bases: dict[TopicPartition, list[int]] = {}

    def find(self, key: TopicPartition, offset: int) -> StoredRun | None:
        """The run that has this message, if it is cached."""
        bases = self._bases.get(key)
        if bases is None:
            return None
        place = bisect_right(bases, offset) - 1
        if place < 0:
            return None
        run = self._runs[key, bases[place]]
        return run if offset < run.end else None

    def put(self, key: TopicPartition, run: StoredRun) -> None:
        known = self._runs.pop((key, run.base), None)
        if known is None:
            insort(self._bases.setdefault(key, []), run.base)
        else:
            self._bytes -= known.size
        self._runs[key, run.base] = run
        self._bytes += run.size
        while self._bytes > self._bytes_max and len(self._runs) > 1:
            (old_key, base), old = self._runs.popitem(last=False)
            self._bytes -= old.size
            self._forget_base(old_key, base)

    def forget(self, is_gone: Callable[[TopicPartition], bool]) -> None:
        """Drop some partitions: their topic was deleted or purged, or their shard has gone.

        A read in progress may be stale too: its reader compares `forgotten`.
        """
        self.forgotten += 1
        for key in [key for key in self._bases if is_gone(key)]:
            for base in self._bases.pop(key):
                self._bytes -= self._runs.pop((key, base)).size

    def _forget_base(self, key: TopicPartition, base: int) -> None:
        bases = self._bases[key]
        bases.remove(base)
        if not bases:
            del self._bases[key]


def run_of(stored: VisibleBatch) -> StoredRun | None:
    """The run of a batch that was just stored; None if it has several runs or is compressed."""
    head = stored.envelope
    if head.run_count != 1 or head.codec != Codec.NONE:
        return None
    base = int.from_bytes(head.base_offsets, "little")
    return StoredRun(Batch(head, stored.body), base, head.message_count, stored.block())
