"""All benchmarks, in the order in which `bin/bench` runs them, and about how long each part takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import msgspec

from bench.report import Result

NAMES = (
    "live",
    "latency",
    "reading",
    "queue",
    "growth",
    "restart",
    "listeners",
    "log",
    "cores",
    "spark",
)

Part = tuple[str, Callable[..., list[Result]]]

# Of a full run and of a quick one, on two cores. Only for telling how long it will take.
_SECONDS: dict[str, dict[str, tuple[int, int]]] = {
    "live": {
        "one to one": (90, 25),
        "one to thirty": (85, 25),
        "clients": (90, 25),
        "stored": (125, 35),
        "saturated": (50, 8),
        "small batches": (75, 20),
        "memory": (60, 10),
    },
    "latency": {
        "1,000 a second": (140, 30),
        "5,000 a second": (115, 25),
        "20,000 a second": (115, 25),
    },
    "reading": {"objects": (85, 30), "arrow": (60, 20), "iteration": (25, 6)},
    "queue": {
        "work": (220, 50),
        "keys": (45, 8),
        "in flight": (110, 8),
        "idle subscriptions": (30, 8),
    },
    "growth": {
        "topics": (55, 12),
        "subscriptions": (55, 12),
        "connections": (60, 15),
        "stored bytes": (60, 12),
    },
    "restart": {"stored bytes": (180, 60), "topics": (70, 25)},
    "listeners": {"rest": (100, 10), "bulk": (25, 5), "grpc": (130, 15), "tokens": (120, 10)},
    "log": {
        "append": (8, 2),
        "read": (10, 4),
        "objects": (2, 1),
        "runs": (3, 1),
        "shards": (12, 3),
        "open": (12, 3),
        "topics": (4, 2),
        "fetch": (2, 1),
        "saturated": (4, 1),
    },
    "cores": {"work": (120, 25), "single messages": (60, 12), "pauses": (90, 20)},
    "spark": {"read": (70, 15), "archive": (90, 15), "stream": (90, 15), "write": (60, 12)},
}
_SECONDS_UNKNOWN = 60


class Job(msgspec.Struct, frozen=True):
    """Parts of one benchmark that a process of their own runs: if it dies, it takes no other part with it."""

    name: str
    titles: tuple[str, ...]

    def seconds(self, *, quick: bool) -> int:
        return sum(expected_seconds(self.name, title, quick=quick) for title in self.titles)

    @property
    def label(self) -> str:
        return f"{self.name}: {', '.join(self.titles)}"


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"bench.{name}")


def parts_of(name: str) -> Sequence[Part]:
    parts: Sequence[Part] = module_of(name).PARTS
    return parts


def titles_of(name: str) -> tuple[str, ...]:
    return tuple(title for title, _ in parts_of(name))


def expected_seconds(name: str, title: str, *, quick: bool) -> int:
    full, short = _SECONDS[name].get(title, (_SECONDS_UNKNOWN, _SECONDS_UNKNOWN))
    return short if quick else full


def jobs_of(name: str, titles: Sequence[str]) -> list[Job]:
    """A process a part; one for all where they share what is slow to set up."""
    if not titles:
        return []
    if hasattr(module_of(name), "setting"):
        return [Job(name, tuple(titles))]
    return [Job(name, (title,)) for title in titles]
