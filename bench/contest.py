"""Rounds of the same measurement for several systems, taken in turns; medians, spreads, and what went wrong."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from bench.processes import RoleError
from bench.report import Measured, Result, short


class Sample(msgspec.Struct, frozen=True):
    """One run: its figures, and how it broke its promise if it did (loss, disorder)."""

    values: tuple[float, ...]
    trouble: str = ""


class Contender(msgspec.Struct, frozen=True):
    name: str
    measure: Callable[[], Sample]
    absence: str | None = None  # why it cannot take part
    is_warmed: bool = False  # one run before those that count, for what compiles as it goes


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

    def measured(self, place: int = 0) -> Measured:
        trouble = ""
        if troubles := [sample.trouble for sample in self.samples if sample.trouble]:
            trouble = f"{len(troubles)} of {len(self.samples)} runs NOT COUNTED: {troubles[0]}"
        return Measured(self.name, tuple(self.figures(place)), self.absence or "", trouble)


def contest(contenders: Sequence[Contender], rounds: int) -> dict[str, Standing]:
    """In turns, so that a noisy minute hits all of them."""
    taken: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    present = [contender for contender in contenders if contender.absence is None]
    for contender in present:
        if contender.is_warmed:
            _run(contender, "before it counts")
    for _ in range(rounds):
        for contender in present:
            taken[contender.name].append(_run(contender))
    return {
        contender.name: Standing(contender.name, taken[contender.name], contender.absence)
        for contender in contenders
    }


def _run(contender: Contender, remark: str = "") -> Sample:
    try:
        sample = contender.measure()
    except RoleError as error:
        print(f"  {contender.name}: {error}", file=sys.stderr, flush=True)
        sample = Sample((math.nan,) * 16, f"failed: {str(error).strip().splitlines()[-1]}")
    shown = ", ".join(short(value) for value in sample.values if not math.isnan(value))
    told = " ".join(filter(None, (shown, sample.trouble, remark)))
    print(f"  {contender.name}: {told}", file=sys.stderr, flush=True)
    return sample


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
    others: Iterable[Standing] = (),
) -> Result:
    """Ours against the peer's. Without a figure of the peer's there is nothing to judge."""
    value, baseline = ours.median(place), peer.median(place)
    if value is None:  # nothing of ours can be counted: as far from the target as can be
        value = math.inf if is_at_most else 0.0
    return Result(
        f"{name}, against {peer.name}",
        value,
        unit,
        baseline,
        None if baseline is None else target,
        is_at_most,
        note,
        name,
        ours.measured(place),
        peer.measured(place),
        tuple(other.measured(place) for other in others),
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
    others: Iterable[Standing] = (),
) -> Result:
    value = ours.median(place)
    if value is None:
        value = math.inf if is_at_most else 0.0
    return Result(
        name,
        value,
        unit,
        target=target,
        is_at_most=is_at_most,
        note=note,
        what=name,
        ours=ours.measured(place),
        others=tuple(other.measured(place) for other in others),
    )


def lowest(standings: Mapping[str, Standing], names: Sequence[str], place: int = 0) -> Standing:
    """Of the peers named, the one with the lowest figure; the first if none has any."""
    return _extreme(standings, names, place, min)


def highest(standings: Mapping[str, Standing], names: Sequence[str], place: int = 0) -> Standing:
    """Of the peers named, the one with the highest figure; the first if none has any."""
    return _extreme(standings, names, place, max)


def _extreme(
    standings: Mapping[str, Standing],
    names: Sequence[str],
    place: int,
    choose: Callable[[Iterable[tuple[float, str]]], tuple[float, str]],
) -> Standing:
    measured = [
        (median, name) for name in names if (median := standings[name].median(place)) is not None
    ]
    return standings[choose(measured)[1]] if measured else standings[names[0]]
