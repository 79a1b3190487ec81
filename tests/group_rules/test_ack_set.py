"""Which offsets are done: the floor, what is above it, and that any order of adding comes to the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.masks import runs

BLOCK = 4096


def test_nothing_is_done_at_first() -> None:
    acked = AckSet()
    assert acked.floor == 1
    assert 1 not in acked
    assert acked.ranges() == []
    assert acked.count_above == 0


def test_everything_below_the_floor_is_done() -> None:
    acked = AckSet(10)
    assert 9 in acked
    assert 10 not in acked
    assert acked.mask(8, 12) == 0b0011


def test_in_order_only_the_floor_moves() -> None:
    acked = AckSet()
    for offset in range(1, 10_000):
        assert acked.add(offset, offset + 1) == [(offset, offset + 1)]
    assert (acked.floor, acked.ranges(), acked.count_above) == (10_000, [], 0)


def test_a_straggler_holds_the_floor_and_nothing_else() -> None:
    acked = AckSet()
    acked.add(2, 1_000_000)
    assert acked.snapshot() == (1, [(2, 1_000_000)])
    assert acked.count_above == 999_998
    acked.add(1, 2)
    assert acked.snapshot() == (1_000_000, [])
    assert acked.count_above == 0


def test_only_what_was_not_done_before_is_reported() -> None:
    acked = AckSet()
    acked.add(5, 8)
    acked.add(10, 11)
    assert acked.add(4, 13) == [(4, 5), (8, 10), (11, 13)]
    assert acked.add(4, 13) == []
    assert acked.add(1, 5) == [(1, 4)]
    assert acked.floor == 13


def test_only_what_was_not_done_before_is_told_across_blocks() -> None:
    acked = AckSet()
    acked.add(BLOCK - 1, BLOCK + 2)
    assert acked.add(BLOCK - 3, 3 * BLOCK) == [(BLOCK - 3, BLOCK - 1), (BLOCK + 2, 3 * BLOCK)]
    assert acked.add(1, 4 * BLOCK) == [(1, BLOCK - 3), (3 * BLOCK, 4 * BLOCK)]
    assert acked.snapshot() == (4 * BLOCK, [])


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (7, 3), (-10, 1), (0, 0)])
def test_an_empty_range_adds_nothing(begin: int, end: int) -> None:
    acked = AckSet()
    assert acked.add(begin, end) == []
    assert acked.snapshot() == (1, [])


def test_ranges_join_across_blocks() -> None:
    acked = AckSet(1, [(BLOCK - 5, BLOCK), (BLOCK, BLOCK + 5)])
    assert acked.ranges() == [(BLOCK - 5, BLOCK + 5)]


def test_a_mask_says_which_of_a_stretch_are_done() -> None:
    acked = AckSet(5, [(7, 9), (BLOCK, BLOCK + 1)])
    assert acked.mask(3, 11) == 0b00110011
    assert acked.mask(BLOCK - 1, BLOCK + 2) == 0b010
    assert acked.mask(4, 4) == 0


def test_the_first_missing_is_found_behind_full_blocks() -> None:
    acked = AckSet(1, [(2, 3 * BLOCK + 7)])
    assert acked.first_missing(0) == 1
    assert acked.first_missing(2) == 3 * BLOCK + 7
    assert acked.first_missing(BLOCK) == 3 * BLOCK + 7
    assert acked.first_missing(10 * BLOCK) == 10 * BLOCK


def test_missing_ranges_cost_by_what_is_known_not_by_their_length() -> None:
    acked = AckSet(1, [(2**40, 2**40 + 5)])
    assert acked.missing(1, 2**50) == [(1, 2**40), (2**40 + 5, 2**50)]


def test_a_vast_range_at_the_floor_is_passed_in_one_step() -> None:
    acked = AckSet(1, [(100, 200), (2**50, 2**50 + 1)])
    assert acked.add(1, 2**50) == [(1, 100), (200, 2**50)]
    assert acked.snapshot() == (2**50 + 1, [])
    assert acked.count_above == 0


def test_what_is_discarded_is_owed_again() -> None:
    acked = AckSet(1, [(1, 20), (30, 40)])
    acked.discard(35, 36)
    assert acked.snapshot() == (20, [(30, 35), (36, 40)])
    acked.discard(7, 8)
    assert acked.snapshot() == (7, [(8, 20), (30, 35), (36, 40)])
    assert acked.count_above == 12 + 9
    acked.add(7, 8)
    assert acked.floor == 20


def test_a_copy_goes_its_own_way() -> None:
    acked = AckSet(1, [(3, 5)])
    twin = acked.copy()
    assert twin == acked
    twin.add(1, 3)
    assert (acked.floor, twin.floor) == (1, 5)
    assert twin != acked


@pytest.mark.parametrize("seed", range(4))
def test_every_order_comes_to_the_same(seed: int) -> None:
    offsets = list(range(1, 3 * BLOCK))
    random.Random(seed).shuffle(offsets)
    acked = AckSet()
    for place, offset in enumerate(offsets):
        assert acked.add(offset, offset + 1) == [(offset, offset + 1)]
        if place % 1000 == 0:
            done = set(offsets[: place + 1])
            assert acked.floor == min(set(range(1, 3 * BLOCK + 1)) - done)
            assert acked.count_above == sum(offset > acked.floor for offset in done)
    assert acked.snapshot() == (3 * BLOCK, [])


_near_borders = st.sampled_from(
    [1, 2, 3, 60, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3]
)
_ranges = st.tuples(_near_borders, st.sampled_from([0, 1, 2, 5, 64, BLOCK, BLOCK + 2]))


@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "mask", "discard"]), _ranges), max_size=12)
)
def test_it_is_a_set_of_offsets(steps: list[tuple[str, tuple[int, int]]]) -> None:
    acked, naive = AckSet(), set(range(-10, 1))
    for step, (begin, length) in steps:
        named = set(range(begin, begin + length))
        if step == "discard":
            acked.discard(begin, begin + length)
            naive -= named
            continue
        if step == "mask":
            named = {offset for offset in named if offset % 3}
            mask = sum(1 << offset - begin for offset in named)
            added = runs(begin, acked.add_scattered(begin, mask))
        else:
            added = acked.add(begin, begin + length)
        assert {offset for first, last in added for offset in range(first, last)} == named - naive
        naive |= named
    floor = next(offset for offset in range(1, 5 * BLOCK) if offset not in naive)
    above = {offset for offset in naive if offset > floor}
    assert acked.floor == floor
    assert acked.count_above == len(above)
    assert {offset for first, last in acked.ranges() for offset in range(first, last)} == above
    assert AckSet(*acked.snapshot()) == acked
    for offset in (1, 61, BLOCK, 2 * BLOCK - 1):
        assert (offset in acked) == (offset in naive)
        owed = next(o for o in range(offset, 6 * BLOCK) if o not in naive)
        assert acked.first_missing(offset) == owed
    mask = acked.mask(50, 2 * BLOCK + 10)
    assert mask == sum(1 << o - 50 for o in naive if 50 <= o < 2 * BLOCK + 10)
    missing = {o for b, e in acked.missing(50, 2 * BLOCK + 10) for o in range(b, e)}
    assert missing == set(range(50, 2 * BLOCK + 10)) - naive
