"""Histories of log, broker or subscriptions in several processes, from one seed on, until time is up or one fails."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from itertools import count
from typing import Final

from tests.broker.consumer_groups.simulation import history as work
from tests.broker.simulation import history as broker
from tests.group_rules.simulation import history as subscriptions
from tests.log.simulation import history as log

# Enough that handing them over costs nothing, few enough that progress moves.
CHUNK = 10


# What was done, by the words that tell it.
Tally = Counter[str]


def _log_history(seed: int) -> tuple[Tally, tuple[str, ...]]:
    outcome = log.run_history(seed)
    tally = Tally(
        {
            "histories": 1,
            "disk operations": outcome.disk_operations,
            "recoveries": outcome.recoveries,
            "messages": outcome.messages,
        }
    )
    return tally, outcome.transcript


def _broker_history(seed: int) -> tuple[Tally, tuple[str, ...]]:
    outcome = broker.run_history(seed)
    tally = Tally(
        {
            "histories": 1,
            "messages": outcome.messages,
            "deliveries": outcome.delivered,
            "restarts": outcome.restarts,
        }
    )
    return tally, outcome.transcript


def _subscriptions_history(seed: int) -> tuple[Tally, tuple[str, ...]]:
    """The rules alone, and then a whole broker with a disk: a seed has one history of each."""
    rules, broker = subscriptions.run_history(seed), work.run_history(seed)
    tally = Tally(
        {
            "histories": 2,
            "messages": rules.messages + broker.messages,
            "deliveries": rules.deliveries + broker.deliveries,
            "restarts": rules.restarts + broker.restarts,
        }
    )
    return tally, (*rules.transcript, "and the same seed for a broker:", *broker.transcript)


HISTORIES: Final[Mapping[str, Callable[[int], tuple[Tally, tuple[str, ...]]]]] = {
    "log": _log_history,
    "broker": _broker_history,
    "subscriptions": _subscriptions_history,
}
FAILURES: Final = (
    log.HistoryFailed,
    broker.HistoryFailed,
    subscriptions.HistoryFailed,
    work.HistoryFailed,
)


def replay_history(kind: str, seed: int) -> int:
    """One history with everything that it did."""
    try:
        tally, transcript = HISTORIES[kind](seed)
    except FAILURES as failure:
        print(failure)
        return 1
    for line in transcript:
        print(f"  {line}")
    print(f"history {seed}: {_told(tally)}; nothing broken")
    return 0


def soak_histories(kind: str, seconds: float, seed: int, jobs: int) -> int:
    """Until time is up, or a history fails: then its seed and transcript, and 1."""
    print(f"histories of the {kind} from seed {seed} on, {jobs} at a time, for {seconds:g} s")
    started = time.monotonic()
    total = Tally()
    # Spawned: a fork would take over whatever this process has open.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for tally in _run(pool, kind, jobs, seed, started + seconds):
                total.update(tally)
                _show(total, time.monotonic() - started)
        except FAILURES as failure:
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
    rate = total["histories"] / elapsed
    print(
        f"\n{_told(total)} in {elapsed:.1f} s ({rate:.0f} histories/s); nothing broken", flush=True
    )


def _run(
    pool: ProcessPoolExecutor, kind: str, jobs: int, seed: int, ends_at: float
) -> Iterator[Tally]:
    """The tallies of chunks, one for each process and one more in waiting, until time is up."""
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
    """May start a process, which ignores Ctrl-C from its first moment: it inherits that."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return pool.submit(_run_chunk, kind, first)
    finally:
        signal.signal(signal.SIGINT, former)


def _run_chunk(kind: str, first: int) -> Tally:
    total = Tally()
    for seed in range(first, first + CHUNK):
        tally, _ = HISTORIES[kind](seed)
        total.update(tally)
    return total


def _told(tally: Tally) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in tally.items())


def _show(tally: Tally, elapsed: float) -> None:
    if sys.stdout.isatty():
        print(f"\r{elapsed:6.0f} s  {_told(tally)} ", end="", flush=True)
