"""Histories of the log in several processes, from one seed on, until time is up or one fails."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass
from itertools import count

from tests.log.simulation.history import HistoryFailed, Outcome, run_history

# Enough that handing them over costs nothing, few enough that progress moves.
CHUNK = 10


@dataclass(slots=True)
class Tally:
    histories: int = 0
    disk_operations: int = 0
    recoveries: int = 0
    messages: int = 0

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.disk_operations += other.disk_operations
        self.recoveries += other.recoveries
        self.messages += other.messages


def replay_history(seed: int) -> int:
    """One history with everything that it did."""
    try:
        outcome = run_history(seed)
    except HistoryFailed as failure:
        print(failure)
        return 1
    for line in outcome.transcript:
        print(f"  {line}")
    print(f"history {seed}: {_told(_tally(outcome))}; nothing broken")
    return 0


def soak_histories(seconds: float, seed: int, jobs: int) -> int:
    """Until time is up, or a history fails: then its seed and transcript, and 1."""
    print(f"histories from seed {seed} on, {jobs} at a time, for {seconds:g} s")
    started = time.monotonic()
    total = Tally()
    # Spawned: a fork would take over whatever this process has open.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for tally in _run(pool, jobs, seed, started + seconds):
                total.add(tally)
                _show(total, time.monotonic() - started)
        except HistoryFailed as failure:
            pool.shutdown(cancel_futures=True)
            print(f"\n{failure}")
            return 1
        except BaseException as ending:
            # Interrupted, or told to end: nobody waits for what is under way.
            for process in multiprocessing.active_children():
                process.kill()
            if isinstance(ending, KeyboardInterrupt):
                _summarize(total, time.monotonic() - started)
            raise
    _summarize(total, time.monotonic() - started)
    return 0


def _summarize(total: Tally, elapsed: float) -> None:
    rate = total.histories / elapsed
    print(
        f"\n{_told(total)} in {elapsed:.1f} s ({rate:.0f} histories/s); nothing broken", flush=True
    )


def _run(pool: ProcessPoolExecutor, jobs: int, seed: int, ends_at: float) -> Iterator[Tally]:
    """The tallies of chunks, one for each process and one more in waiting, until time is up."""
    running: set[Future[Tally]] = set()
    for first in count(seed, CHUNK):
        if time.monotonic() >= ends_at:
            break
        running.add(_submit(pool, first))
        if len(running) > jobs:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in as_completed(running))


def _submit(pool: ProcessPoolExecutor, first: int) -> Future[Tally]:
    """May start a process, which ignores Ctrl-C from its first moment: it inherits that."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return pool.submit(_run_chunk, first)
    finally:
        signal.signal(signal.SIGINT, former)


def _run_chunk(first: int) -> Tally:
    total = Tally()
    for seed in range(first, first + CHUNK):
        total.add(_tally(run_history(seed)))
    return total


def _tally(outcome: Outcome) -> Tally:
    return Tally(1, outcome.disk_operations, outcome.recoveries, outcome.messages)


def _told(tally: Tally) -> str:
    return (
        f"{tally.histories:,} histories, {tally.disk_operations:,} disk operations, "
        f"{tally.recoveries:,} recoveries, {tally.messages:,} messages"
    )


def _show(tally: Tally, elapsed: float) -> None:
    if sys.stdout.isatty():
        print(f"\r{elapsed:6.0f} s  {_told(tally)} ", end="", flush=True)
