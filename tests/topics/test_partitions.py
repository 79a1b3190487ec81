"""Which partition a message goes to, and which shard a topic-partition lies in."""

from __future__ import annotations

import pytest

from runnel.topics.partitions import (
    KeylessTurns,
    fewest_shards,
    partition_of_key,
    partitions_of_keys,
    shard_of_partition,
)


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


@pytest.mark.parametrize(
    ("topic", "partition", "of_4", "of_7", "of_16"),
    [
        ("orders", 0, 1, 3, 5),
        ("orders", 1, 1, 5, 13),
        ("plant/a/T", 12, 0, 3, 12),
        ("größe", 0, 0, 4, 12),
    ],
)
def test_the_shard_of_a_topic_partition_is_the_documented_one(
    topic: str, partition: int, of_4: int, of_7: int, of_16: int
) -> None:
    found = [shard_of_partition(topic, partition, shards) for shards in (1, 4, 7, 16)]
    assert found == [0, of_4, of_7, of_16]


def test_topic_partitions_spread_over_all_shards() -> None:
    shards = [shard_of_partition(f"plant/{i}", i % 3, 8) for i in range(8000)]
    assert all(900 < shards.count(shard) < 1100 for shard in range(8))


@pytest.mark.parametrize("shards", [1, 2, 16, 1024])
def test_a_lost_number_of_shards_is_the_lowest_that_fits_what_was_found(shards: int) -> None:
    found = [(f"t{i}", i % 3, shard_of_partition(f"t{i}", i % 3, shards)) for i in range(30)]
    assert fewest_shards(found, 1 + max(shard for _, _, shard in found)) == shards
    assert fewest_shards([], 3) == 3
    assert fewest_shards([("t0", 0, 0), ("t0", 0, 1)], 2) is None
