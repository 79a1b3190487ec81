"""Several processes over one data directory: what they cost, what they gain, and how long a move and a crash take.

work              publishing over 16 topics, read by one pattern, with 2 and 4 processes | the same with one, which
                  for stored topics has as many shards: messages/s, and processor time of all broker processes
single messages   ready-made frames, each client to the owner of its topic, 2 processes  | one process
pauses            the longest time between two acknowledged messages of a topic around a planned move of its shard,
                  and around SIGKILL of the process that serves it

Publisher, reader and brokers are separate processes. On a machine with fewer cores than processes only the processor
time tells what several broker processes cost; messages/s tell what is left of it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import psutil
import uvloop

from bench.contest import Contender, Sample, Standing, compared, contest
from bench.measures import fan_out, rounds, sized
from bench.processes import Role, RoleError, Team
from bench.report import Result
from bench.systems import native_load, runnel_system
from bench.systems.phases import PUBLISH, LoadPlan, LoadReport, cpu_seconds
from bench.systems.system import PayloadOrder, RunningServer, free_port, scratch
from runnel.client import Bus, connect
from runnel.errors import RunnelError

TOPICS = 16
SHARDS = 16
_CLIENTS, _CALLS, _WINDOW = 8, 8_000, 64
_PAUSES = 20
_SETTLED_SECONDS_MAX = 20.0
_REST_SECONDS, _REST_SHARE_MAX = 0.5, 0.05
_PROBE_DEADLINE_SECONDS = 20.0

_names = (f"{number:04}" for number in itertools.count())


def more_facts() -> dict[str, str]:
    return {"cores": str(os.cpu_count())}


class Setting(msgspec.Struct, frozen=True):
    """How a broker is run."""

    name: str
    options: Sequence[str] = ()


ONE = Setting("1 process")
# With as many shards as several processes have: batches are as small then, each for one shard.
ONE_OF_SHARDS = Setting(f"1 process, {SHARDS} shards", ("--set", f"log.journal_shards={SHARDS}"))
TWO, THREE, FOUR = (
    Setting(f"{count} processes", ("--processes", str(count))) for count in (2, 3, 4)
)


@contextmanager
def _served(setting: Setting) -> Iterator[RunningServer]:
    with (
        scratch() as directory,
        runnel_system.serve_in(directory, free_port(), options=setting.options) as served,
    ):
        _wait_at_rest(psutil.Process(served.pid))
        yield served


def _wait_at_rest(server: psutil.Process) -> None:
    """Wait until the start is over: its imports are not what is measured."""
    deadline_s = time.monotonic() + _SETTLED_SECONDS_MAX
    while True:
        before_s = cpu_seconds(server)
        time.sleep(_REST_SECONDS)
        if cpu_seconds(server) - before_s < _REST_SECONDS * _REST_SHARE_MAX:
            return
        if time.monotonic() > deadline_s:
            raise RoleError("the broker's processes do not come to rest")


# --- Work ---

_MESSAGES = 2_400_000
_KINDS = {
    "ephemeral": ("live", (ONE, TWO, FOUR)),
    "stored": ("stored", (ONE, ONE_OF_SHARDS, TWO, FOUR)),
}


def _fanned_out(setting: Setting, folder: str, count: int) -> Sample:
    topics = tuple(f"{folder}/{number}" for number in range(TOPICS))
    with _served(setting) as served:
        server = psutil.Process(served.pid)
        before_s = cpu_seconds(server)
        sample = fan_out(
            runnel_system,
            served,
            count,
            topics=topics,
            pattern=f"{folder}/*",
            order=PayloadOrder.TOPIC,
        )
        cost_us = (cpu_seconds(server) - before_s) / count * 1e6
    return Sample((*sample.values, cost_us), sample.trouble)


def bench_work(*, quick: bool) -> list[Result]:
    results = []
    for kind, (folder, settings) in _KINDS.items():
        count = sized(_MESSAGES, quick=quick) // TOPICS * TOPICS

        def measure(setting: Setting, folder: str = folder, count: int = count) -> Sample:
            return _fanned_out(setting, folder, count)

        standings = _contest(measure, settings, quick=quick)
        one, *several = standings[-3:]
        for standing in several:
            name = f"{kind}, {TOPICS} topics to one pattern, {standing.name}"
            results += [
                compared(
                    f"{name}: processor time of the brokers",
                    "µs a message",
                    standing,
                    one,
                    place=1,
                    target=1.15,
                    is_at_most=True,
                    others=standings[:-3],
                ),
                compared(
                    f"{name}: delivered",
                    "messages/s",
                    standing,
                    one,
                    target=0.9,
                    others=standings[:-3],
                ),
            ]
    return results


def _contest(
    measure: Callable[[Setting], Sample], settings: Sequence[Setting], *, quick: bool
) -> list[Standing]:
    contenders = [
        Contender(setting.name, lambda setting=setting: measure(setting))  # type: ignore[misc]
        for setting in settings
    ]
    return list(contest(contenders, rounds(quick=quick)).values())


# --- Single messages ---


def bench_single_messages(*, quick: bool) -> list[Result]:
    calls = sized(_CALLS, quick=quick)

    def measure(setting: Setting) -> Sample:
        with _served(setting) as served:
            address = served.url.removeprefix("runnel://")
            plan = LoadPlan(address, served.pid, next(_names), _CLIENTS, calls, window=_WINDOW)
            phase = _loaded(native_load.spread, plan).phases[PUBLISH]
        return Sample((phase.rate, phase.cpu_us))

    one, two = _contest(measure, (ONE, TWO), quick=quick)
    # Brokers and load need a core each: with fewer, the processor time is what can be compared.
    target = 1.5 if (os.cpu_count() or 1) >= 4 else None
    name = f"single messages, {_CLIENTS} clients, {two.name}"
    return [
        compared(f"{name}: acknowledged", "messages/s", two, one, target=target),
        compared(
            f"{name}: processor time of the brokers",
            "µs a message",
            two,
            one,
            place=1,
            target=1.15,
            is_at_most=True,
        ),
    ]


def _loaded(role: Role, plan: LoadPlan) -> LoadReport:
    with Team() as team:
        load = team.add(role, plan)
        team.wait_ready()
        load.go()
        report = load.report()
    assert isinstance(report, LoadReport)
    return report


# --- Pauses ---


class _Probe:
    """Publishes to one topic, each message after the acknowledgement of the one before, and notes the times."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus = bus
        self._topic = topic
        self.acked_s: list[float] = []
        self.errors: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                await self._bus.publish(self._topic, b"probe", deadline_s=_PROBE_DEADLINE_SECONDS)
            except RunnelError as error:  # of an outcome that a lost connection left open
                self.errors.append(str(error))
                await asyncio.sleep(0.001)
            else:
                self.acked_s.append(time.monotonic())

    async def longest_gap_s(self, since_s: float) -> float:
        """The longest time between two acknowledgements since then, once things have gone on for a while."""
        while len([each for each in self.acked_s if each > since_s]) < 50 or (
            time.monotonic() - since_s < 1.0
        ):
            if time.monotonic() - since_s > _SETTLED_SECONDS_MAX:
                raise RoleError(f"{self._topic} is not acknowledged any more: {self.errors[-1:]}")
            await asyncio.sleep(0.05)
        times = [each for each in self.acked_s if each >= since_s - 0.1]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


