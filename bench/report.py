"""The common face of all benchmarks: a result with its baseline, ratio and target; a table; JSON."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import msgspec
from rich.console import Console
from rich.table import Table


class Measured(msgspec.Struct, frozen=True):
    """What one system came to: the figure of every run that counts, and what was wrong with the others."""

    system: str
    figures: tuple[float, ...] = ()  # from the lowest to the highest
    absence: str = ""  # why it took no part
    trouble: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.figures) if self.figures else None

    @property
    def spread(self) -> str:
        if not self.figures:
            return "absent" if self.absence else "no run that counts"
        return f"{short(self.figures[0])} to {short(self.figures[-1])}"

    def told(self) -> str:
        """In a few words: the spread, or why there is none, and every trouble."""
        if self.absence:
            return f"{self.system} absent: {self.absence}"
        return ", ".join(filter(None, (f"{self.system} {self.spread}", self.trouble)))


class Result(msgspec.Struct, frozen=True):
    """One figure. `ratio` is what counts: value against a baseline taken in the same run.

    `target` is a bound for the ratio, or for the value where there is no baseline; `is_at_most` says
    which way it binds. Without a target the figure is a note. What was compared is kept run by run.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: float | None = None
    is_at_most: bool = False
    note: str = ""
    what: str = ""  # the name without whom it is compared with
    ours: Measured | None = None
    peer: Measured | None = None
    others: tuple[Measured, ...] = ()  # measured beside them, neither the value nor the baseline

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.value / self.baseline

    @property
    def judged(self) -> float:
        return self.value if self.ratio is None else self.ratio

    @property
    def met(self) -> bool | None:
        return None if self.target is None else is_met(self, self.target)

    def told(self) -> str:
        """The note, and everything about the runs that a median hides."""
        seen = (self.ours, self.peer, *self.others)
        return "; ".join(filter(None, (self.note, *(each.told() for each in seen if each))))


def is_met(result: Result, bound: float) -> bool:
    return result.judged <= bound if result.is_at_most else result.judged >= bound


def short(value: float) -> str:
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def number(value: float | None) -> str:
    """As tables show it."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine_facts() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "cores": str(os.cpu_count()),
        "packages": ", ".join(
            f"{name} {version(name)}" for name in ("msgspec", "numpy", "uvloop", "pyarrow")
        ),
    }


def median_of(measure: Callable[[], float], rounds: int) -> float:
    return statistics.median([measure() for _ in range(rounds)])


def interleaved(measures: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of each measure, taken in turns so that a noisy minute hits all of them."""
    taken: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for place, measure in enumerate(measures):
            taken[place].append(measure())
    return [statistics.median(values) for values in taken]


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def print_table(title: str, facts: dict[str, str], results: Sequence[Result]) -> None:
    console = Console()
    console.width = max(console.width, 120)  # a table that wraps its names cannot be read
    table = Table(title=f"bench {title}", caption="; ".join(f"{k} {v}" for k, v in facts.items()))
    for heading in ("result", "value", "unit", "baseline", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading in ("result", "unit") else "right")
    for result in results:
        told = result.told()
        table.add_row(
            result.name + (f"\n  {told}" if told else ""),
            number(result.value),
            result.unit,
            number(result.baseline),
            number(result.ratio),
            bound_of(result),
            {None: "", True: "yes", False: "NO"}[result.met],
        )
    console.print(table)


def bound_of(result: Result) -> str:
    if result.target is None:
        return ""
    return f"{'≤' if result.is_at_most else '≥'} {number(result.target)}"


# --- JSON ---


def as_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """With what follows from the rest, for those who only read. A value beyond all numbers is null."""
    return [
        msgspec.structs.asdict(result) | {"ratio": result.ratio, "met": result.met}
        for result in results
    ]


def from_row(row: dict[str, object]) -> Result:
    if row.get("value") is None:
        row = row | {"value": math.inf if row.get("is_at_most") else 0.0}
    return msgspec.convert(row, Result)


def as_json(name: str, facts: dict[str, str], results: Sequence[Result], *, quick: bool) -> bytes:
    document = {
        "benchmark": name,
        "quick": quick,
        "machine": facts,
        "results": as_rows(results),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
