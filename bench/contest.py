"""Rounds of the same measurement for several systems, taken in turns; medians, spreads, and what went wrong."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.processes import RoleError
from bench.report import Result


class Sample(msgspec.Struct, frozen=True):
    """One run: its figures, and how it broke its promise if it did (loss, disorder)."""

    values: tuple[float, ...]
    trouble: str = ""


class Contender(msgspec.Struct, frozen=True):
    name: str
    measure: Callable[[], Sample]
    absence: str | None = None  # why it cannot take part


class Standing(msgspec.Struct, frozen=True):
    """What a contender came to. A run with trouble is told and not counted."""

    name: str
    samples: Sequence[Sample] = ()
    absence: str | None = None

    def figures(self, place: int = 0) -> list[float]:
        return sorted(sample.values[place] for sample in self.samples if not sample.trouble)

    def median(self, place: int = 0) -> float | None:
        figures = self.figures(place)
        return statistics.median(figures) if figures else None

    def told(self, place: int = 0) -> str:
        """In a few words: the spread, or why there is none, and every trouble."""
        if self.absence:
            return f"{self.name} absent: {self.absence}"
        figures = self.figures(place)
        spread = f"{short(figures[0])} to {short(figures[-1])}" if figures else "no good run"
        troubles = [sample.trouble for sample in self.samples if sample.trouble]
        told = f"{self.name} {spread}"
        if troubles:
            told += f", {len(troubles)} of {len(self.samples)} runs NOT COUNTED: {troubles[0]}"
        return told


def short(value: float) -> str:
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def contest(contenders: Sequence[Contender], rounds: int) -> dict[str, Standing]:
    """In turns, so that a noisy minute hits all of them."""
    taken: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            if contender.absence is not None:
                continue
            try:
                sample = contender.measure()
            except RoleError as error:
                print(f"  {contender.name}: {error}", file=sys.stderr, flush=True)
                sample = Sample((math.nan,) * 4, f"failed: {str(error).strip().splitlines()[-1]}")
            shown = ", ".join(short(value) for value in sample.values)
            print(f"  {contender.name}: {shown} {sample.trouble}", file=sys.stderr, flush=True)
            taken[contender.name].append(sample)
    return {
        contender.name: Standing(contender.name, taken[contender.name], contender.absence)
        for contender in contenders
    }


def compared(
    name: str,
    unit: str,
    ours: Standing,
    peer: Standing,
    *,
    place: int = 0,
    target: float | None = None,
    is_at_most: bool = False,
    note: str = "",
) -> Result:
    """Ours against the peer's. Without a figure of the peer's there is nothing to judge."""
    value, baseline = ours.median(place), peer.median(place)
    told = "; ".join(filter(None, (note, ours.told(place), peer.told(place))))
    if value is None:  # nothing of ours can be counted: as far from the target as can be
        value = math.inf if is_at_most else 0.0
    return Result(
        f"{name}, against {peer.name}",
        value,
        unit,
        baseline,
        None if baseline is None else target,
        is_at_most,
        told,
    )


def alone(
    name: str,
    unit: str,
    ours: Standing,
    *,
    place: int = 0,
    target: float | None = None,
    is_at_most: bool = False,
    note: str = "",
) -> Result:
    value = ours.median(place)
    if value is None:
        value = math.inf if is_at_most else 0.0
    told = "; ".join(filter(None, (note, ours.told(place))))
    return Result(name, value, unit, None, target, is_at_most, told)


def better(standings: Mapping[str, Standing], names: Sequence[str], place: int = 0) -> Standing:
    """Of the peers named, the one with the lowest figure; the first if none has any."""
    measured = [standings[name] for name in names if standings[name].median(place) is not None]
    return min(
        measured, key=lambda peer: peer.median(place) or math.inf, default=standings[names[0]]
    )
