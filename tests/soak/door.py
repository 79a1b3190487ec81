"""A real server with vandals at all its doors, and a client at each beside them that must not notice."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import psutil

from runnel.errors import RunnelError
from tests.protocols.grpc.certificates import make_certificate
from tests.server.serving import Server, serving
from tests.soak.bystanders import Bystander, Irregularity, ways_in
from tests.soak.grpc_vandals import GRPC_VANDALS
from tests.soak.http_vandals import HTTP_VANDALS
from tests.soak.lines import Entrance, Vandal
from tests.soak.tls_vandals import TLS_VANDALS
from tests.soak.vandals import VANDALS

DOORS: Final[Mapping[str, Sequence[Vandal]]] = {
    "native": VANDALS,
    "http": HTTP_VANDALS,
    "grpc": GRPC_VANDALS,
}
# What vandals can make the server keep is bounded, and small enough to be reached while it warms up.
SETTINGS: Final = (
    'topics=[{ match = "live/*", keep = "none" }, { match = "vandal/*", journal = "vandal", '
    'rotate = { bytes = "256KiB" }, retain = { bytes = "1MiB" }, pin = { bytes = "2MiB" } }, '
    '{ match = "*", rotate = { bytes = "1MiB" }, retain = { bytes = "2MiB" }, '
    'pin = { bytes = "4MiB" } }]',
    "limits.topics_max=200",
    "limits.producers_max=100",
    "limits.cursors_max=100",
    "limits.durable_subscriptions_max=50",
    "limits.open_files_max=64",
    "log.retention_interval=1s",
    "log.allocate_bytes=0",
    "native.handshake_timeout=1s",
    "native.idle_timeout=10s",
    "http.request_timeout=3s",
    "http.idle_timeout=10s",
    "grpc.idle_timeout=10s",
)
WARM_UP_S: Final = 5.0
# At a time, however many ways there are: more would measure the machine's patience, not the server's.
AT_ONCE_MAX: Final = 8
# What the allocator may keep of what was given back to it.
GROWTH_BYTES_MAX: Final = 64 * 2**20
HANDLES_MORE_MAX: Final = 8
# The settings' 64, and those that are not the log's: the lock, the catalogue, state journals, what it says.
FILES_MAX: Final = 80
# grpcio's own come and go.
THREADS_MORE_MAX: Final = 16
# The clients' own come and go, too: HTTP's keep some in reserve.
CONNECTIONS_MORE_MAX: Final = 4
# How long connections may take to be gone that were cut off, or fell silent.
QUIET_SECONDS_MAX: Final = 30.0
_BUGS: Final = re.compile(r"Traceback|a session failed|Task exception|a task of the|never awaited")


class DoorFault(AssertionError):
    """Something was noticed that should not have been."""


class Figures(NamedTuple):
    """What the server has of the machine. The log keeps as many files open as it may; the other handles are counted."""

    memory_bytes: int
    files: int
    handles: int
    threads: int
    connections: int

    @classmethod
    def of(cls, process: psutil.Process) -> Figures:
        with process.oneshot():
            sockets = process.net_connections("tcp")
            connected = sum(each.status != psutil.CONN_LISTEN for each in sockets)
            memory = process.memory_info().rss
            files = len(process.open_files())
            handles = process.num_fds() - files
            return cls(memory, files, handles, process.num_threads(), connected)


class Outcome(NamedTuple):
    visits: Counter[str]
    messages: dict[str, int]
    slowest_s: float
    before: Figures
    after: Figures


async def visit_door(
    seconds: float,
    seed: int,
    doors: Sequence[str] = tuple(DOORS),
    *,
    with_tls: bool = False,
    warm_up_s: float = WARM_UP_S,
) -> Outcome:
    """Let vandals in for so long, each of them at least once. Raises DoorFault if anybody else could tell.

    Without warming up, what the server grows by when it first meets all of them counts, too.
    """
    with tempfile.TemporaryDirectory(prefix="runnel-door-") as folder:
        settings: tuple[str, ...] = SETTINGS
        authority = None
        if with_tls:
            made = make_certificate(Path(folder), "broker")
            authority = str(made.certificate)
            for door in doors:
                settings += (f"{door}.tls_certificate={authority}", f"{door}.tls_key={made.key}")
        others = [door for door in doors if door != "native"]
        async with serving(Path(folder), *settings, doors=others) as server:
            entrances = _entrances(server, doors, authority)
            return await _visit(server, entrances, authority, (warm_up_s, seconds), Random(seed))


def _entrances(server: Server, doors: Sequence[str], authority: str | None) -> dict[str, Entrance]:
    ports = {"native": server.port}
    for door, address in server.addresses.items():
        ports[door] = int(address.rpartition(":")[2])
    found = {}
    for door in doors:
        context = None
        if authority is not None:
            context = ssl.create_default_context(cafile=authority)
            if door == "grpc":
                context.set_alpn_protocols(["h2"])
        found[door] = Entrance(ports[door], context)
    return found


async def _visit(
    server: Server,
    entrances: Mapping[str, Entrance],
    authority: str | None,
    seconds: tuple[float, float],
    chance: Random,
) -> Outcome:
    warm_up_s, visit_s = seconds
    crowd = _Crowd(entrances, chance)
    async with AsyncExitStack() as stack:
        ports = {door: entrance.port for door, entrance in entrances.items()}
        bystanders = {}
        for door, way in ways_in(server, ports, authority).items():
            bystanders[door] = Bystander(door, await stack.enter_async_context(way()))
        minding = [asyncio.create_task(each.run()) for each in bystanders.values()]
        try:
            before = begun = await _begun(server, minding, list(bystanders.values()))
            if warm_up_s:
                await _while_minding(minding, crowd.visit(warm_up_s))
                before = await _figures_when_quiet(server, minding, begun)
            await _while_minding(minding, crowd.visit(visit_s))
            after = await _figures_when_quiet(server, minding, begun)
            for each in bystanders.values():
                each.is_ending = True
            await asyncio.wait(minding)
            _complain(minding)
        finally:
            for task in minding:
                task.cancel()
            await asyncio.wait(minding)
    await server.stop()
    _check(server, before, after)
    messages = {door: each.messages for door, each in bystanders.items()}
    slowest_s = max(each.slowest_s for each in bystanders.values())
    return Outcome(crowd.visits, messages, slowest_s, before, after)


class _Crowd:
    """Some at a time, every way at least once however short it is."""

    def __init__(self, entrances: Mapping[str, Entrance], chance: Random) -> None:
        self.visits: Counter[str] = Counter()
        self._chance = chance
        of_each = [
            [(vandal, entrance) for vandal in DOORS[door]] for door, entrance in entrances.items()
        ]
        of_each += [
            [(vandal, entrance) for vandal in TLS_VANDALS]
            for entrance in entrances.values()
            if entrance.tls is not None
        ]
        # Door by door in turns, so that those who come together are at different ones.
        self._ways = [way for turn in zip_longest(*of_each) for way in turn if way is not None]

    async def visit(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        todo = list(self._ways)

        async def one_after_another() -> None:
            while todo or time.monotonic() < ends_at:
                vandal, entrance = todo.pop() if todo else self._chance.choice(self._ways)
                with suppress(OSError):  # thrown out in the middle of a word
                    await vandal(entrance, Random(self._chance.getrandbits(64)))
                self.visits[vandal.__name__] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE_MAX):
                group.create_task(one_after_another())


async def _begun(
    server: Server, minding: Sequence[asyncio.Task[None]], bystanders: Sequence[Bystander]
) -> Figures:
    """What the server has when everybody beside has got going and nobody else is there."""
    while any(each.messages < 5 for each in bystanders):
        _complain(minding)
        await asyncio.sleep(0.01)
    return Figures.of(server.process)


async def _while_minding(
    minding: Sequence[asyncio.Task[None]], work: Coroutine[Any, Any, None]
) -> None:
    """Do the work, unless a bystander has something to complain about first."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, *minding), return_when=asyncio.FIRST_COMPLETED)
        _complain(minding)
        working.result()
    finally:
        working.cancel()
        await asyncio.wait((working,))


