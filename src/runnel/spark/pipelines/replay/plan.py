"""The plan of a replay: how much of each partition, by which task, into which topic. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec


class PartitionRows(msgspec.Struct, frozen=True, order=True):
    """The selected rows of one topic-partition: some or all offsets from `begin` on and below `end`."""

    topic: str
    partition: int
    begin: int
    end: int
    rows: int


class ReplayTarget(msgspec.Struct, frozen=True):
    """The topic that a topic's messages go to. If it has another number of partitions, keys decide."""

    topic: str
    partitions: int
    keeps_partition: bool


class ReplayPart(msgspec.Struct, frozen=True):
    """A partition that one task replays, from its first message to its last, and its target."""

    found: PartitionRows
    target: ReplayTarget
    task: int


def assign(found: Iterable[PartitionRows], tasks_max: int) -> list[tuple[PartitionRows, int]]:
    """Assign each partition to a task, so that all tasks have about the same work and none has none. Deterministic."""
    ordered = sorted(found, key=lambda each: (-each.rows, each))
    loads = [
        (0, task) for task in range(min(tasks_max, len(ordered)))
    ]  # a heap with the smallest load first
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
