"""Random histories of log, broker or subscriptions, in several processes, until time is up or a history fails."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from itertools import count
from typing import Final

from tests.broker.consumer_groups.simulation import history as consumer_groups
from tests.broker.simulation import history as broker
from tests.cluster.simulation import history as cluster
from tests.group_rules.simulation import history as group_rules
from tests.log.owners import history as owners
from tests.log.simulation import history as log
from tests.simulation.history import HistoryFailed, Outcome

# Histories that a process runs at once: enough that starting them costs little, few enough that progress shows.
CHUNK = 10

# How much was done, by name: histories, messages and so on.
Tally = Counter[str]

# Each seed has a history of every simulator of a soak.
HISTORIES: Final[Mapping[str, Sequence[Callable[[int], Outcome]]]] = {
    "log": (log.run_history, owners.run_history),
    "broker": (broker.run_history,),
    "cluster": (cluster.run_history,),
    "subscriptions": (group_rules.run_history, consumer_groups.run_history),
}


def replay_history(kind: str, seed: int) -> int:
    """Run one seed again and print everything that it did."""
    total = Tally()
    for run_history in HISTORIES[kind]:
        try:
            outcome = run_history(seed)
        except HistoryFailed as failure:
            print(failure)
            return 1
        for line in outcome.transcript:
            print(f"  {line}")
        total.update({"histories": 1, **outcome.counts})
    print(f"history {seed}: {_text(total)}; nothing broken")
    return 0


def soak_histories(kind: str, seconds: float, seed: int, jobs: int) -> int:
    """Run histories until time is up, or one fails: then print its transcript, and return 1."""
    print(f"histories of the {kind} from seed {seed} on, {jobs} at a time, for {seconds:g} s")
    started = time.monotonic()
    total = Tally()
    # Spawned: a fork would inherit everything that this process has open.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for tally in _run(pool, kind, jobs, seed, started + seconds):
                total.update(tally)
                _show(total, time.monotonic() - started)
        except HistoryFailed as failure:
            pool.shutdown(cancel_futures=True)
            print(f"\n{failure}")
            return 1
        except BaseException as ending:
            # Interrupted or terminated: do not wait for the histories that are under way.
            for process in multiprocessing.active_children():
                process.kill()
            if isinstance(ending, KeyboardInterrupt):
                _summarize(total, time.monotonic() - started)
            raise
    _summarize(total, time.monotonic() - started)
    return 0


def _summarize(total: Tally, elapsed: float) -> None:
    rate = total["histories"] / elapsed
    print(
        f"\n{_text(total)} in {elapsed:.1f} s ({rate:.0f} histories/s); nothing broken", flush=True
    )


def _run(
    pool: ProcessPoolExecutor, kind: str, jobs: int, seed: int, ends_at: float
) -> Iterator[Tally]:
    """The tallies of chunks until time is up. One chunk more than there are processes is queued."""
    running: set[Future[Tally]] = set()
    for first in count(seed, CHUNK):
        if time.monotonic() >= ends_at:
            break
        running.add(_submit(pool, kind, first))
        if len(running) > jobs:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in as_completed(running))


def _submit(pool: ProcessPoolExecutor, kind: str, first: int) -> Future[Tally]:
    """May start a process. It inherits that Ctrl-C is ignored, so it does so from its first moment."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return pool.submit(_run_chunk, kind, first)
    finally:
        signal.signal(signal.SIGINT, former)


def _run_chunk(kind: str, first: int) -> Tally:
    total = Tally()
    for seed in range(first, first + CHUNK):
        for run_history in HISTORIES[kind]:
            total.update({"histories": 1, **run_history(seed).counts})
    return total


def _text(tally: Tally) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in tally.items())


def _show(tally: Tally, elapsed: float) -> None:
    if sys.stdout.isatty():
        print(f"\r{elapsed:6.0f} s  {_text(tally)} ", end="", flush=True)