def _complain(minding: Sequence[asyncio.Task[None]]) -> None:
    for task in minding:
        if task.done():
            try:
                task.result()
            except (RunnelError, TimeoutError, Irregularity) as error:
                raise DoorFault(f"a client beside noticed: {error!r}") from error


async def _figures_when_quiet(
    server: Server, minding: Sequence[asyncio.Task[None]], begun: Figures
) -> Figures:
    """When all of the vandals' connections are gone, only the bystanders' are left, and their memory is given back."""
    ends_at = time.monotonic() + QUIET_SECONDS_MAX
    while (figures := Figures.of(server.process)).connections > (
        begun.connections + CONNECTIONS_MORE_MAX
    ):
        _complain(minding)
        if time.monotonic() > ends_at:
            raise DoorFault(
                f"{figures.connections} connections are still there though nobody is; "
                f"{begun.connections} were there before"
            )
        await asyncio.sleep(0.05)
    # It is given back in steps of this size. Whoever keeps more for ever is found out by `_check`.
    while figures.memory_bytes > begun.memory_bytes + GROWTH_BYTES_MAX:
        _complain(minding)
        if time.monotonic() > ends_at:
            break
        await asyncio.sleep(0.05)
        figures = Figures.of(server.process)
    return figures


def _check(server: Server, before: Figures, after: Figures) -> None:
    told = server.told
    bug = _BUGS.search(told)
    if bug is not None:
        begin = max(0, bug.start() - 500)
        raise DoorFault(f"a bug of the server's was brought out:\n{told[begin : begin + 5000]}")
    if after.handles > before.handles + HANDLES_MORE_MAX:
        raise DoorFault(f"{before.handles} handles before, {after.handles} after")
    if after.files > FILES_MAX:
        raise DoorFault(f"{after.files} files are open, {FILES_MAX} at most should be")
    if after.threads > before.threads + THREADS_MORE_MAX:
        raise DoorFault(f"{before.threads} threads before, {after.threads} after")
    if after.memory_bytes > before.memory_bytes + GROWTH_BYTES_MAX:
        raise DoorFault(f"{before.memory_bytes:,} bytes before, {after.memory_bytes:,} after")


