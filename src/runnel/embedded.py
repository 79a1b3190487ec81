"""Runnel inside a program or a test: the broker with its in-process connections, or the log alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from os import PathLike, fspath
from typing import Any, Final

import msgspec

from runnel.broker.broker import Broker as BrokerCore
from runnel.broker.log_maintenance import LogMaintenance
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.client import Opening, open_bus
from runnel.client.connection import Handle
from runnel.config import IN_MEMORY, Settings
from runnel.log.disk.disk_log import DiskLog
from runnel.platform.clock import Clock, SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.listener import Listener
from runnel.protocols.native.native_server import NativeServer
from runnel.security.authenticator import Authenticator
from runnel.topics.policies import Policies

MEMORY: Final = IN_MEMORY


class Broker:
    """A broker in this event loop: `async with Broker.open("memory:") as broker, broker.connect() as bus`."""

    def __init__(
        self, core: BrokerCore, authenticator: Authenticator, server: NativeServer, clock: Clock
    ) -> None:
        self._core = core
        self._authenticator = authenticator
        self._server = server
        self._clock = clock

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

        With "memory:" nothing touches the disk: topics that would be kept there are kept in memory. `settings` are
        for rules and limits beside a directory; `clock` is for tests (`runnel.testing`).
        """
        if isinstance(where, Settings):
            settings = where
        else:
            settings = msgspec.structs.replace(settings or Settings(), data=fspath(where))
        directory = None if settings.data == MEMORY else settings.data
        clock = clock or SystemClock()
        workers = ThreadWorkers(settings.log.writers)
        try:
            core = await BrokerCore.open(
                settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers
            )
            try:
                authenticator = Authenticator.open(settings, clock)
                authenticator.on_token_changed.append(core.audit.token_changed)
                authenticator.start()
                server = NativeServer(core, settings, authenticator)
                try:
                    yield cls(core, authenticator, server, clock)
                finally:
                    await server.close()
                    await authenticator.close()
            finally:
                await core.close()
        finally:
            workers.close()

    def connect(self, *, name: str | None = None, deadline_s: float | None = 30) -> Opening:
        """A client of this broker, without a socket: `async with broker.connect() as bus`."""

        async def dial(make_protocol: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
            return self._server.connect(make_protocol())

        timers = None if isinstance(self._clock, SystemClock) else ClockTimers(self._clock)
        return open_bus(dial, timers=timers, name=name, deadline_s=deadline_s)

    @asynccontextmanager
    async def listen(self, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
        """Let other processes in: the URL to connect to, for as long as the `async with` lasts."""
        settings = self._core.settings
        native = msgspec.structs.replace(settings.native, listen=address)
        settings = msgspec.structs.replace(settings, native=native)
        listener = await Listener.open(self._core, self._authenticator, settings)
        try:
            yield f"runnel://{listener.address}"
        finally:
            await listener.close()

    def statistics(self) -> dict[str, object]:
        """What `!system/metrics/broker` tells, as of now."""
        return self._core.statistics()

    async def sync(self) -> None:
        """Until everything published so far is stored."""
        await self._core.sync()


class ClockTimers:
    """A client's timers that go by the broker's clock, so that lingering obeys the clock of a test."""

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
) -> AsyncIterator[DiskLog]:
    """The log of a data directory, made if there is none, closed at the end of the `async with`.

    Retention is applied every `log.retention_interval` as long as it is open. It takes topics that are kept
    on disk; those with `keep = "memory"` or `"none"` need a broker.
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
        statistics = StoreStatistics({"disk": log}, clock)
        house = LogMaintenance(settings, clock, {"disk": log}, statistics, Events(clock))
        keeper: asyncio.Task[Any] = asyncio.get_running_loop().create_task(house.run())
        try:
            yield log
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await log.close()
    finally:
        workers.close()
