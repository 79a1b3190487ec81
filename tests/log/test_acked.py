"""Ranges of offsets that stay, against sets of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runnel.log.log import Hold, ShardId
from runnel.log.metadata.cursors import CursorTable
from runnel.log.retention import acked
from runnel.log.retention.acked import PartitionSpan, Range, Remainder
from runnel.log.retention.holds import Holds, ShardHolds
from runnel.log.segments.index import RunTable
from tests.log.fake_holds import Acknowledged, FakeHolds

OFFSETS = st.sets(st.integers(1, 40))


def ranges_of(offsets: set[int]) -> list[Range]:
    """As few as possible, in order."""
    found: list[Range] = []
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


def offsets_in(ranges: list[Range]) -> set[int]:
    found = [offset for begin, end in ranges for offset in range(begin, end)]
    assert found == sorted(set(found))
    return set(found)


def table_of(offsets: set[int]) -> RunTable:
    """One partition's runs, as short as they may be: one for each message."""
    bases = np.array(sorted(offsets), np.int64)
    ones = np.ones(len(bases), np.int64)
    return RunTable([("a", 0)], np.array([len(bases)]), bases, ones, ones, ones)


@given(OFFSETS, st.integers(1, 40), st.integers(1, 40))
def test_part_of_ranges_between_two_offsets(offsets: set[int], begin: int, end: int) -> None:
    within = acked.within(ranges_of(offsets), begin, end)
    assert offsets_in(within) == {offset for offset in offsets if begin <= offset < end}


@given(
    st.none() | OFFSETS,
    st.none() | st.integers(1, 45),
    st.integers(1, 45),
    st.integers(1, 40),
    st.integers(0, 10),
)
def test_what_is_owed_or_held_or_not_covered_stays(
    owed: set[int] | None, held_from: int | None, floor: int, begin: int, count: int
) -> None:
    span = range(begin, begin + count)
    left = acked.left_of(
        begin,
        begin + count,
        owed=None if owed is None else ranges_of(owed & set(span)),
        held_from=held_from,
        floor=floor,
    )
    assert offsets_in(left) == {
        offset
        for offset in span
        if offset >= floor
        and (owed is None or offset in owed or (held_from is not None and offset >= held_from))
    }


@given(OFFSETS, OFFSETS)
def test_messages_that_are_there_are_counted(wanted: set[int], there: set[int]) -> None:
    if there:
        count = acked.count_there(ranges_of(wanted), table_of(there))
        assert count == len(wanted & there)


def test_longer_runs_are_counted_too() -> None:
    table = RunTable(
        [("a", 0)],
        np.array([2]),
        np.array([10, 30]),
        np.array([5, 10]),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
    )
    assert acked.count_there([(1, 100)], table) == 15
    assert acked.count_there([(1, 11), (14, 31), (39, 50)], table) == 1 + 1 + 1 + 1
    assert acked.count_there([(15, 30)], table) == 0
    assert acked.count_there([], table) == 0


def test_spans_tell_each_partition_and_its_holes() -> None:
    table = RunTable(
        [("a", 0), ("b", 1)],
        np.array([2, 3]),
        np.array([1, 4, 7]),
        np.array([3, 2, 1]),
        np.zeros(3, np.int64),
        np.zeros(3, np.int64),
    )
    whole, single = acked.spans_of(table)
    assert whole == PartitionSpan(("a", 0), 1, 6, 5)
    assert single == PartitionSpan(("b", 1), 7, 8, 1)
    assert not whole.has_holes
    assert PartitionSpan(("a", 0), 1, 7, 5).has_holes


def test_half_a_segment_is_worth_rewriting_and_an_empty_one_is_not() -> None:
    assert Remainder(5, 10, {}).is_sparse
    assert not Remainder(6, 10, {}).is_sparse
    assert Remainder(0, 10, {}).is_nothing
    assert not Remainder(0, 0, {}).is_nothing
    assert not Remainder(0, 0, {}).is_sparse


def test_holds_are_found_by_partition_and_by_pattern() -> None:
    holds = Holds(
        [
            Hold("one", ("a", 0), 5, 0, ()),
            Hold("two", ("a", 0), 3, 0, ()),
            Hold("three", None, 0, 7, ("a*", "b")),
        ]
    )
    assert holds
    assert not Holds(())
    assert holds.holders(("a", 0), 5, 6) == {"two"}
    assert holds.holders(("a", 0), 6, 7) == {"one", "two", "three"}
    assert not holds.is_held(("b", 0), 100, 6)
    assert holds.is_held(("b", 0), 1, 7)
    assert (holds.lowest_offset(("a", 0)), holds.lowest_entry(("a", 0))) == (3, 7)
    assert (holds.lowest_offset(("b", 0)), holds.lowest_entry(("b", 0))) == (None, 7)
    assert holds.lowest_entry(("c", 0)) is None


def test_many_offsets_are_asked_about_in_parts_and_answered_as_one() -> None:
    subscriptions = FakeHolds(work=Acknowledged(("a", 0)))
    holds = ShardHolds(ShardId("main"), CursorTable(1, lambda _: None), subscriptions)
    subscriptions.ack("work", ("a", 0), [1, 40_000])
    owed = holds.owed(("a", 0), 1, 50_001)
    assert subscriptions.questions == 4
    assert owed is not None
    assert offsets_in(owed) == set(range(2, 50_001)) - {40_000}
    assert holds.owed(("b", 0), 1, 50_001) is None
    assert holds.owed(("a", 0), 7, 7) == []
