"""How a read is cut into tasks: places become offsets, large ranges are split, small ones share a task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from runnel.errors import ClientFault
from runnel.spark.options import BoundKind, ReadBound, ReadBounds

# What a range costs beside its bytes, as bytes: a request, or the opening of a file.
RANGE_BYTES: Final = 64 * 1024
# Each halves how much larger the largest task may be than it has to.
_BALANCING_STEPS: Final = 6

_Work = TypeVar("_Work")


class StoredOffsets(NamedTuple):
    """The offsets of a partition that are there."""

    first: int
    next: int


def resolve(
    places: ReadBounds,
    place: ReadBound,
    topic: str,
    partition: int,
    there: StoredOffsets,
    *,
    is_strict: bool,
) -> int:
    """The offset of a place that is no time. Not strict: one that is gone becomes the first there is."""
    match place.kind:
        case BoundKind.EARLIEST:
            return there.first
        case BoundKind.LATEST:
            return there.next
        case _:
            offset = place.value
    right = f"from {there.first} to {there.next}, the next message's, would be right"
    if offset > there.next:
        raise ClientFault(
            f"option {places.option}: {topic}[{partition}] has not reached offset {offset}: {right}"
        )
    if offset < there.first and is_strict:
        raise ClientFault(
            f"option {places.option}: offset {offset} of {topic}[{partition}] is gone: {right}, or failOnDataLoss=false"
        )
    return max(offset, there.first)


def check_partitions(places: ReadBounds, counts: dict[str, int]) -> None:
    """Whether the topics and partitions that an option names exist."""
    for topic, partition in places.chosen:
        count = counts.get(topic)
        if count is None:
            raise ClientFault(f"option {places.option}: {topic!r} is not among the topics read")
        if partition is not None and partition >= count:
            raise ClientFault(
                f"option {places.option}: {topic} has partitions 0 to {count - 1}, not {partition}"
            )


def split(begin: int, end: int, pieces: int) -> Iterator[tuple[int, int]]:
    """A range in so many pieces of nearly one length, but none empty."""
    count = end - begin
    pieces = max(1, min(pieces, count))
    edges = [begin + count * piece // pieces for piece in range(pieces + 1)]
    yield from pairwise(edges)


def pack(sized: Iterable[tuple[_Work, int]], bytes_max: int) -> list[Sequence[_Work]]:
    """Neighbours together as long as they are small together: in as few tasks as that takes, of nearly one size."""
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
    """Where tasks begin, and where the last one ends."""
    edges = [0]
    total = 0
    for number, size in enumerate(sizes):
        if number > edges[-1] and total + size > bytes_max:
            edges.append(number)
            total = 0
        total += size + RANGE_BYTES
    return [*edges, len(sizes)] if sizes else edges
