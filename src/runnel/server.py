"""The broker as a program: builds, starts, drains and stops everything. The only place where the parts are joined."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from runnel.broker.broker import Broker
from runnel.config import IN_MEMORY, Settings
from runnel.errors import SettingsError
from runnel.formats.memory import keep_freed_memory
from runnel.platform.addresses import is_loopback
from runnel.platform.clock import SystemClock
from runnel.platform.diagnostics import get_logger
from runnel.platform.disk import RealDisk
from runnel.platform.extras import has_extra, how_to_install
from runnel.platform.heap import Heap
from runnel.platform.notifying import State, notify
from runnel.platform.tls import TlsFiles
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.listener import Listener as NativeListener
from runnel.reloading import Reloading, hangup_ends
from runnel.security.gate import Gate

logger = get_logger("runnel")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Besides connections and the log's files: the catalogue, locks, the loop's own, and what libraries open.
_OTHER_FILES: Final = 256
# How often it is looked whether memory can be given back; mostly that is one look at /proc.
_HEAP_SECONDS: Final = 2.0
# What is allowed to the group and to others, of a file's permissions.
_OTHERS_BITS: Final = 0o077
# A certificate is looked at so often; asking costs two looks at the file system.
_CERTIFICATES_SECONDS: Final = 1.0


class Listener(Protocol):
    """A door that is open, whatever its protocol."""

    @property
    def address(self) -> str: ...
    @property
    def tls(self) -> TlsFiles | None: ...
    @property
    def connection_count(self) -> int: ...
    async def drain(self) -> bool: ...
    def hurry(self) -> None: ...
    async def close(self) -> None: ...


class Server:
    """An open broker and its doors, by name."""

    def __init__(
        self, settings: Settings, broker: Broker, gate: Gate, doors: Mapping[str, Listener]
    ) -> None:
        self.settings = settings
        self.broker = broker
        self.doors = doors
        self._gate = gate
        self._stop_asked = asyncio.Event()

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where each door listens: `{"native": "127.0.0.1:7470", "http": …}`."""
        return {name: door.address for name, door in self.doors.items()}

    @property
    def connection_count(self) -> int:
        return sum(door.connection_count for door in self.doors.values())

    def stop(self) -> None:
        """Shut down in good order; called again: at once."""
        if self._stop_asked.is_set():
            for door in self.doors.values():
                door.hurry()
        self._stop_asked.set()

    async def wait_stop(self) -> None:
        """Until somebody calls `stop`."""
        await self._stop_asked.wait()

    async def drain(self) -> None:
        """Take nothing new, finish what was accepted, tell the clients, store everything."""
        logger.info("shutting down", connections=self.connection_count)
        drained = await asyncio.gather(*(door.drain() for door in self.doors.values()))
        if not all(drained):
            logger.warning("not everything was finished in time", connections=self.connection_count)
        await self.broker.sync()

    async def reload(self, reloading: Reloading) -> None:
        """Read settings, tokens and certificates again, and take over what can be."""
        self.settings = await reloading.reload(self.settings, self.broker, self._gate)
        self._reload_certificates()

    async def watch_certificates(self) -> None:
        """Use new certificates as soon as their files are replaced, until cancelled."""
        while True:
            await self.broker.clock.sleep(_CERTIFICATES_SECONDS)
            self._reload_certificates()

    def _reload_certificates(self) -> None:
        for name, door in self.doors.items():
            if door.tls is None:
                continue
            try:
                if door.tls.reload():
                    logger.info("a new certificate is in use", door=name)
            except SettingsError as error:
                logger.error("the certificate was not changed", door=name, problem=str(error))  # noqa: TRY400


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator[Server]:
    """Everything that `runnel serve` runs, on this machine's disk and clock; closed at the end, drained or not."""
    clock = SystemClock()
    async with AsyncExitStack() as opened:
        workers = ThreadWorkers(settings.log.writers)
        opened.callback(workers.close)
        directory = None if settings.data == IN_MEMORY else settings.data
        gate = Gate.open(settings, clock)
        # Most of the time that a start takes, and none of it is the loop's: the native door opens meanwhile.
        importing = asyncio.get_running_loop().run_in_executor(None, _import_doors, settings)
        opened.push_async_callback(asyncio.wait, {importing})
        broker = await Broker.open(
            settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers
        )
        opened.push_async_callback(broker.close)
        if directory is not None:
            _warn_of_readers(Path(directory))
        await broker.warn_of_habits("[[topics]]", (rule.match for rule in settings.topics))
        gate.on_token_changed.append(broker.audit.token_changed)
        gate.start()
        opened.push_async_callback(gate.close)
        doors: dict[str, Listener] = {}

        async def open_door(name: str, opening: OpenDoor) -> None:
            doors[name] = await opening(broker, gate, settings)
            opened.push_async_callback(doors[name].close)
            _warn_of(name, doors[name], gate)

        await open_door("native", NativeListener.open)
        for name, opening in await importing:
            await open_door(name, opening)
        server = Server(settings, broker, gate, doors)
        _let_watch(server, gate)
        heap_worker = ThreadWorkers(1, name="runnel-heap")
        opened.callback(heap_worker.close)
        for watch in (
            server.watch_certificates(),
            broker.watching.watch_disk(),
            _give_back_memory(Heap(), heap_worker, clock),
        ):
            watching = asyncio.get_running_loop().create_task(watch)
            opened.push_async_callback(_ended, watching)
        yield server


