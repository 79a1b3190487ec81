"""A real server with vandals at its door, and a client beside them that must not notice."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from runnel.client import Bus, connect
from runnel.errors import RunnelError
from tests.server.serving import Server, serving
from tests.soak.vandals import VANDALS, Vandal

# What vandals can make the server keep is bounded, and small enough to be reached while it warms up.
SETTINGS: Final = (
    'topics=[{ match = "live/*", keep = "none" }, { match = "vandal/*", journal = "vandal", '
    'rotate = { bytes = "256KiB" }, retain = { bytes = "1MiB" } }, '
    '{ match = "*", rotate = { bytes = "1MiB" }, retain = { bytes = "2MiB" } }]',
    "limits.topics_max=200",
    "limits.producers_max=100",
    "limits.cursors_max=100",
    "log.retention_interval=1s",
    "log.allocate_bytes=0",
    "native.handshake_timeout=1s",
    "native.idle_timeout=10s",
)
WARM_UP_S: Final = 2.0
# What the allocator may keep of what was given back to it.
GROWTH_BYTES_MAX: Final = 48 * 2**20
HANDLES_MORE_MAX: Final = 4
# However busy the door, a well-behaved client waits less than this for one answer.
PATIENCE_MAX_S: Final = 20.0
# How long connections may take to be gone that were cut off, or fell silent.
QUIET_SECONDS_MAX: Final = 30.0


class DoorFault(AssertionError):
    """Something was noticed that should not have been."""


class Figures(NamedTuple):
    """What the server has of the machine."""

    memory_bytes: int
    handles: int


class Outcome(NamedTuple):
    visits: Counter[str]
    messages: int
    slowest_s: float
    before: Figures
    after: Figures


class Bystander:
    """Publishes and reads back, on a topic that is kept and one that is not, and minds every irregularity."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.messages = 0
        self.slowest_s = 0.0

    async def run(self) -> None:
        async with (
            self._bus.subscribe("kept/bystander") as kept,
            self._bus.subscribe("live/*") as live,
        ):
            while True:
                self.messages += 1
                payload = b"%d" % self.messages
                begin = time.monotonic()
                async with asyncio.timeout(PATIENCE_MAX_S):
                    await self._bus.publish("kept/bystander", payload)
                    await self._bus.publish("live/bystander", payload)
                    for subscription in (kept, live):
                        message = await anext(subscription)
                        if (message.offset, message.payload) != (self.messages, payload):
                            raise DoorFault(f"message {self.messages} was expected: {message}")
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                if kept.gaps or live.gaps:
                    raise DoorFault(f"gaps: {kept.gaps} {live.gaps}")
                await asyncio.sleep(0.002)


async def visit_door(seconds: float, seed: int) -> Outcome:
    """Let vandals in for so long. Raises DoorFault if anybody else could tell."""
    visits: Counter[str] = Counter()
    chance = Random(seed)

    async def visit(vandal: Vandal, random: Random, port: int) -> None:
        with suppress(OSError):  # thrown out in the middle of a word
            await vandal(port, random)
        visits[vandal.__name__] += 1

    async def crowd(first: Vandal, random: Random, seconds: float, port: int) -> None:
        ends_at = time.monotonic() + seconds
        await visit(first, Random(random.getrandbits(64)), port)
        while time.monotonic() < ends_at:
            await visit(random.choice(VANDALS), Random(random.getrandbits(64)), port)

    async def crowds(seconds: float, port: int) -> None:
        """As many at a time as there are ways, so that none is missing however short it is."""
        async with asyncio.TaskGroup() as group:
            for vandal in VANDALS:
                random = Random(chance.getrandbits(64))
                group.create_task(crowd(vandal, random, seconds, port))

    with tempfile.TemporaryDirectory(prefix="runnel-door-") as folder:
        async with serving(Path(folder), *SETTINGS) as server, connect(server.url) as bus:
            bystander = Bystander(bus)
            minding = asyncio.create_task(bystander.run())
            try:
                await _while_minding(minding, crowds(WARM_UP_S, server.port))
                before = await _figures_when_quiet(server, bus)
                await _while_minding(minding, crowds(seconds, server.port))
                after = await _figures_when_quiet(server, bus)
            finally:
                minding.cancel()
                await asyncio.wait((minding,))
            await server.stop()
            _check(server, before, after)
            return Outcome(visits, bystander.messages, bystander.slowest_s, before, after)


async def _while_minding(minding: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless the bystander has something to complain about first."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, minding), return_when=asyncio.FIRST_COMPLETED)
        if minding.done():
            try:
                minding.result()
            except (RunnelError, TimeoutError) as error:
                raise DoorFault(f"the client beside noticed: {error!r}") from error
        working.result()
    finally:
        working.cancel()
        await asyncio.wait((working,))


async def _figures_when_quiet(server: Server, bus: Bus) -> Figures:
    """When all of the vandals' connections are gone, and only the bystander's is left."""
    ends_at = time.monotonic() + QUIET_SECONDS_MAX
    while (connections := (await bus.statistics())["gauges"]["connections"]) > 1:
        if time.monotonic() > ends_at:
            raise DoorFault(f"{connections} connections are still there though nobody is")
        await asyncio.sleep(0.05)
    return Figures(server.process.memory_info().rss, server.process.num_fds())


def _check(server: Server, before: Figures, after: Figures) -> None:
    bug = re.search(r"Traceback|a session failed|Task exception|a task of the", server.told)
    if bug is not None:
        begin = max(0, bug.start() - 500)
        raise DoorFault(
            f"a bug of the server's was brought out:\n{server.told[begin : begin + 5000]}"
        )
    if after.handles > before.handles + HANDLES_MORE_MAX:
        raise DoorFault(f"{before.handles} handles before, {after.handles} after")
    if after.memory_bytes > before.memory_bytes + GROWTH_BYTES_MAX:
        raise DoorFault(f"{before.memory_bytes:,} bytes before, {after.memory_bytes:,} after")


def soak_door(seconds: float, seed: int) -> int:
    """The command: tells what it does, and returns its exit code."""
    print(f"vandals at the door of a server from seed {seed} on, for {seconds:g} s", flush=True)
    try:
        outcome = asyncio.run(visit_door(seconds, seed))
    except DoorFault as fault:
        print(f"seed {seed}: {fault}")
        return 1
    for name, count in sorted(outcome.visits.items()):
        print(f"  {name:24} {count:,} visits")
    before, after = outcome.before, outcome.after
    print(
        f"memory {before.memory_bytes / 2**20:.1f} MiB before, {after.memory_bytes / 2**20:.1f} after; "
        f"handles {before.handles} before, {after.handles} after\n"
        f"the client beside: {outcome.messages:,} messages there and back, the slowest in "
        f"{outcome.slowest_s * 1e3:.0f} ms; nothing broken"
    )
    return 0