def soak_door(seconds: float, seed: int, doors: Sequence[str], *, with_tls: bool) -> int:
    """The command: tells what it does, and returns its exit code."""
    # That a vandal writes to a door that has thrown it out is no news.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    spoken = ", with TLS" if with_tls else ""
    where = f"{', '.join(doors)}{spoken}"
    print(f"vandals at the doors ({where}) from seed {seed} on, for {seconds:g} s", flush=True)
    try:
        outcome = asyncio.run(visit_door(seconds, seed, doors, with_tls=with_tls))
    except DoorFault as fault:
        print(f"seed {seed}: {fault}")
        return 1
    for name, count in sorted(outcome.visits.items()):
        print(f"  {name:24} {count:,} visits")
    before, after = outcome.before, outcome.after
    told = ", ".join(f"{count:,} at {door}" for door, count in outcome.messages.items())
    print(
        f"memory {before.memory_bytes / 2**20:.1f} MiB before, {after.memory_bytes / 2**20:.1f} after; "
        f"handles {before.handles}, {after.handles}; threads {before.threads}, {after.threads}; "
        f"connections {before.connections}, {after.connections}\n"
        f"{sum(outcome.visits.values()):,} visits; clients beside: messages there and back {told}, "
        f"the slowest in {outcome.slowest_s * 1e3:.0f} ms; nothing broken"
    )
    return 0