async def _give_back_memory(heap: Heap, worker: ThreadWorkers, clock: SystemClock) -> None:
    """Return memory that many or large requests took and left, until cancelled.

    In a thread of its own: releasing a GiB takes a tenth of a second.
    """
    while heap.can_release:
        await clock.sleep(_HEAP_SECONDS)
        if released_bytes := await worker.submit(heap.look):
            logger.info("memory that is not needed was given back", bytes=released_bytes)


def _warn_of(name: str, door: Listener, gate: Gate) -> None:
    """What is allowed, and yet nobody should do without knowing."""
    if is_loopback(door.address):
        return
    if not gate.asks:
        logger.warning(
            "whoever reaches this address may read, write and delete everything: allow_remote is set, and nobody is "
            "asked for a token",
            door=name,
            address=door.address,
        )
    elif door.tls is None:
        logger.warning(
            "tokens and messages cross the network in the clear: set tls_certificate and tls_key",
            door=name,
            address=door.address,
        )


def _warn_of_readers(directory: Path) -> None:
    """A directory that the broker makes is private. One that was there may be shared on purpose, and stays as it is."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & _OTHERS_BITS:
        logger.warning(
            "other users of this machine may enter the data directory; `chmod -R go= DIRECTORY` keeps them out",
            directory=str(directory),
            mode=f"{mode:04o}",
        )


def _let_watch(server: Server, gate: Gate) -> None:
    """What only the whole knows becomes part of the metrics."""
    metrics, settings = server.broker.metrics, server.settings
    metrics.add_gauge("connections", "Connections at all doors.", lambda: server.connection_count)
    metrics.add_gauge("tokens", "Tokens that are known.", lambda: gate.token_count)
    metrics.add_counter(
        "tokens_refused",
        "Times that a client showed a wrong token, or none.",
        lambda: gate.refused_count,
    )
    limits = {
        "native": ("native.connections_max", settings.native.connections_max),
        "http": ("http.connections_max", settings.http.connections_max),
        "grpc": ("grpc.calls_max", settings.grpc.calls_max),
    }
    for name, door in server.doors.items():
        server.broker.watching.add_door(name, *limits[name], partial(_connections, door))


def _connections(door: Listener) -> int:
    return door.connection_count


OpenDoor = Callable[[Broker, Gate, Settings], Awaitable[Listener]]


def _import_doors(settings: Settings) -> list[tuple[str, OpenDoor]]:
    """In a thread: the other doors that the settings open, but for those whose extra is not installed."""
    return list(_other_doors(settings))


def _other_doors(settings: Settings) -> Iterator[tuple[str, OpenDoor]]:
    if settings.http.listen is not None:
        if not has_extra("http"):
            logger.info("the HTTP door stays closed; to have it, " + how_to_install("http"))
        else:
            from runnel.protocols.http.app import litestar_app
            from runnel.protocols.http.listener import HttpListener

            litestar_app()  # remembered; making it takes as long as the import
            yield "http", HttpListener.open
    if settings.grpc.listen is not None:
        if not has_extra("grpc"):
            logger.info("the gRPC door stays closed; to have it, " + how_to_install("grpc"))
        else:
            from runnel.protocols.grpc.listener import GrpcListener

            yield "grpc", GrpcListener.open


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def serve(
    settings: Settings,
    *,
    ready: Callable[[Server], None] | None = None,
    reloading: Reloading | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal does not wait for the clients.

    SIGHUP drains too where it means that the terminal was closed; elsewhere the settings are read again.
    """
    signals = 0
    opened: Server | None = None
    reload_asked = asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if opened is not None:
            opened.stop()

    def on_hangup() -> None:
        # A terminal that is closed may say so twice, by its kernel and its shell: that is no hurry.
        if not signals:
            on_signal()

    is_end = reloading is None or hangup_ends()
    reactions: dict[int, Callable[[], object]] = dict.fromkeys(_SIGNALS, on_signal)
    reactions[signal.SIGHUP] = on_hangup if is_end else reload_asked.set
    with _signals(reactions):
        async with open_server(settings) as server:
            opened = server
            for _ in range(signals):  # while it was opening: a recovery can take its time
                server.stop()
            if ready is not None:
                ready(server)
            notify(State.READY)
            async with AsyncExitStack() as tasks:
                if reloading is not None:
                    watch = _reload_when_asked(server, reloading, reload_asked)
                    watching = asyncio.get_running_loop().create_task(watch)
                    tasks.push_async_callback(_ended, watching)
                await server.wait_stop()
            notify(State.STOPPING)
            await server.drain()


