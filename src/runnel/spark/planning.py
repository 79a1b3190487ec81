"""How a read is cut into tasks: places become offsets, large ranges are split, small ones share a task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from runnel.errors import ClientFault
from runnel.spark.options import Place, PlaceKind, Places

# What a range costs beside its bytes, as bytes: a request, or the opening of a file.
RANGE_BYTES: Final = 64 * 1024

_Work = TypeVar("_Work")


class Bounds(NamedTuple):
    """The offsets of a partition that are there."""

    first: int
    next: int


def resolve(
    places: Places, place: Place, topic: str, partition: int, there: Bounds, *, is_strict: bool
) -> int:
    """The offset of a place that is no time. Not strict: one that is gone becomes the first there is."""
    match place.kind:
        case PlaceKind.EARLIEST:
            return there.first
        case PlaceKind.LATEST:
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


def check_partitions(places: Places, counts: dict[str, int]) -> None:
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
    """Neighbours together as long as they are small together."""
    tasks: list[Sequence[_Work]] = []
    task: list[_Work] = []
    total = 0
    for work, size in sized:
        if task and total + size > bytes_max:
            tasks.append(task)
            task, total = [], 0
        task.append(work)
        total += size + RANGE_BYTES
    if task:
        tasks.append(task)
    return tasks