async def _owner(bus: Bus, journal: str, shard: int) -> str:
    status = await bus.cluster()
    return next(
        (each.node for each in status.shards if (each.journal, each.shard) == (journal, shard)), ""
    )


async def _moved(bus: Bus, journal: str, shard: int) -> None:
    """Move the shard to another node, and wait until it serves the shard."""
    status, owner = await bus.cluster(), await _owner(bus, journal, shard)
    target = next(node.name for node in status.nodes if node.name != owner)
    await bus.move_shard(f"{journal}/{shard}", target)
    await _until(bus, journal, shard, lambda node: node == target)


async def _killed(bus: Bus, journal: str, shard: int) -> None:
    """Kill the process that serves the shard, and wait until another one does, and the first one has come back."""
    owner = await _owner(bus, journal, shard)
    nodes = {node.name: node for node in (await bus.cluster()).nodes}
    os.kill(nodes[owner].pid, signal.SIGKILL)
    await _until(bus, journal, shard, lambda node: node not in ("", owner))
    deadline_s = time.monotonic() + _SETTLED_SECONDS_MAX
    while len((await bus.cluster()).nodes) < len(nodes):
        if time.monotonic() > deadline_s:
            raise RoleError(f"{owner} has not come back")
        await asyncio.sleep(0.05)


async def _until(bus: Bus, journal: str, shard: int, is_it: Callable[[str], bool]) -> None:
    deadline_s = time.monotonic() + _SETTLED_SECONDS_MAX
    while not is_it(await _owner(bus, journal, shard)):
        if time.monotonic() > deadline_s:
            raise RoleError(f"shard {journal}/{shard} has not moved")
        await asyncio.sleep(0.01)


_Disturb = Callable[[Bus, str, int], Awaitable[None]]


async def _pauses(served: RunningServer, disturb: _Disturb, count: int) -> list[float]:
    """In milliseconds."""
    topic, found = "stored/probe", []
    async with connect(served.url) as bus, connect(served.url) as admin:
        await bus.publish(topic, b"first")
        [owner] = (await bus.routes(topic))[topic].owners
        probe = _Probe(bus, topic)
        probing = asyncio.create_task(probe.run())
        try:
            for _ in range(count):
                await probe.longest_gap_s(time.monotonic())
                since_s = time.monotonic()
                await disturb(admin, owner.journal, owner.shard)
                found.append(await probe.longest_gap_s(since_s) * 1e3)
        finally:
            probing.cancel()
            await asyncio.wait({probing})
    return found


def bench_pauses(*, quick: bool) -> list[Result]:
    count = _PAUSES // 4 if quick else _PAUSES
    results = []
    for what, disturb, target_ms in (
        ("planned move", _moved, 500),
        ("SIGKILL of the owner", _killed, 1000),
    ):
        with _served(THREE) as served:
            found = sorted(uvloop.run(_pauses(served, disturb, count)))
        results += [
            Result(
                f"pause around a {what}, {name}",
                value,
                "ms",
                target=target_ms,
                is_at_most=True,
                note=f"{count} of them, 3 processes",
            )
            for name, value in (("p50", statistics.median(found)), ("worst", found[-1]))
        ]
    return results


PARTS = (
    ("work", bench_work),
    ("single messages", bench_single_messages),
    ("pauses", bench_pauses),
)
