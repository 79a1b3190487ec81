"""A real server whose listeners are attacked, while a well-behaved client of each must not notice anything.

All attacks follow from one seed. In the end the server must have as much memory, as many files, threads and connections
as before, and its log must show no bug.
"""

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
from tests.server.server_process import ServerProcess, running_server
from tests.soak.bystanders import Bystander, Connector, Irregularity, connectors
from tests.soak.vandals.grpc import GrpcVandal
from tests.soak.vandals.http import HttpVandal
from tests.soak.vandals.native import NativeVandal
from tests.soak.vandals.tls import TLS_ATTACKS
from tests.soak.vandals.vandal import Attack, AttackTarget, Vandal

VANDALS: Final[Mapping[str, Vandal]] = {
    "native": NativeVandal(),
    "http": HttpVandal(),
    "grpc": GrpcVandal(),
}
# These limits bound what vandals can make the server keep. They are small enough to be reached while it warms up.
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
# Attacks at a time. More would measure the machine's patience, not the server's.
AT_ONCE_MAX: Final = 8
# The allocator may keep this much of freed memory.
GROWTH_BYTES_MAX: Final = 64 * 2**20
HANDLES_MORE_MAX: Final = 8
# The 64 of the settings, and files that are not the log's: lock, catalogue, state journals, standard error.
FILES_MAX: Final = 80
# grpcio starts and ends threads of its own.
THREADS_MORE_MAX: Final = 16
# The number of the bystanders' connections varies: HTTP clients keep some in reserve.
CONNECTIONS_MORE_MAX: Final = 4
# The longest time until connections that were cut off, or fell silent, are gone.
QUIET_SECONDS_MAX: Final = 30.0
_BUGS: Final = re.compile(r"Traceback|a session failed|Task exception|a task of the|never awaited")


class ListenerFault(AssertionError):
    """An attack disturbed a client, brought out a bug, or left something behind."""


class ResourceUse(NamedTuple):
    """The resources of the server's process. `handles` leaves out files: the log keeps as many open as it may."""

    memory_bytes: int
    files: int
    handles: int
    threads: int
    connections: int

    @classmethod
    def of(cls, process: psutil.Process) -> ResourceUse:
        with process.oneshot():
            sockets = process.net_connections("tcp")
            connected = sum(each.status != psutil.CONN_LISTEN for each in sockets)
            memory = process.memory_info().rss
            files = len(process.open_files())
            handles = process.num_fds() - files
            return cls(memory, files, handles, process.num_threads(), connected)


class AttackReport(NamedTuple):
    """The attacks by name, the messages of each bystander, and the server's resources before and after."""

    attacks: Counter[str]
    messages: dict[str, int]
    slowest_s: float
    before: ResourceUse
    after: ResourceUse


async def attack_listeners(
    seconds: float,
    seed: int,
    listeners: Sequence[str] = tuple(VANDALS),
    *,
    with_tls: bool = False,
    warm_up_s: float = WARM_UP_S,
) -> AttackReport:
    """Attack for so long, with each attack at least once. Raises ListenerFault if it does any harm.

    Without warming up, the resources count, too, that the server takes when it first meets all attacks.
    """
    with tempfile.TemporaryDirectory(prefix="runnel-listeners-") as folder:
        settings: tuple[str, ...] = SETTINGS
        authority = None
        if with_tls:
            made = make_certificate(Path(folder), "broker")
            authority = str(made.certificate)
            for name in listeners:
                settings += (f"{name}.tls_certificate={authority}", f"{name}.tls_key={made.key}")
        others = [name for name in listeners if name != "native"]
        async with running_server(Path(folder), *settings, listeners=others) as server:
            crowd = _Crowd(_targets(server, listeners, authority), Random(seed))
            return await _run(
                server, crowd, connectors(server, listeners, authority), (warm_up_s, seconds)
            )


def _targets(
    server: ServerProcess, listeners: Sequence[str], authority: str | None
) -> dict[str, AttackTarget]:
    ports = {"native": server.port}
    for name, address in server.addresses.items():
        ports[name] = int(address.rpartition(":")[2])
    targets = {}
    for name in listeners:
        context = None
        if authority is not None:
            context = ssl.create_default_context(cafile=authority)
            if name == "grpc":
                context.set_alpn_protocols(["h2"])
        targets[name] = AttackTarget(ports[name], context)
    return targets


