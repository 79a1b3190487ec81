"""Runs parts and keeps what they find: in this process, or job by job in others, which may die without harm."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from bench import record
from bench.record import PartRecord
from bench.report import Result, machine_facts
from bench.suite import Job, module_of, parts_of, titles_of

GRACE_SECONDS = 30.0
_LIMIT_SECONDS_MIN = 600.0
_LIMIT_FACTOR = 5.0
_SOME_FAILED = 1
_PR_SET_PDEATHSIG = 1


class Findings(msgspec.Struct, frozen=True):
    results: Sequence[Result]
    facts: dict[str, str]
    failures: Sequence[str]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- In this process ---


def run_parts(
    name: str, titles: Sequence[str], *, quick: bool, folder: Path | None = None
) -> Findings:
    """One after the other. A part that fails is told, and the next one has its turn."""
    module = module_of(name)
    facts = machine_facts() | getattr(module, "more_facts", dict)()
    results: list[Result] = []
    failures: list[str] = []
    with getattr(module, "setting", nullcontext)():  # what its parts share
        for title, part in parts_of(name):
            if title not in titles:
                continue
            say(f"… {title}")
            begun_s, failure, found = time.monotonic(), "", list[Result]()
            try:
                found = part(quick=quick)
            except Exception as error:  # noqa: BLE001 - whatever it was, the other parts go on
                traceback.print_exc()
                *_, last = ("", *str(error).strip().splitlines())
                failure = f"{type(error).__name__}: {last}"
                failures.append(f"{name}, {title}: {failure}")
            results += found
            if folder is not None:
                seconds = round(time.monotonic() - begun_s, 1)
                made = PartRecord(title, record.now(), seconds, quick, facts, tuple(found), failure)
                record.keep(folder, name, made, titles_of(name))
    return Findings(results, facts, failures)


# --- In other processes ---


def run_jobs(jobs: Sequence[Job], folder: Path, *, quick: bool) -> list[str]:
    """One after the other, each recorded as it is done. What failed, in words."""
    failures = []
    left_s = sum(job.seconds(quick=quick) for job in jobs)
    for number, job in enumerate(jobs, 1):
        expected_s = job.seconds(quick=quick)
        say(
            f"\n[{number}/{len(jobs)}] {job.label} "
            f"(about {_spoken(expected_s)}; with what follows {_spoken(left_s)})"
        )
        left_s -= expected_s
        begun_at, begun_s = record.now(), time.monotonic()
        code = _run_child(job, folder, quick=quick)
        say(f"[{number}/{len(jobs)}] {time.monotonic() - begun_s:.0f} s")
        failures += _failures(job, folder, code, begun_at, quick=quick)
    return failures


def _failures(job: Job, folder: Path, code: int, begun_at: str, *, quick: bool) -> list[str]:
    """What it recorded as failed; and if it died, what it never came to record."""
    parts = record.read(folder, job.name)
    told = []
    for title in job.titles:
        found = parts.get(title)
        if found is not None and found.is_good and found.measured_at >= begun_at:
            continue
        failure = found.failure if found is not None and code == _SOME_FAILED else ""
        if not failure:
            failure = f"its process ended with {code}"
            lost = PartRecord(title, record.now(), 0.0, quick, machine_facts(), failure=failure)
            record.keep(folder, job.name, lost, titles_of(job.name))
        told.append(f"{job.name}, {title}: {failure}")
    return told


def _run_child(job: Job, folder: Path, *, quick: bool) -> int:
    """In a session of its own, so that an interrupt comes to it once, from here; then all that it started ends too."""
    command = [sys.executable, "-m", "bench", job.name, "--record", str(folder)]
    for title in job.titles:
        command += ["--part", title]
    if quick:
        command.append("--quick")
    limit_s = max(_LIMIT_SECONDS_MIN, _LIMIT_FACTOR * job.seconds(quick=quick))
    child = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=_end_with_us
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        say(f"  it has taken {limit_s:.0f} s, five times what it should: ended")
        return -signal.SIGALRM
    finally:
        _end(child)


def _end_with_us() -> None:
    """In the child: if this process is killed, the kernel ends the child, which ends its servers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            say("  it does not end: killed")
    with suppress(ProcessLookupError):  # no process was left
        # Its session is its group: whatever it started and did not end.
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
