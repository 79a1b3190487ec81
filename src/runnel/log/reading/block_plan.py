"""Plans the reads of a segment: the blocks with wanted messages, by its index, and the stretches to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from runnel.log.reading.open_segment import SegmentName
from runnel.log.reading.selection import Matcher
from runnel.log.segments.index import Index
from runnel.topics.names import TopicPartition

# Reading this many unwanted bytes is cheaper than another read.
_BRIDGE_BYTES: Final = 16 * 1024
_STRETCH_BYTES_MAX: Final = 4 * 2**20


class PlannedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block to read, and which of its runs hold wanted messages (None: all)."""

    position: int
    size: int  # at most: damaged bytes may lie between it and the next
    entry: int
    runs: tuple[int, ...] | None


class Stretch(msgspec.Struct, frozen=True):
    """Neighbouring blocks of one segment, to be read at once. Another process can do that."""

    segment: SegmentName
    blocks: tuple[PlannedBlock, ...]

    @property
    def path(self) -> str:
        return self.segment.path

    @property
    def position(self) -> int:
        return self.blocks[0].position

    @property
    def size(self) -> int:
        return self.blocks[-1].position + self.blocks[-1].size - self.blocks[0].position

    def pieces(self, bytes_max: int) -> Iterator[Stretch]:
        """The same blocks in stretches of up to `bytes_max`, or of a single block."""
        return stretches(self.segment, self.blocks, bytes_max)


def plan_blocks(
    index: Index, matcher: Matcher, begin_entry: int, end_entry: int | None
) -> list[PlannedBlock]:
    """The blocks that may hold wanted messages, in order.

    All messages of a block were received at one time, and blocks lie in the order of their times.
    """
    first, last = index.first_block_from_entry(begin_entry), index.block_count()
    if end_entry is not None:
        last = min(last, index.first_block_from_entry(end_entry))
    if matcher.since_ns is not None:
        first = max(first, index.first_block_from_time(matcher.since_ns))
    if matcher.until_ns is not None:
        last = min(last, index.first_block_from_time(matcher.until_ns))
    if first >= last:
        return []
    runs_by_block = _runs_by_block(index, matcher, first, last)
    places = index.block_positions(first, last)
    blocks = range(first, last) if runs_by_block is None else list(runs_by_block)
    return [
        PlannedBlock(
            places[block - first],
            places[block - first + 1] - places[block - first],
            index.block_place(block)[0],
            None if runs_by_block is None else runs_by_block[block],
        )
        for block in blocks
    ]


def _runs_by_block(
    index: Index, matcher: Matcher, first: int, last: int
) -> dict[int, tuple[int, ...]] | None:
    """The wanted runs of each block from `first` to `last`; None if all runs of all blocks are wanted."""
    is_all = True

    def is_wanted(key: TopicPartition) -> bool:
        nonlocal is_all
        if matcher.bounds(key) is None:
            is_all = False
            return False
        return True

    table = index.run_table(is_wanted)
    if not table.keys:
        return {}
    bounds = np.array([matcher.bounds(key) for key in table.keys], np.int64)
    bounds = np.repeat(bounds, np.diff(table.ends, prepend=0), axis=0)
    is_in_bounds = (table.base_offsets + table.counts > bounds[:, 0]) & (
        table.base_offsets < bounds[:, 1]
    )
    if is_all and is_in_bounds.all():
        return None
    chosen = is_in_bounds & (table.blocks >= first) & (table.blocks < last)
    if not chosen.any():
        return {}
    blocks, runs = table.blocks[chosen], table.runs[chosen]
    order = np.lexsort((runs, blocks))
    blocks, runs = blocks[order], runs[order]
    numbers, begins = np.unique(blocks, return_index=True)
    ends = [*begins[1:].tolist(), len(runs)]
    all_runs = runs.tolist()
    return {
        block: tuple(all_runs[begin:end])
        for block, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=True)
    }


def stretches(
    segment: SegmentName, blocks: Sequence[PlannedBlock], bytes_max: int = _STRETCH_BYTES_MAX
) -> Iterator[Stretch]:
    """Group blocks that adjoin, or nearly do, into stretches of up to `bytes_max`."""
    group: list[PlannedBlock] = []
    for block in blocks:
        if group and (
            block.position - (group[-1].position + group[-1].size) > _BRIDGE_BYTES
            or block.position + block.size - group[0].position > bytes_max
        ):
            yield Stretch(segment, tuple(group))
            group = []
        group.append(block)
    if group:
        yield Stretch(segment, tuple(group))