async def _run(
    server: ServerProcess,
    crowd: _Crowd,
    ways: Mapping[str, Connector],
    seconds: tuple[float, float],
) -> AttackReport:
    warm_up_s, attack_s = seconds
    async with AsyncExitStack() as stack:
        bystanders = {
            name: Bystander(name, await stack.enter_async_context(connect()))
            for name, connect in ways.items()
        }
        tasks = [asyncio.create_task(each.run()) for each in bystanders.values()]
        try:
            before = begun = await _begun(server, tasks, list(bystanders.values()))
            if warm_up_s:
                await _unless_noticed(tasks, crowd.attack(warm_up_s))
                before = await _use_when_quiet(server, tasks, begun)
            await _unless_noticed(tasks, crowd.attack(attack_s))
            after = await _use_when_quiet(server, tasks, begun)
            for each in bystanders.values():
                each.is_ending = True
            await asyncio.wait(tasks)
            _complain(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    await server.stop()
    _check(server, before, after)
    messages = {name: each.messages for name, each in bystanders.items()}
    slowest_s = max(each.slowest_s for each in bystanders.values())
    return AttackReport(crowd.attacks, messages, slowest_s, before, after)


class _Crowd:
    """Runs attacks, some at a time. Each runs at least once, however short the time is."""

    def __init__(self, targets: Mapping[str, AttackTarget], chance: Random) -> None:
        self.attacks: Counter[str] = Counter()
        self._chance = chance
        of_each = [
            [(name, attack, target) for attack in VANDALS[name].attacks]
            for name, target in targets.items()
        ]
        of_each += [
            [("tls", attack, target) for attack in TLS_ATTACKS]
            for target in targets.values()
            if target.tls is not None
        ]
        # Listener by listener in turns, so that attacks at the same time are on different ones.
        self._plan: list[tuple[str, Attack, AttackTarget]] = [
            each for turn in zip_longest(*of_each) for each in turn if each is not None
        ]

    async def attack(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        todo = list(self._plan)

        async def one_after_another() -> None:
            while todo or time.monotonic() < ends_at:
                name, attack, target = todo.pop() if todo else self._chance.choice(self._plan)
                with suppress(OSError):  # the server closed the connection
                    await attack(target, Random(self._chance.getrandbits(64)))
                self.attacks[attack_name(name, attack)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE_MAX):
                group.create_task(one_after_another())


def attack_name(vandal: str, attack: Attack) -> str:
    return f"{vandal} {attack.__name__}"


async def _begun(
    server: ServerProcess, tasks: Sequence[asyncio.Task[None]], bystanders: Sequence[Bystander]
) -> ResourceUse:
    """The server's resources when all bystanders are busy and no attack has begun."""
    while any(each.messages < 5 for each in bystanders):
        _complain(tasks)
        await asyncio.sleep(0.01)
    return ResourceUse.of(server.process)


async def _unless_noticed(
    tasks: Sequence[asyncio.Task[None]], attack: Coroutine[Any, Any, None]
) -> None:
    """Attack until the end, or until a bystander notices something."""
    attacking = asyncio.create_task(attack)
    try:
        await asyncio.wait((attacking, *tasks), return_when=asyncio.FIRST_COMPLETED)
        _complain(tasks)
        attacking.result()
    finally:
        attacking.cancel()
        await asyncio.wait((attacking,))


def _complain(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            try:
                task.result()
            except (RunnelError, TimeoutError, Irregularity) as error:
                raise ListenerFault(f"a bystander noticed: {error!r}") from error


async def _use_when_quiet(
    server: ServerProcess, tasks: Sequence[asyncio.Task[None]], begun: ResourceUse
) -> ResourceUse:
    """The server's resources when the vandals' connections are gone, and their memory was given back."""
    ends_at = time.monotonic() + QUIET_SECONDS_MAX
    while (use := ResourceUse.of(server.process)).connections > (
        begun.connections + CONNECTIONS_MORE_MAX
    ):
        _complain(tasks)
        if time.monotonic() > ends_at:
            raise ListenerFault(
                f"{use.connections} connections are open though all attackers have gone; "
                f"there were {begun.connections} before"
            )
        await asyncio.sleep(0.05)
    # The process gives memory back in large steps. `_check` finds it if it keeps more for ever.
    while use.memory_bytes > begun.memory_bytes + GROWTH_BYTES_MAX:
        _complain(tasks)
        if time.monotonic() > ends_at:
            break
        await asyncio.sleep(0.05)
        use = ResourceUse.of(server.process)
    return use


def _check(server: ServerProcess, before: ResourceUse, after: ResourceUse) -> None:
    log = server.stderr
    bug = _BUGS.search(log)
    if bug is not None:
        begin = max(0, bug.start() - 500)
        raise ListenerFault(f"the server has a bug:\n{log[begin : begin + 5000]}")
    if after.handles > before.handles + HANDLES_MORE_MAX:
        raise ListenerFault(f"{before.handles} handles before, {after.handles} after")
    if after.files > FILES_MAX:
        raise ListenerFault(f"{after.files} files are open; at most {FILES_MAX} are allowed")
    if after.threads > before.threads + THREADS_MORE_MAX:
        raise ListenerFault(f"{before.threads} threads before, {after.threads} after")
    if after.memory_bytes > before.memory_bytes + GROWTH_BYTES_MAX:
        raise ListenerFault(f"{before.memory_bytes:,} bytes before, {after.memory_bytes:,} after")


def soak_listeners(seconds: float, seed: int, listeners: Sequence[str], *, with_tls: bool) -> int:
    """The command: prints what it does, and returns its exit code."""
    # asyncio warns of each write to a connection that the server has closed.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    where = f"{', '.join(listeners)}{', with TLS' if with_tls else ''}"
    print(f"attacks on the listeners ({where}) from seed {seed} on, for {seconds:g} s", flush=True)
    try:
        report = asyncio.run(attack_listeners(seconds, seed, listeners, with_tls=with_tls))
    except ListenerFault as fault:
        print(f"seed {seed}: {fault}")
        return 1
    for name, count in sorted(report.attacks.items()):
        print(f"  {name:32} {count:,} times")
    before, after = report.before, report.after
    messages = ", ".join(f"{count:,} over {name}" for name, count in report.messages.items())
    print(
        f"memory {before.memory_bytes / 2**20:.1f} MiB before, {after.memory_bytes / 2**20:.1f} after; "
        f"handles {before.handles}, {after.handles}; threads {before.threads}, {after.threads}; "
        f"connections {before.connections}, {after.connections}\n"
        f"{sum(report.attacks.values()):,} attacks; messages of the bystanders: {messages}, "
        f"the slowest took {report.slowest_s * 1e3:.0f} ms; nothing broken"
    )
    return 0
