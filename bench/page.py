"""What was measured, in Markdown: everything side by side, every target, every result; and its place in a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.record import PartRecord, results_of
from bench.report import Measured, Result, bound_of, number, short
from bench.targets import Verdict, verdicts

FAMILIES = ("Runnel", "NATS", "Redis", "RabbitMQ", "Kafka")
# Benchmarks whose results have peers in them, in the order of the table.
_SIDE_BY_SIDE = ("live", "reading", "queue", "latency", "restart")
_MET = {None: "not measured", True: "met", False: "**not met**"}

Records = Mapping[str, Mapping[str, PartRecord]]  # by benchmark and by part


# --- Side by side ---


def family_of(system: str) -> str | None:
    """Whose product it is: JetStream is NATS's. None for what is no broker."""
    if system.startswith("JetStream"):
        return "NATS"
    return next((family for family in FAMILIES if system.startswith(family)), None)


def label_of(system: str) -> str:
    """What tells it from others of its family, such as `JetStream, sync always`; nothing if that is its name."""
    return "" if system in FAMILIES else system.replace(" with ", ", ")


def side_by_side(records: Records) -> str:
    lines = [
        f"| | {' | '.join(FAMILIES)} |",
        f"|---|{'---|' * len(FAMILIES)}",
    ]
    for benchmark in _SIDE_BY_SIDE:
        for what, unit, seen in scenarios(results_of(records.get(benchmark, {}))):
            cells = [_cell(seen, family) for family in FAMILIES]
            if sum(bool(cell) for cell in cells) > 1:
                lines.append(f"| {what}, {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scenarios(results: Sequence[Result]) -> list[tuple[str, str, dict[str, list[Measured]]]]:
    """What was measured, its unit, and by family who was: results of the same name are one scenario."""
    found: dict[str, tuple[str, dict[str, list[Measured]]]] = {}
    for result in results:
        if result.ours is None:
            continue
        _, seen = found.setdefault(result.what, (result.unit, {FAMILIES[0]: [result.ours]}))
        for other in (result.peer, *result.others):
            family = family_of(other.system) if other is not None else None
            if other is None or family is None or family == FAMILIES[0]:
                continue
            known = seen.setdefault(family, [])
            if all(other.system != each.system for each in known):
                known.append(other)
    return [(what, unit, seen) for what, (unit, seen) in found.items()]


def _cell(seen: Mapping[str, Sequence[Measured]], family: str) -> str:
    told = []
    for measured in seen.get(family, ()):
        label = label_of(measured.system) if family != FAMILIES[0] else ""
        label = f"{label}: " if label else ""
        if measured.median is None:
            told.append(f"{label}{measured.spread}")
        else:
            told.append(f"{label}{_bold(short(measured.median))} ({measured.spread})")
    return "<br>".join(told)


def _bold(text: str) -> str:
    return f"**{text}**"


# --- Targets ---


def targets(records: Records) -> str:
    given = {name: results_of(parts) for name, parts in records.items()}
    lines = ["| | what | wanted | measured | |", "|---|---|---|---|---|"]
    judged = verdicts(given)
    lines += [_target_row(verdict) for verdict in judged]
    met = sum(verdict.is_met is True for verdict in judged)
    unmet = sum(verdict.is_met is False for verdict in judged)
    counted = f"{met} met, {unmet} not met, {len(judged) - met - unmet} not measured."
    return "\n".join([counted, "", *lines])


def _target_row(verdict: Verdict) -> str:
    wanted = verdict.wanted
    what = f"{wanted.what} (aim)" if wanted.is_aim else wanted.what
    met = _MET[verdict.is_met]
    return f"| {wanted.area} | {what} | {verdict.target} | {verdict.measured} | {met} |"


# --- One benchmark ---


def table(parts: Mapping[str, PartRecord]) -> str:
    """All its results, with the facts of the machine that they were measured on."""
    lines = [_facts(parts), ""]
    lines += [
        f"- **{record.title} failed** in its last run: {record.failure}"
        for record in parts.values()
        if not record.is_good
    ]
    lines += ["| result | value | baseline | ratio | target | |", "|---|---|---|---|---|---|"]
    lines += [_row(result) for result in results_of(parts)]
    return "\n".join(lines)


def _facts(parts: Mapping[str, PartRecord]) -> str:
    newest = max(parts.values(), key=lambda record: record.measured_at)
    days = sorted({record.measured_at[:10] for record in parts.values()})
    told = [f"{name} {value}" for name, value in newest.machine.items()]
    told.append(f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    if any(record.is_quick for record in parts.values()):
        told.append("**a quick run: fewer rounds and less data, only to see that it works**")
    return "; ".join(told) + "."


def _row(result: Result) -> str:
    asides = [result.note, *(other.told() for other in result.others)]
    asides += [
        measured.told()
        for measured in (result.ours, result.peer)
        if measured is not None and (measured.trouble or measured.absence)
    ]
    told = "; ".join(filter(None, asides))
    name = result.name + (f" ({told})" if told else "")
    met = {None: "", True: "met", False: "**not met**"}[result.met]
    value = f"{number(result.value)} {result.unit}{_spread(result.ours)}"
    baseline = f"{number(result.baseline)}{_spread(result.peer)}"
    ratio = number(result.ratio)
    return f"| {name} | {value} | {baseline} | {ratio} | {bound_of(result)} | {met} |"


def _spread(measured: Measured | None) -> str:
    return f"<br>{measured.spread}" if measured is not None and measured.figures else ""


# --- Pages ---


class NoPlace(Exception):
    """A page lacks the marks between which something belongs."""


def put_into(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    before, has_begin, rest = page.read_text().partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise NoPlace(f"{page} has no line {begin.strip()} followed by {end.strip()}")
    page.write_text(before + begin + text + end + after)


def charts(folder: Path, page: Path, captions: Mapping[str, str]) -> str:
    """Those that are there, as the page links them."""
    way = _way(folder, page)
    return "\n\n".join(
        f"![{caption}]({way}/{name}.png)"
        for name, caption in captions.items()
        if (folder / f"{name}.png").exists()
    )


def _way(folder: Path, page: Path) -> str:
    base, steps = page.resolve().parent, 0
    target = folder.resolve()
    while not target.is_relative_to(base):
        base, steps = base.parent, steps + 1
    return "/".join([*[".."] * steps, *target.relative_to(base).parts]) or "."


def whole(records: Records, links: str) -> str:
    """All of it, as a page of its own."""
    pieces = ["# Results", links, "## Side by side", side_by_side(records)]
    pieces += ["## Every target", targets(records)]
    for name, parts in records.items():
        if parts:
            pieces += [f"## {name}", table(parts)]
    return "\n\n".join(filter(None, pieces)) + "\n"
