"""Counts the messages of a shard that match some patterns, from an entry on, by the indexes of its segments alone.

Messages that retention, a purge or a deletion hides are left out where the index shows them. A batch that was read in
part counts as a whole. So the result is exact or too high, never too low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from runnel.log.log import Turn
from runnel.log.metadata.topic_table import Partition
from runnel.log.segments.index import GrowingIndex, Index
from runnel.log.segments.segments import Segment
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern, any_of

KEYS_PER_STEP: Final = 500
_EVERYTHING: Final = ("*", "!*")
# The number of whole segments whose counts are cached.
_SEGMENTS_MAX: Final = 1000


class Indexes(Protocol):
    """Loads the index of a segment."""

    async def index(self, segment: Segment) -> Index: ...


def floors(
    patterns: Sequence[str], find: Callable[[TopicPartition], Partition | None]
) -> Callable[[TopicPartition], int | None]:
    """A function that gives the offset from which on a topic-partition's messages count; None: none of them do."""
    matches = any_of(map(Pattern, patterns or _EVERYTHING))

    def floor_of(key: TopicPartition) -> int | None:
        partition = find(key) if matches(key[0]) else None
        return None if partition is None else partition.floor

    return floor_of


class MessageCounter:
    """Counts messages of one shard on disk. `find` returns a partition; None if it does not exist."""

    def __init__(
        self, indexes: Indexes, workers: Workers, find: Callable[[TopicPartition], Partition | None]
    ) -> None:
        self._indexes = indexes
        self._workers = workers
        self._find = find
        self._segment_counts: dict[tuple[str, int, tuple[str, ...]], int] = {}

    def forget(self) -> None:
        """Drop the cached counts, because messages have been hidden."""
        self._segment_counts = {}

    async def count(
        self, segments: Sequence[Segment], entry: int, patterns: tuple[str, ...], turn: Turn
    ) -> int:
        floor_of = floors(patterns, self._find)
        total = 0
        for segment in segments:
            if segment.last_entry < entry:
                continue
            cache_key = (segment.path, segment.generation, patterns)
            is_whole = entry <= segment.first_entry and segment.growing is None
            if is_whole and cache_key in self._segment_counts:
                total += self._segment_counts[cache_key]
                continue
            try:
                index = await self._indexes.index(segment)
            except FileNotFoundError:
                continue  # retention has removed it
            block = index.first_block_from_entry(entry)
            if isinstance(index, GrowingIndex):
                total += await _count_growing(index, block, floor_of, turn)
                continue
            count = await self._workers.submit(_count_sealed, index, block, floor_of)
            total += count
            if is_whole:
                if len(self._segment_counts) >= _SEGMENTS_MAX:
                    self._segment_counts.clear()
                self._segment_counts[cache_key] = count
        return total


async def _count_growing(
    index: GrowingIndex, block: int, floor_of: Callable[[TopicPartition], int | None], turn: Turn
) -> int:
    """Count in steps, on the loop, because the loop also adds to the index."""
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
    """Count in a worker: a sealed index does not change."""
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
