"""Which partition a message goes to."""

from __future__ import annotations

import pytest

from runnel.topics.partitions import KeylessTurns, partition_of_key, partitions_of_keys


@pytest.mark.parametrize(
    ("key", "of_4", "of_7", "of_1024"),
    [
        (b"", 2, 4, 194),
        (b"a", 3, 1, 543),
        (b"sensor-1", 2, 0, 314),
        ("schlüssel".encode(), 2, 4, 222),
    ],
)
def test_the_partition_of_a_key_is_the_documented_one(
    key: bytes, of_4: int, of_7: int, of_1024: int
) -> None:
    assert [partition_of_key(key, n) for n in (1, 4, 7, 1024)] == [0, of_4, of_7, of_1024]


def test_many_keys_go_where_each_would_alone() -> None:
    keys = [b"a", None, b"", b"sensor-1", None]
    assert partitions_of_keys(keys, 4, keyless=1) == [3, 1, 2, 2, 1]
    assert partitions_of_keys(keys, 1, keyless=0) == [0] * 5
    assert partitions_of_keys([], 4, keyless=1) == []


def test_keys_spread_over_all_partitions() -> None:
    partitions = partitions_of_keys([b"key-%d" % i for i in range(8000)], 8, keyless=0)
    assert all(900 < partitions.count(p) < 1100 for p in range(8))


def test_without_a_key_a_publisher_stays_for_a_batch_and_then_moves_on() -> None:
    turns = KeylessTurns(3, begin=7)
    assert [turns.current, turns.current] == [1, 1]
    assert [turns.next_batch() for _ in range(4)] == [2, 0, 1, 2]
    assert turns.current == 2


def test_a_single_partition_has_no_turns() -> None:
    turns = KeylessTurns(1, begin=5)
    assert [turns.current, turns.next_batch(), turns.next_batch()] == [0, 0, 0]
