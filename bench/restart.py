"""Restart: from the start of the server's process to the first stored message that a client reads.

stored bytes   half a GiB in 100 topics, after a clean end and after SIGKILL, beside the peers
topics         the same beside 100,000 topics

A server is filled once and ended; from then on each run starts it on what it left, reads a message of its last topic,
and ends it the same way again: by SIGTERM, or killed with all its processes. The reader has imported its client before
and asks again every hundredth of a second. Files are in the page cache, as after a crash of the process, not of the
machine. RabbitMQ takes no part: starting and ending it takes so long that it would make up most of the run.
"""

from __future__ import annotations

import enum
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import psutil

from bench.contest import Contender, Sample, Standing, alone, compared, contest
from bench.measures import KAFKA, NATS, REDIS, RUNNEL, peer_facts, rounds
from bench.processes import RoleError, Team
from bench.report import Result
from bench.systems import kafka_system, nats_system, redis_system, runnel_system
from bench.systems.system import RolePlan, RunningServer, free_port, scratch

STORED_MIB = 512
PAYLOAD_BYTES = 10_000
TOPICS = 100
TOPICS_MANY = 100_000
JETSTREAM, STREAMS = "JetStream", "Redis Streams"
_SCHEMES = {RUNNEL: "runnel", NATS: "nats", REDIS: "redis", KAFKA: "kafka"}

more_facts = peer_facts


class Ending(enum.Enum):
    CLEAN = "after a clean end"
    KILLED = "after SIGKILL"


class _Killed(Exception):
    """On purpose: it leaves the block that looks after a server."""


def _kill(served: RunningServer) -> None:
    server = psutil.Process(served.pid)
    for process in (*server.children(recursive=True), server):
        process.kill()
    server.wait()


@contextmanager
def _served(
    system: ModuleType, directory: Path, port: int, ending: Ending
) -> Iterator[RunningServer]:
    try:
        with system.serve_in(directory, port) as served:
            yield served
            if ending is Ending.KILLED:
                _kill(served)
                raise _Killed
    except _Killed:
        return


def _plan(system: ModuleType, port: int, topics: Sequence[str], count: int = 0) -> RolePlan:
    url = f"{_SCHEMES[system.NAME]}://127.0.0.1:{port}"
    if system is kafka_system:  # which names its topics by what comes after the #
        url += "#default-1"
    return RolePlan(url, topics, count=count, payload_bytes=PAYLOAD_BYTES)


def _fill(system: ModuleType, directory: Path, topics: Sequence[str], mib: int) -> None:
    """Filled, and ended cleanly."""
    port, count = free_port(), max(mib * 2**20 // PAYLOAD_BYTES, len(topics))
    plan = _plan(system, port, topics, count)
    with _served(system, directory, port, Ending.CLEAN), Team() as team:
        filler = team.add(system.fill, plan)
        filler.wait_ready()
        if filler.report().messages != count:
            raise RoleError(f"{system.NAME} could not be filled")


def _restarting(
    name: str, system: ModuleType, directory: Path, topics: Sequence[str], ending: Ending
) -> Contender:
    def measure() -> Sample:
        port = free_port()
        plan = _plan(system, port, topics)
        with Team() as team:
            reader = team.add(system.wait_up, plan)
            reader.wait_ready()
            reader.go()
            begin_ns = time.time_ns()
            with _served(system, directory, port, ending):
                seen = reader.report()
        return Sample(((seen.end_ns - begin_ns) / 1e9,))

    return Contender(name, measure)


def _contest(
    entries: Sequence[tuple[str, ModuleType, Sequence[str]]], *, quick: bool
) -> dict[Ending, dict[str, Standing]]:
    """By how they ended. Either ending has a copy of its own; the first run of each makes it so, and is not counted."""
    mib = STORED_MIB // 4 if quick else STORED_MIB
    contenders: dict[Ending, list[Contender]] = {ending: [] for ending in Ending}
    with ExitStack() as stack:
        for name, system, topics in entries:
            if absence := system.absence():
                for ending in Ending:
                    contenders[ending].append(Contender(name, lambda: Sample(()), absence))
                continue
            clean, killed = (stack.enter_context(scratch()) for _ in Ending)
            _fill(system, clean, topics, mib)
            shutil.copytree(clean, killed, dirs_exist_ok=True)
            for ending, directory in ((Ending.CLEAN, clean), (Ending.KILLED, killed)):
                contender = _restarting(name, system, directory, topics, ending)
                contender.measure()
                contenders[ending].append(contender)
        return {ending: contest(contenders[ending], rounds(quick=quick)) for ending in Ending}


def _topics(count: int) -> tuple[str, ...]:
    return tuple(f"stored/{number}" for number in range(count))


def bench_stored_bytes(*, quick: bool) -> list[Result]:
    few = _topics(TOPICS)
    entries = [
        (RUNNEL, runnel_system, few),
        (JETSTREAM, nats_system, few),
        (STREAMS, redis_system, few),
        (KAFKA, kafka_system, few),
    ]
    mib = STORED_MIB // 4 if quick else STORED_MIB
    results = []
    for ending, standings in _contest(entries, quick=quick).items():
        ours, *peers = standings.values()
        name = f"restart with {mib} MiB in {TOPICS} topics, {ending.value}"
        results.append(alone(name, "s", ours, is_at_most=True, others=peers))
    return results


def bench_topics(*, quick: bool) -> list[Result]:
    few, many = f"{TOPICS} topics", f"{TOPICS_MANY:,} topics"
    entries = [
        (few, runnel_system, _topics(TOPICS)),
        (many, runnel_system, _topics(TOPICS_MANY)),
    ]
    return [
        compared(
            f"restart with {many}, {ending.value}",
            "s",
            standings[many],
            standings[few],
            is_at_most=True,
        )
        for ending, standings in _contest(entries, quick=quick).items()
    ]


PARTS = (("stored bytes", bench_stored_bytes), ("topics", bench_topics))
