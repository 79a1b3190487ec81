"""A small model of the log: runs of messages by partition, and holes where retention took some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.group_rules.history import Place


class Run(NamedTuple):
    """Messages with consecutive offsets, as they are read; each costs so many bytes of a window."""

    base: int
    keys: Sequence[bytes | None]
    cost_bytes: int

    @property
    def end(self) -> int:
        return self.base + len(self.keys)

    def cut(self, begin: int, end: int) -> Run:
        begin = min(max(begin, self.base), self.end)
        end = max(begin, min(end, self.end))
        return Run(begin, self.keys[begin - self.base : end - self.base], self.cost_bytes)


class ModelLog:
    def __init__(self) -> None:
        self.runs: dict[Place, list[Run]] = {}
        self.ends: dict[Place, int] = {}

    def make(self, place: Place, first: int) -> None:
        self.runs[place] = []
        self.ends[place] = first

    def delete(self, place: Place) -> None:
        del self.runs[place], self.ends[place]

    def publish(self, place: Place, keys: Sequence[bytes | None], cost_bytes: int) -> Run:
        run = Run(self.ends[place], tuple(keys), cost_bytes)
        self.runs[place].append(run)
        self.ends[place] = run.end
        return run

    def first(self, place: Place) -> int:
        """Before it, nothing is left."""
        runs = self.runs[place]
        return runs[0].base if runs else self.ends[place]

    def remove(self, place: Place, begin: int, end: int) -> None:
        left = []
        for run in self.runs[place]:
            left += [run.cut(run.base, begin), run.cut(end, run.end)]
        self.runs[place] = [run for run in left if run.keys]

    def has(self, place: Place, offset: int) -> bool:
        run = self.read(place, offset)
        return run is not None and run.base <= offset

    def read(self, place: Place, offset: int) -> Run | None:
        """The run with this offset, or the next one behind it."""
        return next((run for run in self.runs[place] if run.end > offset), None)
