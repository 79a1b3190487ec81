"""Offsets in order, and the stretch that is worth reading from the lowest on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runnel.group_rules.masks import BLOCK, lowest, offsets, runs
from runnel.group_rules.offset_set import OffsetSet


def test_the_lowest_comes_first_whatever_the_order() -> None:
    due = OffsetSet()
    for offset in (900_000, 7, 100_000):
        due.add(offset)
    assert due.stretch() == (7, 8)
    due.discard(7)
    assert due.stretch() == (100_000, 100_001)
    due.add(8)
    assert due.stretch() == (8, 9)


def test_a_stretch_bridges_small_gaps_and_ends_at_large_ones() -> None:
    due = OffsetSet()
    for offset in (10, 12, 70, 500):
        due.add(offset)
    assert due.stretch() == (10, 71)
    due.discard_range(10, 71)
    assert due.stretch() == (500, 501)


def test_without_offsets_there_is_no_stretch() -> None:
    due = OffsetSet()
    assert due.stretch() is None
    due.add(5)
    assert due.discard(5)
    assert not due.discard(5)
    assert due.stretch() is None
    assert not due


def test_a_vast_range_is_discarded_by_what_is_there() -> None:
    due = OffsetSet()
    due.add_range(100, 200)
    assert due.discard_range(150, 2**60) == 50
    assert len(due) == 50


def test_offsets_that_come_and_go_leave_nothing_behind() -> None:
    due = OffsetSet()
    due.add(1)
    for _ in range(1_000):
        due.add(10 * BLOCK)
        due.discard(10 * BLOCK)
    assert len(due._order) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * BLOCK), st.integers(0, 2**70))))
def test_it_is_a_set(steps: list[tuple[bool, int, int]]) -> None:
    due, naive = OffsetSet(), set[int]()
    for is_added, base, mask in steps:
        named = set(offsets(base, mask))
        if is_added:
            due.add_mask(base, mask)
            naive |= named
        else:
            assert due.discard_mask(base, mask) == len(naive & named)
            naive -= named
    assert len(due) == len(naive)
    assert due.mask(0, 4 * BLOCK) == sum(1 << offset for offset in naive)
    assert (due.stretch() or (None,))[0] == min(naive, default=None)


@given(st.integers(0, 2**200), st.integers(1, 300))
def test_masks_tell_their_runs_and_their_lowest(mask: int, count: int) -> None:
    naive = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    assert offsets(1_000, mask) == [1_000 + bit for bit in naive]
    assert [o for b, e in runs(0, mask) for o in range(b, e)] == naive
    assert all(b[0] > a[1] for a, b in zip(runs(0, mask), runs(0, mask)[1:], strict=False))
    assert offsets(0, lowest(mask, count)) == naive[:count]
