"""When messages of a replay leave: by event time or at a rate, never early, in the same slots every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.spark.pipelines.replay.timetable import (
    SLOT_NS,
    ByEventTime,
    ByRate,
    Cut,
    Pacer,
    Slot,
    Timetable,
    shortened,
    slots,
)

SECOND_NS = 10**9
FIRST_NS = 1_700_000_000_000_000_007


def rows(due: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"due_ns": pa.array(due, pa.int64()), "row": range(len(due))})


def in_pieces(whole: pa.RecordBatch, ends: Iterable[int]) -> list[pa.RecordBatch]:
    edges = [0, *sorted(end % (whole.num_rows + 1) for end in ends), whole.num_rows]
    return [whole.slice(a, b - a) for a, b in pairwise(edges)]


def shapes(found: Iterable[Slot]) -> list[tuple[int, list[int]]]:
    return [(slot.at_ns, slot.rows.column("row").to_pylist()) for slot in found]


# --- Timetables ---


def test_by_event_time_the_clock_is_that_of_the_messages_times_the_speed() -> None:
    due = rows([FIRST_NS, FIRST_NS + SECOND_NS, FIRST_NS + 60 * SECOND_NS])
    assert ByEventTime(FIRST_NS, 1).times(due, 0).tolist() == [0, SECOND_NS, 60 * SECOND_NS]
    assert ByEventTime(FIRST_NS, 10).times(due, 5).tolist() == [0, SECOND_NS // 10, 6 * SECOND_NS]


def test_long_gaps_are_shortened_and_all_behind_them_comes_earlier() -> None:
    day_ns = 86_400 * SECOND_NS
    due = [0, 5, day_ns, day_ns + 5, 3 * day_ns]
    cuts = shortened([(day_ns + 5, 3 * day_ns), (5, day_ns)], 10)
    assert cuts == (Cut(day_ns, day_ns - 15), Cut(3 * day_ns, 3 * day_ns - 30))
    assert ByEventTime(0, 1, cuts).times(rows(due), 0).tolist() == [0, 5, 15, 20, 30]


def test_a_rate_spreads_rows_evenly_whatever_came_before() -> None:
    assert ByRate(4).times(rows([9, 9, 9]), 2).tolist() == [
        SECOND_NS // 2,
        3 * SECOND_NS // 4,
        SECOND_NS,
    ]


# --- Slots ---


def test_rows_of_one_slot_leave_together_when_the_last_is_due() -> None:
    due = [0, 1, SLOT_NS - 1, SLOT_NS, 5 * SLOT_NS + 3]
    assert shapes(slots([rows(due)], ByEventTime(0, 1))) == [
        (SLOT_NS - 1, [0, 1, 2]),
        (SLOT_NS, [3]),
        (5 * SLOT_NS + 3, [4]),
    ]


@given(
    gaps=st.lists(st.sampled_from([0, 1, SLOT_NS // 3, SLOT_NS, 7 * SLOT_NS]), max_size=60),
    ends=st.lists(st.integers(0, 100), max_size=5),
    timetable=st.sampled_from([ByEventTime(0, 1), ByEventTime(0, 3.7), ByRate(33.3)]),
)
def test_slots_do_not_depend_on_how_rows_arrive(
    gaps: list[int], ends: list[int], timetable: Timetable
) -> None:
    due: list[int] = []
    for gap in gaps:
        due.append((due[-1] if due else 0) + gap)
    whole = rows(due)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runnel.spark.pipelines.replay.timetable.SLOT_ROWS_MAX", 4)
        expected = shapes(slots([whole], timetable))
        assert shapes(slots(in_pieces(whole, ends), timetable)) == expected
    times = timetable.times(whole, 0).tolist()
    assert [row for _, found in expected for row in found] == list(range(len(due)))
    for at_ns, found in expected:
        assert len(found) <= 4
        assert at_ns == times[found[-1]]
        assert times[found[-1]] - times[found[0]] < SLOT_NS


# --- Waiting ---


class StandingClock:
    """Stands still unless somebody sleeps."""

    def __init__(self) -> None:
        self.time_ns = 77

    def monotonic_ns(self) -> int:
        return self.time_ns

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time_ns += max(1, round(seconds * SECOND_NS))


def slot(at_ns: int) -> Slot:
    return Slot(at_ns, rows([at_ns]))


def left(
    clock: StandingClock, begin_ns: int, times: Iterable[int], *, takes_ns: int = 0
) -> list[tuple[int, int]]:
    """When each slot left, and when it should have."""
    pacer = Pacer(clock, begin_ns)
    found = []
    for burst in pacer.bursts(map(slot, times), lambda _: None):
        for each in burst:
            found.append((pacer.now_ns, each.at_ns))
            clock.time_ns += takes_ns
    return found


def test_slots_leave_when_they_are_due() -> None:
    times = [0, SECOND_NS // 2, SECOND_NS // 2, 100 * SECOND_NS]
    assert left(StandingClock(), 0, times) == [(at_ns, at_ns) for at_ns in times]


def test_what_is_late_leaves_at_once_and_nothing_is_early() -> None:
    found = left(StandingClock(), 0, [10, 20, 30, 1000], takes_ns=100)
    assert found == [(10, 10), (110, 20), (210, 30), (1000, 1000)]


def test_a_replay_that_goes_on_sends_what_was_due_and_waits_for_the_rest() -> None:
    begin_ns = 50 * SECOND_NS
    assert left(StandingClock(), begin_ns, [0, 49 * SECOND_NS, 51 * SECOND_NS]) == [
        (begin_ns, 0),
        (begin_ns, 49 * SECOND_NS),
        (51 * SECOND_NS, 51 * SECOND_NS),
    ]


def test_waiting_is_told_about_every_second_with_a_time_that_has_been_reached() -> None:
    told: list[int] = []
    pacer = Pacer(StandingClock(), 0)
    for burst in pacer.bursts(iter([slot(3 * SECOND_NS // 2), slot(4 * SECOND_NS)]), told.append):
        list(burst)
    assert told == [
        0,
        SECOND_NS,
        3 * SECOND_NS // 2,
        5 * SECOND_NS // 2,
        7 * SECOND_NS // 2,
    ]
