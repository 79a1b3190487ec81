"""Selects messages by topic, partition, offset, time and tags: with columns and vectors, no message objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.columns import Columns
from runnel.formats.envelope import Envelope
from runnel.log.segments.index import StaleIndexError
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern, any_of

END_OF_OFFSETS: Final = 2**63 - 1

Bounds = tuple[int, int]  # offsets [begin, end)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a reader wants: all conditions must hold. Ranges include their beginning, not their end.

    `ranges` gives each topic-partition its own offsets, and excludes all other topic-partitions.
    """

    topics: tuple[str, ...] = ("*",)  # patterns; only those that begin with ! match `!…` topics
    partitions: frozenset[int] | None = None
    begin_offset: int = 0
    end_offset: int | None = None
    ranges: Mapping[TopicPartition, Bounds] | None = None
    since_ns: int | None = None  # receive time
    until_ns: int | None = None
    event_since_ns: int | None = None
    event_until_ns: int | None = None
    tags: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.topics:
            raise ClientFault("a selection needs at least one topic pattern; '*' is all topics")


class Matcher:
    """Applies a selection. It caches the wanted offsets of each topic-partition.

    `floor_of` gives the first offset of a topic-partition that is not hidden, None if all of it is.
    """

    def __init__(
        self, selection: Selection, floor_of: Callable[[TopicPartition], int | None]
    ) -> None:
        self._selection = selection
        self._floor_of = floor_of
        self._wants_topic = any_of(map(Pattern, selection.topics))
        self._bounds: dict[TopicPartition, Bounds | None] = {}
        self.since_ns = selection.since_ns
        self.until_ns = selection.until_ns
        self._chooses_rows = (
            selection.event_since_ns is not None
            or selection.event_until_ns is not None
            or bool(selection.tags)
        )

    def bounds(self, key: TopicPartition) -> Bounds | None:
        """The wanted offsets of a topic-partition; None if there are none."""
        try:
            return self._bounds[key]
        except KeyError:
            found = self._bounds[key] = self._find_bounds(key)
            return found

    def wants_any(self, key: TopicPartition, begin: int, end: int) -> bool:
        """Whether any offset from `begin` up to `end` is wanted."""
        bounds = self.bounds(key)
        return bounds is not None and begin < bounds[1] and end > bounds[0]

    def _find_bounds(self, key: TopicPartition) -> Bounds | None:
        wanted = self._selection
        if wanted.partitions is not None and key[1] not in wanted.partitions:
            return None
        if not self._wants_topic(key[0]):
            return None
        floor = self._floor_of(key)
        if floor is None:
            return None
        begin = max(floor, wanted.begin_offset)
        end = END_OF_OFFSETS if wanted.end_offset is None else wanted.end_offset
        if wanted.ranges is not None:
            if key not in wanted.ranges:
                return None
            begin, end = max(begin, wanted.ranges[key][0]), min(end, wanted.ranges[key][1])
        return (begin, end) if begin < end else None

    def may_want(self, first_time_ns: int, last_time_ns: int) -> bool:
        """Whether a message received between these times, both included, can be wanted."""
        return (self.since_ns is None or last_time_ns >= self.since_ns) and (
            self.until_ns is None or first_time_ns < self.until_ns
        )

    def select(self, batch: Batch, runs: Sequence[int] | None) -> Batch | None:
        """The wanted messages of a stored batch; `runs` are those that the index named (None: all).

        StaleIndexError if one of them is not wanted at all. MalformedError if the body is unreadable:
        it is checked even if everything is wanted, so that nothing unreadable is served.
        """
        batch.check()
        rows = self._rows_by_run(batch, runs)
        if rows is not None and not len(rows):
            return None
        if self._chooses_rows:
            mask = self._row_mask(batch.columns)
            rows = np.flatnonzero(mask) if rows is None else rows[mask[rows]]
            if not len(rows):
                return None
        return batch if rows is None or len(rows) == len(batch) else batch.take(rows)

    def _rows_by_run(self, batch: Batch, runs: Sequence[int] | None) -> NDArray[np.int64] | None:
        """The rows that match by topic, partition, offset and receive time; None: all."""
        head = batch.envelope
        if runs is None and len(head.topics) == 1 and self._wants_all(head):
            return None
        if runs is not None and runs[-1] >= head.run_count:
            raise StaleIndexError
        numbers: Iterable[int] = range(head.run_count) if runs is None else runs
        partitions = head.column32(head.partitions)
        bases = head.column64(head.base_offsets)
        counts = head.column32(head.counts)
        times = head.column64(head.receive_times)
        is_all = runs is None or len(runs) == head.run_count
        chosen: list[tuple[int, int, int]] = []  # run, first and next offset
        for run in numbers:
            bounds = self.bounds((head.topics[run], partitions[run]))
            if bounds is None:
                if runs is not None:
                    raise StaleIndexError
                is_all = False
                continue
            begin = max(bases[run], bounds[0])
            end = min(bases[run] + counts[run], bounds[1])
            if begin >= end or not self.may_want(times[run], times[run]):
                is_all = False
                continue
            is_all = is_all and end - begin == counts[run]
            chosen.append((run, begin, end))
        if is_all:
            return None
        if not chosen:
            return np.zeros(0, np.int64)
        starts = head.run_starts().tolist()
        return np.concatenate(
            [np.arange(begin, end) + (starts[run] - bases[run]) for run, begin, end in chosen]
        )

    def _wants_all(self, head: Envelope) -> bool:
        """Whether all of a batch of one run is wanted: the common case, in a third of the time."""
        bounds = self.bounds((head.topics[0], int.from_bytes(head.partitions, "little")))
        begin = int.from_bytes(head.base_offsets, "little")
        if bounds is None or begin < bounds[0] or begin + head.message_count > bounds[1]:
            return False
        if self.since_ns is None and self.until_ns is None:
            return True
        time_ns = int.from_bytes(head.receive_times, "little", signed=True)
        return self.may_want(time_ns, time_ns)

    def _row_mask(self, columns: Columns) -> NDArray[np.bool_]:
        """A bit for each row: whether it matches by event time and tags."""
        wanted = self._selection
        masks: list[NDArray[np.bool_]] = []
        event_times = np.frombuffer(columns.event_times, np.int64)
        if wanted.event_since_ns is not None:
            masks.append(event_times >= wanted.event_since_ns)
        if wanted.event_until_ns is not None:
            masks.append(event_times < wanted.event_until_ns)
        if wanted.tags:
            masks.append(_tag_mask(columns, wanted.tags))
        # A column of one value stands for all rows.
        return np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*masks)), (columns.count,))


def _tag_mask(columns: Columns, tags: Mapping[str, str]) -> NDArray[np.bool_]:
    """A bit for each row: the few tag sets are compared first, then each row takes the bit of its set."""
    if not columns.tag_index:
        return np.zeros(1, np.bool_)
    wanted = tags.items()
    has_tags = np.array([wanted <= tag_set.items() for tag_set in columns.tag_sets], np.bool_)
    return has_tags[np.frombuffer(columns.tag_index, np.int32)]
