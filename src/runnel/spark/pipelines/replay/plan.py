"""What is replayed, settled once: how much of each partition, by which task, into what. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec


class PartitionRows(msgspec.Struct, frozen=True, order=True):
    """What a selection has of one partition: offsets from `begin` on and below `end`, not all of them perhaps."""

    topic: str
    partition: int
    begin: int
    end: int
    rows: int


class ReplayTarget(msgspec.Struct, frozen=True):
    """Where the messages of a topic go. With another number of partitions, they go by key."""

    topic: str
    partitions: int
    keeps_partition: bool


class ReplayPart(msgspec.Struct, frozen=True):
    """A partition that one task replays, from its first message to its last."""

    found: PartitionRows
    target: ReplayTarget
    task: int


def assign(found: Iterable[PartitionRows], tasks_max: int) -> list[tuple[PartitionRows, int]]:
    """A task for each partition, so that all have about as much to do, and none nothing. The same for the same."""
    ordered = sorted(found, key=lambda each: (-each.rows, each))
    loads = [(0, task) for task in range(min(tasks_max, len(ordered)))]  # a heap: the least first
    assigned = []
    for each in ordered:
        rows, task = loads[0]
        heapq.heapreplace(loads, (rows + each.rows, task))
        assigned.append((each, task))
    return sorted(assigned)


def rows_by_task(parts: Sequence[ReplayPart]) -> tuple[int, ...]:
    rows = [0] * (1 + max(part.task for part in parts))
    for part in parts:
        rows[part.task] += part.found.rows
    return tuple(rows)
