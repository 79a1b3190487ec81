"""The current state of the demo: all parts write it, the view reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from examples.demo.evidence import PipelineReport, ShopReport, WorkerReport
from examples.demo.world import OrderSource


@dataclass(slots=True)
class Happening:
    """An event for the reader, and its time."""

    at_s: float
    text: str
    is_trouble: bool = False


@dataclass(slots=True)
class Board:
    """Its progress so far; the numbers only grow."""

    begun: float = field(default_factory=time.perf_counter)
    phase: str = "starting"
    listeners: tuple[str, ...] = ()
    is_broker_up: bool = False
    sent: int = 0
    stored: int = 0
    seen: int = 0
    p50_ms: float = 0.0
    celsius: dict[str, float] = field(default_factory=dict)  # by region, the last known
    shops: dict[OrderSource, ShopReport] = field(default_factory=dict)
    workers: dict[str, WorkerReport] = field(default_factory=dict)
    gone: WorkerReport = field(default_factory=WorkerReport)  # of workers that have ended
    pipeline: PipelineReport = field(default_factory=PipelineReport)
    happenings: list[Happening] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def say(self, text: str, *, is_trouble: bool = False) -> None:
        self.happenings.append(Happening(self.seconds, text, is_trouble))

    def work(self) -> WorkerReport:
        """The sum over all workers."""
        everybody = [self.gone, *self.workers.values()]
        return WorkerReport(
            invoiced=sum(each.invoiced for each in everybody),
            failed=sum(each.failed for each in everybody),
            postponed=sum(each.postponed for each in everybody),
            in_hand=sum(each.in_hand for each in self.workers.values()),
        )
