"""Decides which messages of a partition `until = "acked"` keeps, offset by offset. Pure.

A message goes once subscriptions cover its partition, none of them is owed it, and every cursor has passed it.
Messages that no subscription covers stay, and the other limits decide. Ranges are [begin, end), in order, and do not
touch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from runnel.log.segments.index import RunTable
from runnel.topics.names import TopicPartition

Range = tuple[int, int]


class PartitionSpan(NamedTuple):
    """A partition's messages in one segment: `messages` of them, between two offsets."""

    key: TopicPartition
    first_offset: int
    next_offset: int
    messages: int

    @property
    def has_holes(self) -> bool:
        return self.messages != self.next_offset - self.first_offset


def spans_of(table: RunTable) -> list[PartitionSpan]:
    """The span of each partition in a segment."""
    if not table.keys:
        return []
    begins = np.concatenate([[0], table.ends[:-1]])
    firsts = table.base_offsets[begins].tolist()
    nexts = (table.base_offsets + table.counts)[table.ends - 1].tolist()
    counts = np.add.reduceat(table.counts, begins).tolist()
    return [
        PartitionSpan(key, first, following, count)
        for key, first, following, count in zip(table.keys, firsts, nexts, counts, strict=True)
    ]


def left_of(
    begin: int,
    end: int,
    *,
    owed: Sequence[Range] | None,
    held_from: int | None,
    floor: int,
) -> list[Range]:
    """Of these offsets, those that stay: not purged, and owed, held by a cursor, or covered by no subscription."""
    begin = max(begin, floor)
    held = end if held_from is None else max(held_from, begin)
    if owed is None or held <= begin:
        return [(begin, end)] if begin < end else []
    left = within(owed, begin, min(held, end))
    if held < end:
        left.append((held, end))
    return left


def within(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """The parts of `ranges` between two offsets."""
    found: list[Range] = []
    for at in range(max(bisect_right(ranges, begin, key=_begin) - 1, 0), len(ranges)):
        first, following = ranges[at]
        if first >= end:
            break
        if following > begin:
            found.append((max(first, begin), min(following, end)))
    return found


def _begin(item: Range) -> int:
    return item[0]


def length(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def count_there(ranges: Sequence[Range], table: RunTable) -> int:
    """How many messages of one partition's runs lie in `ranges`."""
    if not ranges:
        return 0
    ends = np.concatenate([[0], np.cumsum(table.counts)])

    def below(offsets: list[int]) -> int:
        """The sum, over these offsets, of the messages below each."""
        run = np.searchsorted(table.base_offsets, offsets, "right") - 1
        inside = np.clip(offsets - table.base_offsets[run], 0, table.counts[run])
        return int(np.where(run < 0, 0, ends[run] + inside).sum())

    return below([end for _, end in ranges]) - below([begin for begin, _ in ranges])


class Remainder(NamedTuple):
    """What stays of a segment: how many messages of `total`, and which of each partition."""

    messages: int
    total: int
    ranges: Mapping[TopicPartition, Sequence[Range]]

    @property
    def is_nothing(self) -> bool:
        return self.total > 0 and not self.messages

    @property
    def is_sparse(self) -> bool:
        """Whether half of it or more goes: then rewriting the rest is worth it."""
        return self.total > 0 and self.messages * 2 <= self.total

    def keep(
        self, key: TopicPartition, base: int, count: int, _time_ns: int, _entry: int
    ) -> list[Range]:
        """The offsets of a run that stay, for the rewriter."""
        return within(self.ranges[key], base, base + count)
