"""What was measured, drawn: one PNG a subject, the same colour for a system in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.measures import PERCENTILES
from bench.page import FAMILIES, Records, family_of, label_of, scenarios
from bench.record import results_of
from bench.report import Measured, Result, short
from bench.targets import factors

# Told apart by those who see colours differently, too.
_COLOURS = {
    "Runnel": "#0072B2",
    "NATS": "#009E73",
    "Redis": "#D55E00",
    "RabbitMQ": "#E69F00",
    "Kafka": "#5B5B5B",
}
_MET, _NOT_MET, _FAINT = "#009E73", "#D55E00", "#C8C8C8"
_WIDTH, _DPI = 9.0, 110
_ASIDE = 0.05
_LABEL_MAX = 16
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "runnel",
}
_THROUGHPUT = (
    ("live", "1 to 1, ephemeral*", "1 to 1"),
    ("live", "1 to 30*", "1 to 30, delivered"),
    ("live", "30 clients*", "30 clients on a to g, commands"),
    ("live", "single messages over*", "single messages over 1,000 topics"),
    ("live", "publishing to disk*", "publishing to disk, acknowledged"),
    ("queue", "*1 to 4, shared", "queue: publish, deliver, acknowledge"),
    ("reading", "*to Python objects", "catching up, to Python objects"),
    ("reading", "*to Arrow", "catching up, to Arrow"),
)
_GROWTH = (
    ("* topics, against*", "topics"),
    ("* pattern subscriptions, against*", "pattern subscriptions"),
    ("* idle connections, against*", "idle connections"),
    ("* MiB stored, against*", "MiB stored"),
)

Results = Mapping[str, Sequence[Result]]


def draw(records: Records, folder: Path) -> dict[str, str]:
    """All that there are results for. By name, what each shows."""
    results = {name: results_of(parts) for name, parts in records.items()}
    charts: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
        "throughput": ("Messages a second, side by side (logarithmic)", _throughput),
        "latency": ("Latency by percentile at fixed rates (logarithmic)", _latency),
        "growth": ("One busy topic while ever more stands beside it", _growth),
        "restart": ("Seconds from start to the first message read", _restart),
        "targets": ("Every target: how far beyond it, or short of it", _targets),
    }
    drawn = {}
    with mpl.rc_context(_STYLE):
        for name, (caption, make) in charts.items():
            figure = make(results)
            if figure is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            # Without the program's name and version: the same figures make the same file.
            figure.savefig(folder / f"{name}.png", dpi=_DPI, metadata={"Software": None})
            drawn[name] = caption
    return drawn


def _figure(title: str, height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5)
    return figure


def _colour(system: str) -> str:
    return _COLOURS[family_of(system) or FAMILIES[0]]


def _reach(measured: Measured) -> tuple[float, float]:
    """From the median down to the lowest run, and up to the highest."""
    median = measured.median or 0.0
    return median - measured.figures[0], measured.figures[-1] - median


# --- Throughput ---


def _throughput(results: Results) -> Figure | None:
    panels = []
    for benchmark, pattern, title in _THROUGHPUT:
        for what, _, seen in scenarios(results.get(benchmark, ())):
            rows = _rows(seen) if fnmatchcase(what, pattern) else []
            if len(rows) > 1:
                panels.append((title, rows))
    if not panels:
        return None
    pairs = [panels[begin : begin + 2] for begin in range(0, len(panels), 2)]
    slots = [max(len(rows) for _, rows in pair) for pair in pairs]
    figure = _figure(
        "Messages a second (logarithmic): medians, with the lowest and the highest run",
        0.4 + sum(0.65 + 0.29 * most for most in slots),
    )
    axes = figure.subplots(len(pairs), 2, squeeze=False, height_ratios=[2 + most for most in slots])
    for line, pair, most in zip(axes, pairs, slots, strict=True):
        for axis in line[len(pair) :]:
            axis.set_axis_off()
        for axis, (title, rows) in zip(line, pair, strict=False):
            _bars(axis, title, rows)
            axis.set_ylim(most - 0.5, -0.5)  # bars are as thick as their neighbours'
    return figure


def _rows(seen: Mapping[str, Sequence[Measured]]) -> list[tuple[str, Measured]]:
    """Labelled, those that were measured, family by family."""
    rows = []
    for family in FAMILIES:
        for measured in seen.get(family, ()):
            label = label_of(measured.system) if family != FAMILIES[0] else ""
            if measured.figures:
                rows.append((label or family, measured))
    return rows


def _bars(axis: Any, title: str, rows: Sequence[tuple[str, Measured]]) -> None:
    values = [measured.median or 0.0 for _, measured in rows]
    colours = [_colour(measured.system) for _, measured in rows]
    places = range(len(rows))
    reach = list(zip(*(_reach(measured) for _, measured in rows), strict=True))
    axis.barh(places, values, color=colours, height=0.72)
    axis.errorbar(values, places, xerr=reach, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axis.set_xscale("log")
    axis.set_xlim(min(values) / 4, max(measured.figures[-1] for _, measured in rows) * 6)
    axis.set_yticks(places, [_broken(label) for label, _ in rows], fontsize=8.5)
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.xaxis.set_minor_formatter(lambda *_: "")
    axis.set_title(title)
    for place, (_, measured) in zip(places, rows, strict=True):
        axis.text(measured.figures[-1] * 1.15, place, short(values[place]), va="center", fontsize=9)


def _broken(label: str) -> str:
    """In two lines if it is long: the bars need the room."""
    return label.replace(", ", ",\n") if len(label) > _LABEL_MAX else label


# --- Latency ---


def _latency(results: Results) -> Figure | None:
    by_rate: dict[str, dict[str, dict[str, Measured]]] = {}
    for result in results.get("latency", ()):
        words = result.what.split()
        rate, percentile = words[2], words[-1]
        for measured in (result.ours, result.peer, *result.others):
            if measured is not None:
                systems = by_rate.setdefault(rate, {})
                systems.setdefault(measured.system, {})[percentile] = measured
    if not by_rate:
        return None
    figure = _figure("Latency, each message sent by itself: medians of the runs' percentiles", 4.2)
    axes = figure.subplots(1, len(by_rate), squeeze=False, sharey=True)[0]
    for axis, (rate, systems) in zip(axes, by_rate.items(), strict=True):
        _lines(axis, rate, systems)
    axes[0].set_ylabel("µs")
    handles = [
        mpl.lines.Line2D([], [], color=_COLOURS[family], marker="o", label=family)
        for family in FAMILIES
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(FAMILIES), frameon=False)
    return figure


def _lines(axis: Any, rate: str, systems: Mapping[str, Mapping[str, Measured]]) -> None:
    behind = []
    for number, family in enumerate(FAMILIES):
        by_percentile = systems.get(family, {})
        points = [by_percentile.get(percentile) for percentile in PERCENTILES]
        measured = [point for point in points if point is not None and point.figures]
        if len(measured) < len(PERCENTILES):
            if any(point is not None and not point.absence for point in points):
                behind.append(family)
            continue
        values = [point.median or math.nan for point in measured]
        reach = list(zip(*(_reach(point) for point in measured), strict=True))
        axis.errorbar(
            [
                place + _ASIDE * (number - 2) for place in range(len(values))
            ],  # so that bars can be told apart
            values,
            yerr=reach,
            color=_COLOURS[family],
            marker="o",
            markersize=4.5,
            linewidth=2.4 if family == FAMILIES[0] else 1.5,
            elinewidth=0.8,
            capsize=2,
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.grid(axis="y", color=_FAINT, linewidth=0.5)
    axis.set_xticks(range(len(PERCENTILES)), list(PERCENTILES))
    axis.set_title(f"{rate} messages/s")
    if behind:
        axis.set_xlabel(f"falls behind: {', '.join(behind)}", fontsize=8.5)


# --- Growth ---


def _growth(results: Results) -> Figure | None:
    panels: list[tuple[str, list[Measured]]] = []
    for pattern, title in _GROWTH:
        grown = [
            result for result in results.get("growth", ()) if fnmatchcase(result.name, pattern)
        ]
        first = grown[0].peer if grown else None
        beside = (first, *(result.ours for result in grown))
        measured = [each for each in beside if each is not None and each.figures]
        if len(measured) > 1:
            panels.append((title, measured))
    if not panels:
        return None
    figure = _figure("Messages a second of one busy topic, with ever more beside it", 3.2)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, points) in zip(axes, panels, strict=True):
        values = [point.median or 0.0 for point in points]
        reach = list(zip(*(_reach(point) for point in points), strict=True))
        places = range(len(points))
        axis.errorbar(
            places,
            values,
            yerr=reach,
            color=_COLOURS[FAMILIES[0]],
            marker="o",
            linewidth=2,
            capsize=3,
        )
        labels = ["none", *(point.system.split()[0] for point in points[1:])]
        axis.set_xticks(places, labels)
        axis.set_xlim(-0.4, len(points) - 0.6)
        axis.yaxis.set_major_formatter(lambda value, _: short(value))
        axis.grid(axis="y", color=_FAINT, linewidth=0.5)
        axis.set_title(title)
    highest = max(point.figures[-1] for _, points in panels for point in points)
    axes[0].set_ylim(0, highest * 1.1)
    return figure


# --- Restart ---


def _restart(results: Results) -> Figure | None:
    found = [result for result in results.get("restart", ()) if result.others]
    if not found:
        return None
    figure = _figure("Seconds from the start of the server to the first message read", 2.9)
    axes = figure.subplots(1, len(found), squeeze=False, sharex=True)[0]
    for axis, result in zip(axes, found, strict=True):
        rows = [
            (measured.system, measured)
            for measured in (result.ours, *result.others)
            if measured is not None and measured.figures
        ]
        values = [measured.median or 0.0 for _, measured in rows]
        reach = list(zip(*(_reach(measured) for _, measured in rows), strict=True))
        places = range(len(rows))
        axis.barh(places, values, color=[_colour(name) for name, _ in rows], height=0.7)
        axis.errorbar(
            values, places, xerr=reach, fmt="none", ecolor="black", elinewidth=1, capsize=2
        )
        axis.set_yticks(places, [name for name, _ in rows])
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(result.what.rpartition(", ")[2])
        for place, (_, measured) in zip(places, rows, strict=True):
            axis.text(measured.figures[-1], place, f"  {short(values[place])}", va="center")
    return figure


# --- Targets ---


def _targets(results: Results) -> Figure | None:
    found = factors(results)
    if not found:
        return None
    figure = _figure("Every target: 1 is what was wanted, more is better", 0.8 + 0.21 * len(found))
    axis = figure.subplots()
    places = range(len(found))
    colours = [_MET if factor >= 1 else _NOT_MET for _, factor in found]
    axis.barh(places, [factor - 1 for _, factor in found], left=1, color=colours, height=0.66)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda *_: "")
    axis.set_yticks(places, [what for what, _ in found], fontsize=8)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.grid(axis="x", color=_FAINT, linewidth=0.5)
    axis.set_axisbelow(True)
    for place, (_, factor) in zip(places, found, strict=True):
        axis.annotate(
            f"{factor:.2g}" if factor < 10 else f"{factor:.0f}",
            (factor, place),
            xytext=(3 if factor >= 1 else -3, 0),
            textcoords="offset points",
            ha="left" if factor >= 1 else "right",
            va="center",
            fontsize=7.5,
        )
    axis.margins(x=0.12)
    return figure