async def _reload_when_asked(server: Server, reloading: Reloading, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await server.reload(reloading)
        except Exception:
            # A bug: but the broker goes on serving with what it has.
            logger.exception("the settings could not be reloaded")


def run(
    settings: Settings,
    *,
    ready: Callable[[Server], None] | None = None,
    reloading: Reloading | None = None,
) -> None:
    """`serve`, on the quickest loop there is, in a process of its own."""
    _allow_files(settings)
    keep_freed_memory()

    def begin(server: Server) -> None:
        # What is there now stays for good. Were it looked through again and again for what nobody needs any more,
        # every such look would hold up all messages for tens of milliseconds.
        gc.collect()
        gc.freeze()
        gc.enable()
        server.broker.topic_making.after_step = _keep_for_good
        if ready is not None:
            ready(server)

    _run_loop(serve(settings, ready=begin, reloading=reloading))


def _keep_for_good() -> None:
    """Spare the garbage collector many new topics: looking through 120,000 of them held the loop for 260 ms."""
    gc.collect(1)  # young garbage must not be kept
    gc.freeze()


def _allow_files(settings: Settings) -> None:
    """Raise the process's limit of open files to what the settings allow clients and logs to open."""
    wanted = (
        settings.native.connections_max
        + settings.http.connections_max
        + settings.grpc.calls_max
        + settings.limits.open_files_max
        + _OTHER_FILES
    )
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
def _signals(reactions: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Call these for their signals, instead of whatever was called before."""
    loop = asyncio.get_running_loop()
    for number, react in reactions.items():
        loop.add_signal_handler(number, react)
    try:
        yield
    finally:
        for number in reactions:
            loop.remove_signal_handler(number)
