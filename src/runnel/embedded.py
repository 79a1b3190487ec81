"""Runs Runnel inside a program or a test: a broker with in-process connections, or the log alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from os import PathLike, fspath
from typing import Any, Final, TypeVar

import msgspec

from runnel.broker.access import MakeAccess, local_access
from runnel.broker.broker import Broker as BrokerCore
from runnel.broker.log_maintenance import LogMaintenance
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.client import Opening, open_bus
from runnel.client.connection import Handle
from runnel.cluster import ClusterNode
from runnel.config import IN_MEMORY, Keep, Settings
from runnel.formats.wire import Route
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Store
from runnel.platform.clock import Clock, SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.listener import Listener
from runnel.protocols.native.native_server import NativeServer
from runnel.relay import Relays, access_maker, dialler
from runnel.security.authenticator import Authenticator
from runnel.topics.policies import Policies

MEMORY: Final = IN_MEMORY

_B = TypeVar("_B", bound="Broker")


class Broker:
    """A broker in this event loop: `async with Broker.open("memory:") as broker, broker.connect() as bus`."""

    def __init__(
        self, core: BrokerCore, authenticator: Authenticator, server: NativeServer, clock: Clock
    ) -> None:
        self._core = core
        self._authenticator = authenticator
        self._server = server
        self._clock = clock
        self._servers = [server]

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: str | PathLike[str] | Settings = MEMORY,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[Broker]:
        """Open a broker: "memory:", a data directory, or settings, whose `data` is one of the two.

        With "memory:" the broker does not touch the disk: it keeps the topics of `keep = "disk"` in memory. `settings`
        adds rules and limits to a directory; `clock` is for tests (`runnel.testing`).
        """
        if isinstance(where, Settings):
            settings = where
        else:
            settings = msgspec.structs.replace(settings or Settings(), data=fspath(where))
        directory = None if settings.data == MEMORY else settings.data
        async with _opened(cls, settings, directory, clock or SystemClock()) as broker:
            yield broker

    def connect(self, *, name: str | None = None, deadline_s: float | None = 30) -> Opening:
        """Connect a client to this broker, without a socket: `async with broker.connect() as bus`."""

        async def dial(make_protocol: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
            return self._server.connect(make_protocol())

        timers = None if isinstance(self._clock, SystemClock) else ClockTimers(self._clock)
        return open_bus(dial, timers=timers, name=name, deadline_s=deadline_s)

    @asynccontextmanager
    async def listen(self, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
        """Listen for other processes as long as the `async with` lasts; yields the URL to connect to."""
        settings = self._core.settings
        native = msgspec.structs.replace(settings.native, listen=address)
        settings = msgspec.structs.replace(settings, native=native)
        listener = await Listener.open(
            self._core, self._authenticator, settings, self._servers[0].make_access
        )
        self._servers.append(listener.server)
        try:
            yield f"runnel://{listener.address}"
        finally:
            self._servers.remove(listener.server)
            await listener.close()

    def statistics(self) -> dict[str, object]:
        """The current content of `!system/metrics/broker`."""
        return self._core.statistics()

    async def sync(self) -> None:
        """Wait until all messages published so far are stored."""
        await self._core.sync()


class NodeBroker(Broker):
    """One of several brokers that serve a directory, in this event loop (`runnel.testing.open_cluster`)."""

    @classmethod
    @asynccontextmanager
    async def open_node(
        cls, settings: Settings, node: ClusterNode, clock: Clock
    ) -> AsyncIterator[NodeBroker]:
        """Open a broker of the directory `settings.data`. It serves nothing before `node.start`."""
        async with _opened(cls, settings, settings.data, clock, node) as broker:
            yield broker

    @property
    def make_access(self) -> MakeAccess:
        """How listeners of other protocols give access to this broker."""
        return self._servers[0].make_access

    def routes(self, topics: Sequence[str]) -> list[Route]:
        """Where messages of these topics go, whether the topics exist or not."""
        return self._core.routes(topics)

    def abort_connections(self) -> None:
        """Break all connections, as the end of a process does: nothing is counted as failed for it."""
        self._core.consumer_groups.abandon()
        for server in self._servers:
            for connection in list(server.connections):
                connection.abort()


@asynccontextmanager
async def _opened(
    kind: type[_B],
    settings: Settings,
    directory: str | None,
    clock: Clock,
    node: ClusterNode | None = None,
) -> AsyncIterator[_B]:
    workers = ThreadWorkers(settings.log.writers)
    try:
        core = await BrokerCore.open(
            settings,
            directory=directory,
            disk=RealDisk(),
            clock=clock,
            workers=workers,
            node=node,
        )
        try:
            authenticator = Authenticator.open(settings, clock)
            authenticator.on_token_changed.append(core.audit.token_changed)
            authenticator.start()
            relays = None if node is None else Relays(core, node, dialler())
            make_access = local_access(core) if relays is None else access_maker(relays)
            server = NativeServer(core, settings, authenticator, make_access)
            try:
                yield kind(core, authenticator, server, clock)
            finally:
                await server.close()
                if relays is not None:
                    await relays.close()
                await authenticator.close()
        finally:
            await core.close()
    finally:
        workers.close()


class ClockTimers:
    """Client timers that use the broker's clock, so that a test's clock also controls lingering."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time_ns = clock.time_ns
        self.monotonic_ns = clock.monotonic_ns

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle:
        async def call() -> None:
            await self._clock.sleep(seconds)
            callback()

        return asyncio.get_running_loop().create_task(call())


@asynccontextmanager
async def open_log(
    directory: str | PathLike[str], settings: Settings | None = None
) -> AsyncIterator[Store]:
    """Open the log of a data directory, which is created if it is missing; the `async with` closes it.

    Retention runs every `log.retention_interval` while the log is open. The log takes topics that are kept on disk;
    topics with `keep = "memory"` or `"none"` need a broker.
    """
    settings = settings or Settings()
    clock = SystemClock()
    workers = ThreadWorkers(settings.log.writers)
    try:
        log = await DiskLog.open(
            directory,
            settings=settings,
            policies=Policies(settings.topics, partitions_max=settings.limits.partitions_max),
            disk=RealDisk(),
            clock=clock,
            workers=workers,
        )
        logs = {Keep.DISK.value: log}
        statistics = StoreStatistics(logs, clock)
        maintenance = LogMaintenance(settings, clock, logs, statistics, Events(clock))
        maintenance_task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(
            maintenance.run()
        )
        try:
            yield log
        finally:
            maintenance_task.cancel()
            await asyncio.wait({maintenance_task})
            await log.close()
    finally:
        workers.close()
