"""What the world looks like just now: everybody writes here, the view reads."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from examples.demo.evidence import PipelineReport, ShopReport, WorkerReport
from examples.demo.world import Source


@dataclass(slots=True)
class Happening:
    """Something worth telling, and when it was."""

    at_s: float
    text: str
    is_trouble: bool = False


@dataclass(slots=True)
class Board:
    """Numbers only grow; they say how it went so far."""

    begun: float = field(default_factory=time.perf_counter)
    phase: str = "starting"
    doors: tuple[str, ...] = ()
    is_broker_up: bool = False
    sent: int = 0
    stored: int = 0
    seen: int = 0
    p50_ms: float = 0.0
    celsius: dict[str, float] = field(default_factory=dict)  # by region, the last known
    shops: dict[Source, ShopReport] = field(default_factory=dict)
    workers: dict[str, WorkerReport] = field(default_factory=dict)
    gone: WorkerReport = field(default_factory=WorkerReport)  # of workers that are no more
    pipeline: PipelineReport = field(default_factory=PipelineReport)
    happenings: list[Happening] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def say(self, text: str, *, is_trouble: bool = False) -> None:
        self.happenings.append(Happening(self.seconds, text, is_trouble))

    def work(self) -> WorkerReport:
        """Of all workers together."""
        everybody = [self.gone, *self.workers.values()]
        return WorkerReport(
            invoiced=sum(each.invoiced for each in everybody),
            failed=sum(each.failed for each in everybody),
            postponed=sum(each.postponed for each in everybody),
            in_hand=sum(each.in_hand for each in self.workers.values()),
        )
