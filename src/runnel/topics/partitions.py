"""Chooses the partition of a message, by its key or in turns without one, and the shard of a topic-partition.

The exact rule, for clients in other languages: take the message's `partition_key`, or its `key` if it has none. If
there is one, even an empty one, hash its bytes with XXH3 (64 bits, seed 0, no secret). The result, as an unsigned
integer, modulo the topic's number of partitions is the partition. Partitions are counted from 0.

    key           XXH3-64             of 4   of 7   of 1024
    (empty)       2d06800538d394c2       2      4       194
    a             e6c632b61e964e1f       3      1       543
    sensor-1      bb05c9a08b99653a       2      0       314
    schlüssel     1aca8ef6171a20de       2      4       222    (as UTF-8: 10 bytes)

Messages without any key go to one partition while a batch fills, and to the next partition with the next batch. So they
spread over time, and each batch still has few runs.

A topic-partition lies in one shard of its journal. With the number of shards that was fixed when the journal was made,
the shard is the XXH3 (as above) of the topic's name as UTF-8, a NUL byte and the partition in decimal digits, modulo
the number of shards. Shards are counted from 0.

topic            partition   XXH3-64             of 4   of 7   of 16
orders                   0   4557a02fece62645       1      3       5
orders                   1   bd2125adfe3cc80d       1      5      13
plant/a/T               12   b34cc1dd51615f9c       0      3      12
größe                    0   070a3a4c2e052cfc       0      4      12    (as UTF-8: 7 bytes)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

SHARDS_MAX: Final = 1024  # of one journal


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition, from 0, of a message with this partition key."""
    return xxh3_64_intdigest(key) % partitions


def partitions_of_keys(keys: Iterable[bytes | None], partitions: int, *, keyless: int) -> list[int]:
    """The partitions of many messages; those without a key (None) go to `keyless`."""
    if partitions == 1:
        return [0 for _ in keys]
    digest = xxh3_64_intdigest
    return [keyless if key is None else digest(key) % partitions for key in keys]


def shard_of_partition(topic: str, partition: int, shards: int) -> int:
    """The shard, from 0, of a topic-partition in a journal with this many shards."""
    if shards == 1:
        return 0
    return xxh3_64_intdigest(b"%b\0%d" % (topic.encode(), partition)) % shards


def fewest_shards(found: Iterable[tuple[str, int, int]], at_least: int) -> int | None:
    """The lowest number of shards that puts every topic-partition into the shard where it was found.

    `found` has topic, partition and shard. None: no number does. It restores a number that was lost.
    """
    places = set(found)
    for shards in range(max(1, at_least), SHARDS_MAX + 1):
        if all(shard_of_partition(topic, part, shards) == shard for topic, part, shard in places):
            return shards
    return None


class KeylessTurns:
    """Rotates one publisher's messages without a key through a topic's partitions, batch by batch.

    The caller chooses the first partition. Publishers should begin at different ones; otherwise a thousand publishers
    that start together would all fill the same partition.
    """

    __slots__ = ("_partitions", "current")

    def __init__(self, partitions: int, *, begin: int = 0) -> None:
        self._partitions = partitions
        self.current = begin % partitions

    def next_batch(self) -> int:
        """Move on after a batch was sent; returns the partition for the next batch."""
        self.current = (self.current + 1) % self._partitions
        return self.current
