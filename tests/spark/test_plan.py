"""How pieces of work share tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runnel.spark.read.plan import RANGE_BYTES, pack

MIB = 2**20


def packed(sizes: list[int], bytes_max: int) -> list[list[int]]:
    return [list(task) for task in pack([(size, size) for size in sizes], bytes_max)]


def test_nothing_to_read_needs_no_task() -> None:
    assert packed([], MIB) == []


def test_small_pieces_share_a_task_and_large_ones_have_their_own() -> None:
    assert packed([100] * 5, MIB) == [[100] * 5]
    assert packed([5 * MIB, 7 * MIB], MIB) == [[5 * MIB], [7 * MIB]]


def test_tasks_are_of_nearly_one_size() -> None:
    tasks = packed([4 * MIB] * 27, 58 * MIB)
    assert [len(task) for task in tasks] == [14, 13]


def test_a_few_more_than_fit_do_not_become_a_task_of_their_own() -> None:
    tasks = packed([4 * MIB] * 15, 58 * MIB)
    assert [len(task) for task in tasks] == [8, 7]


@given(st.lists(st.integers(1, 20 * MIB), max_size=60), st.integers(1, 64 * MIB))
def test_no_task_is_too_large_unless_it_is_one_piece(sizes: list[int], bytes_max: int) -> None:
    tasks = packed(sizes, bytes_max)
    assert [size for task in tasks for size in task] == sizes
    for task in tasks:
        assert task
        assert len(task) == 1 or sum(task) + (len(task) - 1) * RANGE_BYTES <= bytes_max
