"""Chooses the partition of a message: by its key, or in turns without one.

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
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition, from 0, of a message with this partition key."""
    return xxh3_64_intdigest(key) % partitions


def partitions_of_keys(keys: Iterable[bytes | None], partitions: int, *, keyless: int) -> list[int]:
    """The partitions of many messages; those without a key (None) go to `keyless`."""
    if partitions == 1:
        return [0 for _ in keys]
    digest = xxh3_64_intdigest
    return [keyless if key is None else digest(key) % partitions for key in keys]


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
