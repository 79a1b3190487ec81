"""The broker as a program: builds, starts, drains and stops everything. The only place where the parts are joined."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import Any, Final

from runnel.broker.broker import Broker
from runnel.config import IN_MEMORY, Settings
from runnel.doors.native.listener import Listener
from runnel.world.clock import SystemClock
from runnel.world.diagnostics import get_logger
from runnel.world.disk import RealDisk
from runnel.world.workers import ThreadWorkers

logger = get_logger("runnel")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Besides connections and the log's files: the catalogue, locks, the loop's own, and what libraries open.
_OTHER_FILES: Final = 256


class Server:
    """An open broker and its doors."""

    def __init__(self, settings: Settings, broker: Broker, native: Listener) -> None:
        self.settings = settings
        self.broker = broker
        self.native = native
        self._stop_asked = asyncio.Event()

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where each door listens: `{"native": "127.0.0.1:7470"}`."""
        return {"native": self.native.address}

    def stop(self) -> None:
        """Shut down in good order; called again: at once."""
        if self._stop_asked.is_set():
            self.native.hurry()
        self._stop_asked.set()

    async def wait_stop(self) -> None:
        """Until somebody calls `stop`."""
        await self._stop_asked.wait()

    async def drain(self) -> None:
        """Take nothing new, finish what was accepted, tell the clients, store everything."""
        logger.info("shutting down", connections=len(self.native.door.connections))
        if not await self.native.drain():
            logger.warning(
                "not everything was finished in time", connections=len(self.native.door.connections)
            )
        await self.broker.sync()


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator[Server]:
    """Everything that `runnel serve` runs, on this machine's disk and clock; closed at the end, drained or not."""
    clock = SystemClock()
    workers = ThreadWorkers(settings.log.writers)
    try:
        directory = None if settings.data == IN_MEMORY else settings.data
        broker = await Broker.open(
            settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers
        )
        try:
            native = await Listener.open(broker, settings)
            broker.metrics.add_gauge(
                "connections", "Connections at all doors.", lambda: len(native.door.connections)
            )
            try:
                yield Server(settings, broker, native)
            finally:
                await native.close()
        finally:
            await broker.close()
    finally:
        workers.close()


async def serve(settings: Settings, *, ready: Callable[[Server], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal does not wait for the clients."""
    signals = 0
    opened: Server | None = None

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if opened is not None:
            opened.stop()

    with _signals(on_signal):
        async with open_server(settings) as server:
            opened = server
            for _ in range(signals):  # while it was opening: a recovery can take its time
                server.stop()
            if ready is not None:
                ready(server)
            await server.wait_stop()
            await server.drain()


def run(settings: Settings, *, ready: Callable[[Server], None] | None = None) -> None:
    """`serve`, on the quickest loop there is, in a process of its own."""
    _allow_files(settings)
    _run_loop(serve(settings, ready=ready))


def _allow_files(settings: Settings) -> None:
    """Raise the process's limit of open files to what the settings allow clients and logs to open."""
    wanted = settings.native.connections_max + settings.limits.open_files_max + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "fewer files may be open than the settings allow connections: raise the limit (ulimit -n)",
            files_max=allowed,
            files_wanted=wanted,
        )


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    if find_spec("uvloop") is None:
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


@contextmanager
def _signals(react: Callable[[], object]) -> Iterator[None]:
    """Call `react` for SIGTERM and SIGINT, instead of whatever was called before."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, react)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
