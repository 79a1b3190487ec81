"""Runs all soaks, two at a time, in the given time. Prints a table, and saves the output of failed soaks."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

FINDINGS: Final = Path("soak-findings")
# For start and end, besides a soak's own time. A soak that takes longer hangs.
_MORE_SECONDS_MAX: Final = 180.0
# In less time, a soak would not even begin.
_SECONDS_MIN: Final = 1.0
_TABLE: Final = "{:<14} {:>8} {:>11}  {:<8} {}"


class Soak(NamedTuple):
    """One soak: its command, its share of the time, and the package it needs."""

    name: str
    words: tuple[str, ...]
    part: float
    needs: str = ""


# The tracks run at the same time, the soaks of a track one after the other. Those of the first track keep a server, or
# Spark, and its clients busy; those of the second are one process each.
TRACKS: Final[tuple[tuple[Soak, ...], ...]] = (
    (
        Soak("listeners", ("listeners",), 5),
        Soak("listeners-tls", ("listeners", "--tls"), 3),
        Soak("spark", ("spark",), 2, needs="pyspark"),
    ),
    (
        Soak("log", ("log", "--jobs", "1"), 2),
        Soak("broker", ("broker", "--jobs", "1"), 2),
        Soak("cluster", ("cluster", "--jobs", "1"), 2),
        Soak("subscriptions", ("subscriptions", "--jobs", "1"), 2),
        Soak("damage", ("damage",), 2),
        Soak("formats", ("formats",), 2),
    ),
)
NAMES: Final = tuple(soak.name for track in TRACKS for soak in track)


class FinishedSoak(NamedTuple):
    """The end of a soak. Code 0: no bug found; 1: a bug found; other codes: it broke off."""

    soak: Soak
    command: str
    seed: int
    seconds: float
    code: int
    output: str

    @property
    def outcome(self) -> str:
        return "ok" if self.code == 0 else "FOUND" if self.code == 1 else f"code {self.code}"

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def planned(seconds: float, chosen: Sequence[str]) -> list[list[tuple[Soak, float]]]:
    """The soaks of each track and their seconds, without those whose package is missing."""
    plan = []
    for track in TRACKS:
        soaks = [
            soak
            for soak in track
            if soak.name in chosen
            and (not soak.needs or importlib.util.find_spec(soak.needs) is not None)
        ]
        parts = sum(soak.part for soak in soaks)
        plan.append(
            [(soak, max(_SECONDS_MIN, seconds * soak.part / parts)) for soak in soaks if parts]
        )
    return plan


def soak_everything(
    seconds: float, seed: int, chosen: Sequence[str] = NAMES, findings: Path = FINDINGS
) -> int:
    """The command: prints what it does, and returns its exit code."""
    print(f"all soaks from seed {seed} on, for {seconds:g} s, in {len(TRACKS)} tracks", flush=True)
    ended = asyncio.run(_run(planned(seconds, chosen), seed, findings))
    _print_table(ended)
    found = [each for each in ended if each.code != 0]
    for each in found:
        path = _path(each, findings)
        print(f"{each.soak.name}: again with {each.command}\n  its output: {path}")
    missing = [name for name in chosen if name not in {each.soak.name for each in ended}]
    if missing:
        print(f"not run, because a package is missing: {', '.join(missing)}")
    return 1 if found else 0


async def _run(
    plan: Sequence[Sequence[tuple[Soak, float]]], seed: int, findings: Path
) -> list[FinishedSoak]:
    async def run_track(track: Sequence[tuple[Soak, float]]) -> list[FinishedSoak]:
        all_ended = []
        for soak, seconds in track:
            ended = await _run_one(soak, seconds, seed)
            print(f"  {soak.name}: {ended.outcome} after {ended.seconds:.0f} s", flush=True)
            if ended.code != 0:  # saved at once, while the others run
                _save(ended, findings)
            all_ended.append(ended)
        return all_ended

    tracks = [asyncio.create_task(run_track(track)) for track in plan]
    try:
        return [each for track in await asyncio.gather(*tracks) for each in track]
    finally:  # interrupted: each task ends its own soak
        for track_task in tracks:
            track_task.cancel()
        await asyncio.wait(tracks)


async def _run_one(soak: Soak, seconds: float, seed: int) -> FinishedSoak:
    """Run it in its own process group, so that all its processes end with it."""
    own_seed = Random(f"{seed} {soak.name}").randrange(1 << 31)
    words = [*soak.words, "--seconds", f"{seconds:.0f}", "--seed", str(own_seed)]
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.soak", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds + _MORE_SECONDS_MAX):
            output, _ = await process.communicate()
        code = process.returncode or 0
    except TimeoutError:
        output, code = b"it did not end in time\n", -signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    command = shlex.join(["bin/soak", *words])
    spent = time.monotonic() - begin
    return FinishedSoak(soak, command, own_seed, spent, code, output.decode(errors="replace"))


def _print_table(ended: Sequence[FinishedSoak]) -> None:
    print("\n" + _TABLE.format("soak", "seconds", "seed", "outcome", "what it did").rstrip())
    for each in ended:
        row = (each.soak.name, f"{each.seconds:.0f}", each.seed, each.outcome, each.last_line)
        print(_TABLE.format(*row).rstrip())
    print()


def _save(ended: FinishedSoak, findings: Path) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    text = f"{ended.command}\n\n{ended.output}"
    _path(ended, findings).write_text(text, encoding="utf-8")


def _path(ended: FinishedSoak, findings: Path) -> Path:
    return findings / f"{ended.soak.name}-{ended.seed}.txt"
