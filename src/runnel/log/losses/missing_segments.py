"""Finds the messages that a shard has lost: pure decisions over the numbers of its entries, offsets and segments.

Entries are numbered without holes, and so are the offsets of a partition and the segments of a shard. Only retention
and rewriting leave holes: the losses file lists the segments that retention removed, and a rewritten segment has a
generation above 0. Any other hole is a break: what was stored there is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from runnel.log.losses.shard_losses import Loss, LossesFile, LostRun, Range, without
from runnel.log.segments.index import RunTable
from runnel.log.segments.paths import segment_name
from runnel.log.segments.segments import MISSING_SEGMENT
from runnel.topics.names import TopicPartition

# A block number behind every block of a segment.
END: Final = 2**62
# The next entry of a segment whose end is not known.
UNKNOWN_ENTRY: Final = 2**62

_Place = tuple[
    int, int
]  # a segment's number, and twice the number of a block: breaks lie in between


class SegmentSpan(NamedTuple):
    """An existing segment: its entries from `first_entry` (0: not known) up to `next_entry`."""

    number: int
    generation: int
    first_entry: int
    next_entry: int
    end: int
    last_time_ns: int


class Break(NamedTuple):
    """A place where entries are missing: before a block of a segment, or the whole segment."""

    segment: int
    block: int
    file: str
    position: int
    size: int
    problem: str
    first_entry: int
    next_entry: int
    time_ns: int
    missing: Range = (0, 0)  # numbers of the missing segments

    @property
    def place(self) -> _Place:
        return self.segment, 2 * self.block - 1

    def loss(self, runs: Sequence[LostRun]) -> Loss:
        return Loss(
            self.segment,
            self.file,
            self.position,
            self.size,
            self.problem,
            self.first_entry,
            self.next_entry,
            self.time_ns,
            tuple(runs),
        )


def find_breaks(
    segments: Sequence[SegmentSpan], remembered: LossesFile, next_entry: int
) -> list[Break]:
    """The new breaks between segments, or behind the last: the catalogue knows of entries before `next_entry`."""
    return [
        found
        for found in _breaks(segments, remembered, next_entry)
        if not any(
            loss.first_entry <= found.first_entry and loss.next_entry >= found.next_entry
            for loss in remembered.losses
        )
    ]


def _breaks(
    segments: Sequence[SegmentSpan], remembered: LossesFile, next_entry: int
) -> Iterator[Break]:
    before = SegmentSpan(0, 0, 1, 1, 0, 0)
    for segment in segments:
        entries = (before.next_entry, segment.first_entry)
        if entries[1] > max(remembered.settled_entry, entries[0]):
            gone = sorted([*remembered.removed, *_lost_numbers(remembered.losses)])
            missing = list(without((before.number + 1, segment.number), gone))
            for numbers in missing:
                yield _missing(numbers, entries, segment.last_time_ns)
            if before.number == segment.number - 1 and before.number and not before.generation:
                text = f"entries {entries[0]} to {entries[1] - 1} are missing at the end"
                name = segment_name(before.number, before.generation)
                yield Break(
                    before.number, END, name, before.end, 0, text, *entries, before.last_time_ns
                )
        before = segment
    # Retention may have removed the last entries of a rewritten segment, or the last segment.
    if before.generation or remembered.was_removed(before.number + 1):
        return
    if next_entry > max(remembered.settled_entry, before.next_entry):
        numbers = (before.number + 1, before.number + 2)
        yield _missing(numbers, (before.next_entry, next_entry), before.last_time_ns)


def find_lost_end(
    segments: Sequence[SegmentSpan], remembered: LossesFile, number: int, end: int
) -> Break | None:
    """The break of the segment that was written last, if it is missing although `end` bytes of it were synced.

    Its next entry is 0: the number of its entries is not known.
    """
    before = segments[-1] if segments else SegmentSpan(0, 0, 1, 1, 0, 0)
    if number <= before.number or remembered.was_removed(number):
        return None
    if any(loss.segment >= number for loss in remembered.losses if not loss.position):
        return None
    gone = _missing((before.number + 1, number + 1), (before.next_entry, 0), before.last_time_ns)
    return gone._replace(problem=f"{gone.problem}; {end} bytes of the last had been stored")


def _lost_numbers(losses: Iterable[Loss]) -> list[Range]:
    """The numbers of segments that are known to be lost as a whole."""
    return [(loss.segment, loss.segment + 1) for loss in losses if not loss.position]


def _missing(numbers: Range, entries: Range, time_ns: int) -> Break:
    begin, end = numbers
    name = segment_name(begin, 0)
    problem = "segment is missing"
    if end - begin > 1:
        problem = f"segments {begin} to {end - 1} are missing"
    return Break(end - 1, 0, name, 0, 0, problem, *entries, time_ns, numbers)


class PartitionEnds(NamedTuple):
    """A partition's first offset that is not hidden, and its next offset, by the catalogue."""

    floor: int
    next_offset: int


