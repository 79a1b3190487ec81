"""The common face of all benchmarks: a result with its baseline, ratio and target; a table; JSON."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table


class Result(msgspec.Struct, frozen=True):
    """One figure. `ratio` is what counts: value against a baseline taken in the same run.

    `target` is a bound for the ratio, or for the value where there is no baseline; `is_at_most` says
    which way it binds. Without a target the figure is a note.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: float | None = None
    is_at_most: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.value / self.baseline

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        judged = self.value if self.ratio is None else self.ratio
        return judged <= self.target if self.is_at_most else judged >= self.target


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
        bound = "≤" if result.is_at_most else "≥"
        table.add_row(
            result.name + (f"\n  {result.note}" if result.note else ""),
            _number(result.value),
            result.unit,
            _number(result.baseline),
            _number(result.ratio),
            "" if result.target is None else f"{bound} {_number(result.target)}",
            {None: "", True: "yes", False: "NO"}[result.met],
        )
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def as_json(name: str, facts: dict[str, str], results: Sequence[Result], *, quick: bool) -> bytes:
    rows = [
        msgspec.structs.asdict(result) | {"ratio": result.ratio, "met": result.met}
        for result in results
    ]
    document = {"benchmark": name, "quick": quick, "machine": facts, "results": rows}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def as_markdown(facts: dict[str, str], results: Sequence[Result]) -> str:
    """The table that docs/performance.md shows."""
    lines = [
        "; ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| result | value | baseline | ratio | target | |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        name = result.name + (f" ({result.note})" if result.note else "")
        target = "" if result.target is None else _number(result.target)
        bound = "" if not target else "≤ " if result.is_at_most else "≥ "
        met = {None: "", True: "met", False: "**not met**"}[result.met]
        figures = f"{_number(result.value)} {result.unit} | {_number(result.baseline)} | {_number(result.ratio)}"
        lines.append(f"| {name} | {figures} | {bound}{target} | {met} |")
    return "\n".join(lines)


def put_into_page(page: Path, name: str, table: str) -> None:
    """Replace what stands between the marks of this benchmark."""
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + begin + table + end + after)
