"""Cuts a read into tasks: resolves bounds to offsets, splits large ranges, combines small ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from runnel.errors import ClientFault
from runnel.spark.options import BoundKind, ReadBound, ReadBounds

# The fixed cost of a range in bytes: a request, or opening a file.
RANGE_BYTES: Final = 64 * 1024
# Each step halves the excess size that the largest task may have.
_BALANCING_STEPS: Final = 6

_Work = TypeVar("_Work")


class StoredOffsets(NamedTuple):
    """The stored offsets of a partition, from `first` on and below `next`."""

    first: int
    next: int


def resolve(
    places: ReadBounds,
    place: ReadBound,
    topic: str,
    partition: int,
    stored: StoredOffsets,
    *,
    is_strict: bool,
) -> int:
    """The offset of a bound that is not a time. If not strict, a removed offset becomes the first stored one."""
    match place.kind:
        case BoundKind.EARLIEST:
            return stored.first
        case BoundKind.LATEST:
            return stored.next
        case _:
            offset = place.value
    right = f"from {stored.first} to {stored.next}, the next message's, would be right"
    if offset > stored.next:
        raise ClientFault(
            f"option {places.option}: {topic}[{partition}] has not reached offset {offset}: {right}"
        )
    if offset < stored.first and is_strict:
        raise ClientFault(
            f"option {places.option}: offset {offset} of {topic}[{partition}] is gone: {right}, or failOnDataLoss=false"
        )
    return max(offset, stored.first)


def check_partitions(places: ReadBounds, counts: dict[str, int]) -> None:
    """Raise ClientFault unless the topics and partitions that an option names exist."""
    for topic, partition in places.chosen:
        count = counts.get(topic)
        if count is None:
            raise ClientFault(f"option {places.option}: {topic!r} is not among the topics read")
        if partition is not None and partition >= count:
            raise ClientFault(
                f"option {places.option}: {topic} has partitions 0 to {count - 1}, not {partition}"
            )


def split(begin: int, end: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Split a range into at most this many pieces of nearly equal length, none empty."""
    count = end - begin
    pieces = max(1, min(pieces, count))
    edges = [begin + count * piece // pieces for piece in range(pieces + 1)]
    yield from pairwise(edges)


def pack(sized: Iterable[tuple[_Work, int]], bytes_max: int) -> list[Sequence[_Work]]:
    """Combine neighbours up to `bytes_max`, into as few tasks as possible, of nearly equal size."""
    works = list(sized)
    sizes = [size for _, size in works]
    edges = _edges(sizes, bytes_max)
    low, high = 0, bytes_max
    for _ in range(_BALANCING_STEPS):
        middle = (low + high) // 2
        closer = _edges(sizes, middle)
        if len(closer) > len(edges):
            low = middle
        else:
            high, edges = middle, closer
    return [[work for work, _ in works[begin:end]] for begin, end in pairwise(edges)]


def _edges(sizes: Sequence[int], bytes_max: int) -> list[int]:
    """The begin of each task, and the end of the last one."""
    edges = [0]
    total = 0
    for number, size in enumerate(sizes):
        if number > edges[-1] and total + size > bytes_max:
            edges.append(number)
            total = 0
        total += size + RANGE_BYTES
    return [*edges, len(sizes)] if sizes else edges
