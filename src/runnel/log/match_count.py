"""Counts the messages of a shard that match some patterns, from an entry on, by the indexes of its segments alone.

What retention, a purge or a deletion hides is left out where the index can tell; of a batch that was read in part all
counts. So the result is right or too high, never too low.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from runnel.log.metadata.topic_table import Partition
from runnel.log.segments.index import GrowingIndex, Index
from runnel.log.segments.segments import Segment
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern, any_of

Turn: TypeAlias = Callable[[], Awaitable[None]]
"""Lets others run: awaited before each step on the loop."""

KEYS_PER_STEP: Final = 500
_EVERYTHING: Final = ("*", "!*")
# Whole segments whose count is remembered.
_SEGMENTS_MAX: Final = 1000


class Indexes(Protocol):
    async def index(self, segment: Segment) -> Index: ...


def floors(
    patterns: Sequence[str], find: Callable[[TopicPartition], Partition | None]
) -> Callable[[TopicPartition], int | None]:
    """Says from which offset on a key's messages count; None: not at all."""
    matches = any_of(map(Pattern, patterns or _EVERYTHING))

    def floor_of(key: TopicPartition) -> int | None:
        partition = find(key) if matches(key[0]) else None
        return None if partition is None else partition.floor

    return floor_of


class MessageCounter:
    """Of one shard on disk. `find` finds a partition that exists."""

    def __init__(
        self, indexes: Indexes, workers: Workers, find: Callable[[TopicPartition], Partition | None]
    ) -> None:
        self._indexes = indexes
        self._workers = workers
        self._find = find
        self._of_segments: dict[tuple[str, int, tuple[str, ...]], int] = {}

    def forget(self) -> None:
        """Messages have been hidden: count anew."""
        self._of_segments = {}

    async def count(
        self, segments: Sequence[Segment], entry: int, patterns: tuple[str, ...], turn: Turn
    ) -> int:
        floor_of = floors(patterns, self._find)
        total = 0
        for segment in segments:
            if segment.last_entry < entry:
                continue
            known = (segment.path, segment.generation, patterns)
            is_whole = entry <= segment.first_entry and segment.growing is None
            if is_whole and known in self._of_segments:
                total += self._of_segments[known]
                continue
            try:
                index = await self._indexes.index(segment)
            except FileNotFoundError:
                continue  # retention was quicker
            block = index.first_block_from_entry(entry)
            if isinstance(index, GrowingIndex):
                total += await _count_growing(index, block, floor_of, turn)
                continue
            count = await self._workers.submit(_count_sealed, index, block, floor_of)
            total += count
            if is_whole:
                if len(self._of_segments) >= _SEGMENTS_MAX:
                    self._of_segments.clear()
                self._of_segments[known] = count
        return total


async def _count_growing(
    index: GrowingIndex, block: int, floor_of: Callable[[TopicPartition], int | None], turn: Turn
) -> int:
    """On the loop, which adds to it, in steps."""
    keys = list(index.keys())
    total = 0
    for begin in range(0, len(keys), KEYS_PER_STEP):
        await turn()
        for key in keys[begin : begin + KEYS_PER_STEP]:
            floor = floor_of(key)
            if floor is not None:
                first = index.first_run_from_block(key, block)
                if first is not None:
                    total += max(0, index.next_offset(key) - max(first.base_offset, floor))
    return total


def _count_sealed(
    index: Index, block: int, floor_of: Callable[[TopicPartition], int | None]
) -> int:
    """In a worker: a sealed index does not change."""
    found: dict[TopicPartition, int] = {}

    def is_wanted(key: TopicPartition) -> bool:
        floor = floor_of(key)
        if floor is not None:
            found[key] = floor
        return floor is not None

    table = index.run_table(is_wanted)
    lengths = np.diff(table.ends, prepend=0)
    lowest = np.repeat(np.array([found[key] for key in table.keys], np.int64), lengths)
    counted = np.minimum(table.counts, table.base_offsets + table.counts - lowest)
    return int(np.maximum(counted, 0)[table.blocks >= block].sum())