def lost_runs(
    breaks: Sequence[Break],
    tables: Iterable[tuple[int, RunTable]],
    partitions: Mapping[TopicPartition, PartitionEnds],
    *,
    is_begin_known: bool,
    recorded: Mapping[TopicPartition, int],
) -> list[list[LostRun]]:
    """The messages that each break took: the holes in the offsets of every partition that lie across it.

    `tables` are the runs of the existing segments. `is_begin_known`: no segment was removed before the first of
    them. `recorded` are the next offsets at the beginning of the last segment, where the catalogue knows them.
    """
    search = _HoleSearch(breaks, partitions, is_begin_known=is_begin_known)
    number = 0
    tables = list(tables)
    for number, table in tables:
        search.add(number, table, recorded if number == tables[-1][0] else {})
    return search.finish()


class _HoleSearch:
    """Follows the offsets of each partition through the segments, and assigns each hole to a break."""

    def __init__(
        self,
        breaks: Sequence[Break],
        partitions: Mapping[TopicPartition, PartitionEnds],
        *,
        is_begin_known: bool,
    ) -> None:
        self._order = sorted(range(len(breaks)), key=lambda number: breaks[number].place)
        self._places = [breaks[number].place for number in self._order]
        self._broken = {found.segment for found in breaks}
        self._partitions = partitions
        self._is_begin_known = is_begin_known
        self._seen: dict[TopicPartition, tuple[int, _Place]] = {}
        self._lost: list[list[LostRun]] = [[] for _ in breaks]

    def add(self, number: int, table: RunTable, recorded: Mapping[TopicPartition, int]) -> None:
        ends = table.base_offsets + table.counts
        begin = 0
        for key, end in zip(table.keys, table.ends.tolist(), strict=True):
            if key in self._partitions:
                # In a segment without a break, rewriting has left the holes.
                runs = range(begin, end) if number in self._broken else (begin,)
                for at in runs:
                    last = at if number in self._broken else end - 1
                    self._check_begin(
                        key,
                        (number, 2 * int(table.blocks[at])),
                        int(table.base_offsets[at]),
                        recorded.get(key),
                    )
                    self._seen[key] = (int(ends[last]), (number, 2 * int(table.blocks[last])))
            begin = end

    def _check_begin(
        self, key: TopicPartition, place: _Place, base: int, recorded: int | None
    ) -> None:
        known = self._seen.get(key)
        if known is None:
            known = self._beginning(key)
        if known is None and recorded is not None and recorded <= base:
            known = recorded, (place[0], -2)
        if known is not None:
            self._add_hole(key, known[0], base, known[1], place)

    def _beginning(self, key: TopicPartition) -> tuple[int, _Place] | None:
        return (self._partitions[key].floor, (0, 0)) if self._is_begin_known else None

    def _add_hole(
        self, key: TopicPartition, first: int, following: int, after: _Place, before: _Place
    ) -> None:
        first = max(first, self._partitions[key].floor)
        # The last break between the two: it stays in the losses file as long as any of them.
        at = bisect_right(self._places, before) - 1
        if first < following and at >= 0 and self._places[at] > after:
            self._lost[self._order[at]].append(LostRun(*key, first, following))

    def finish(self) -> list[list[LostRun]]:
        for key, ends in self._partitions.items():
            known = self._seen.get(key) or self._beginning(key)
            if known is not None:
                self._add_hole(key, known[0], ends.next_offset, known[1], (END, END))
        return self._lost


def orphan_problem(first_entry: int, last_entry: int) -> str:
    """The problem text of a missing segment whose index says what it held."""
    return f"{MISSING_SEGMENT}: entries {first_entry} to {last_entry}"
