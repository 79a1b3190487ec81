"""The broker as a program: builds, starts, drains and stops everything. Only this module wires the parts together."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import stat
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

from runnel.broker.access import MakeAccess, local_access
from runnel.broker.broker import Broker
from runnel.broker.monitoring.events import EventKind
from runnel.cluster import ClusterNode
from runnel.cluster.sqlite import SqliteState
from runnel.config import IN_MEMORY, Settings
from runnel.errors import SettingsError
from runnel.formats.memory import keep_freed_memory
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.log.segments.paths import CLUSTER_FILE
from runnel.platform.addresses import is_loopback
from runnel.platform.clock import Clock, SystemClock
from runnel.platform.diagnostics import get_logger
from runnel.platform.disk import RealDisk
from runnel.platform.extras import has_extra, how_to_install
from runnel.platform.heap import Heap
from runnel.platform.service_manager import ServiceState, notify
from runnel.platform.signals import handled_signals, hangup_ends
from runnel.platform.tls import TlsFiles
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.listener import Listener as NativeListener
from runnel.relay import Relays, access_maker, dialler
from runnel.security.authenticator import Authenticator
from runnel.settings_reload import SettingsReload

if TYPE_CHECKING:
    from runnel.protocols.grpc.listener import GrpcListener
    from runnel.protocols.http.listener import HttpListener

logger = get_logger("runnel")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Files besides connections and segments: the catalogue, locks, the event loop's own, those of libraries.
_OTHER_FILES: Final = 256
# How often the broker checks whether it can release memory; mostly that is one read of /proc.
_HEAP_SECONDS: Final = 2.0
# Permissions of the group and of others.
_OTHERS_BITS: Final = 0o077
# How often certificates are checked; a check is two calls of stat.
_CERTIFICATES_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class ChildParts:
    """What a server has from its parent, if it is one of several processes that serve together."""

    native: Sequence[socket]
    """The listening socket that it shares with the other processes, and its own."""
    http: socket | None
    """The shared one; None: no HTTP listener."""
    grpc_address: str | None
    """Where it listens for gRPC beside the other processes; None: no gRPC listener."""
    warns: bool
    """Whether it logs what is wrong with the settings: one of the processes does, once."""
    restarts: int
    """How often this process was started again since its parent began."""
    former_end: str
    """How the process before this one ended; "": in good order, or there was none."""

    @property
    def own_address(self) -> str:
        """Its own listener, as other nodes name it to clients: at the host that the client has reached."""
        return f":{self.native[-1].getsockname()[1]}"


class ServerListener(Protocol):
    """An open listener of any protocol: native, HTTP or gRPC."""

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
    """An open broker and its listeners, by name."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        authenticator: Authenticator,
        listeners: Mapping[str, ServerListener],
        node: ClusterNode | None = None,
    ) -> None:
        self.settings = settings
        self.node = node
        self.broker = broker
        self.listeners = listeners
        self._authenticator = authenticator
        self._stop_asked = asyncio.Event()

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where each listener listens: `{"native": "127.0.0.1:7470", "http": …}`."""
        return {name: listener.address for name, listener in self.listeners.items()}

    @property
    def connection_count(self) -> int:
        return sum(listener.connection_count for listener in self.listeners.values())

    def stop(self) -> None:
        """Begin a graceful shutdown; a second call ends it at once."""
        if self._stop_asked.is_set():
            for listener in self.listeners.values():
                listener.hurry()
        self._stop_asked.set()

    async def wait_stop(self) -> None:
        """Wait until `stop` is called."""
        await self._stop_asked.wait()

    async def drain(self) -> None:
        """Refuse new requests, finish accepted ones, tell the clients, store everything."""
        if self.node is not None:
            self.node.take_no_more()
        logger.info("shutting down", connections=self.connection_count)
        drained = await asyncio.gather(*(listener.drain() for listener in self.listeners.values()))
        if not all(drained):
            logger.warning("not everything was finished in time", connections=self.connection_count)
        await self.broker.sync()

    async def reload(self, settings_reload: SettingsReload) -> None:
        """Read settings, tokens and certificates again, and apply those that can change at run time."""
        self.settings = await settings_reload.reload(
            self.settings, self.broker, self._authenticator
        )
        self._reload_certificates()

    async def watch_certificates(self) -> None:
        """Load new certificates when their files are replaced, until cancelled."""
        while True:
            await self.broker.clock.sleep(_CERTIFICATES_SECONDS)
            self._reload_certificates()

    def _reload_certificates(self) -> None:
        for name, listener in self.listeners.items():
            if listener.tls is None:
                continue
            try:
                if listener.tls.reload():
                    logger.info("a new certificate is in use", listener=name)
            except SettingsError as error:
                logger.error("the certificate was not changed", listener=name, problem=str(error))  # noqa: TRY400


@asynccontextmanager
async def open_server(settings: Settings, child: ChildParts | None = None) -> AsyncIterator[Server]:
    """Open what `runnel serve` runs, on this machine's disk and clock; close it at the end, drained or not.

    `child`: it is one of several processes, and its parent has opened the ports.
    """
    clock = SystemClock()
    warns = child is None or child.warns
    async with AsyncExitStack() as opened:
        workers = ThreadWorkers(settings.log.writers)
        opened.callback(workers.close)
        directory = None if settings.data == IN_MEMORY else settings.data
        authenticator = Authenticator.open(settings, clock)
        # Imports take most of the start, in a thread: the native listener opens meanwhile.
        importing = asyncio.get_running_loop().run_in_executor(
            None, _import_listeners, settings, child
        )
        opened.push_async_callback(asyncio.wait, {importing})
        node = None if child is None else await _open_node(settings, clock, opened)
        broker = await Broker.open(
            settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers, node=node
        )
        opened.push_async_callback(broker.close)
        if directory is not None and warns:
            _warn_of_readers(Path(directory))
        if warns:
            await broker.warn_of_habits("[[topics]]", (rule.match for rule in settings.topics))
        authenticator.on_token_changed.append(broker.audit.token_changed)
        authenticator.start()
        opened.push_async_callback(authenticator.close)
        listeners: dict[str, ServerListener] = {}
        make_access = local_access(broker)
        if child is not None and node is not None:
            own_host = str(child.native[-1].getsockname()[0])
            relays = Relays(broker, node, dialler(own_host, settings.native.tls_certificate))
            opened.push_async_callback(relays.close)
            make_access = access_maker(relays)
            # Clients that connect now wait in the socket's queue. Later, they would meet a node that knows no others.
            await node.start(child.own_address)
            if child.former_end:
                broker.events.emit(EventKind.NODE_RESTARTED, node.name, end=child.former_end)

        async def start_listener(name: str, open_listener: OpenListener) -> None:
            listeners[name] = await open_listener(broker, authenticator, settings, make_access)
            opened.push_async_callback(listeners[name].close)
            if warns:
                _warn_of(name, listeners[name], authenticator)

        inherited = () if child is None else child.native
        await start_listener("native", partial(NativeListener.open, inherited=inherited))
        for name, open_listener in await importing:
            await start_listener(name, open_listener)
        server = Server(settings, broker, authenticator, listeners, node)
        _register_gauges(server, authenticator, restarts=0 if child is None else child.restarts)
        heap_worker = ThreadWorkers(1, name="runnel-heap")
        opened.callback(heap_worker.close)
        for watch in (
            server.watch_certificates(),
            broker.monitor.watch_disk(),
            _give_back_memory(Heap(), heap_worker, clock),
        ):
            watching = asyncio.get_running_loop().create_task(watch)
            opened.push_async_callback(_cancel, watching)
        yield server


async def _open_node(settings: Settings, clock: Clock, opened: AsyncExitStack) -> ClusterNode:
    """This process among the nodes that serve the data directory. The broker stops it, then its state is closed."""
    database = await ClusterDatabase.open(f"{settings.data}/{CLUSTER_FILE}")
    opened.push_async_callback(database.close)
    state = await SqliteState.open(database, settings.cluster.node, clock)
    opened.push_async_callback(state.close)
    metadata = SqliteMetadata(database, settings.cluster.node)
    return ClusterNode(state, metadata, clock, is_balanced=settings.cluster.balance)


async def _give_back_memory(heap: Heap, worker: ThreadWorkers, clock: SystemClock) -> None:
    """Release memory that large requests no longer need, until cancelled.

    A thread of its own does it: releasing a GiB takes a tenth of a second.
    """
    while heap.can_release:
        await clock.sleep(_HEAP_SECONDS)
        if released_bytes := await worker.submit(heap.look):
            logger.info("unused memory was released", bytes=released_bytes)


def _warn_of(name: str, listener: ServerListener, authenticator: Authenticator) -> None:
    """Warn of settings that are allowed but dangerous: no authentication, no TLS."""
    if is_loopback(listener.address):
        return
    if not authenticator.asks:
        logger.warning(
            "any client that reaches this address may read, write and delete everything: allow_remote is set, and no "
            "token is required",
            listener=name,
            address=listener.address,
        )
    elif listener.tls is None:
        logger.warning(
            "tokens and messages cross the network in the clear: set tls_certificate and tls_key",
            listener=name,
            address=listener.address,
        )


def _warn_of_readers(directory: Path) -> None:
    """Warn if other users may enter the data directory.

    A directory that existed before keeps its permissions: it may be shared on purpose.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & _OTHERS_BITS:
        logger.warning(
            "other users of this machine may enter the data directory; `chmod -R go= DIRECTORY` keeps them out",
            directory=str(directory),
            mode=f"{mode:04o}",
        )


def _register_gauges(server: Server, authenticator: Authenticator, *, restarts: int) -> None:
    """Register gauges that need the whole server: connections, tokens, limits of each listener."""
    metrics, settings = server.broker.metrics, server.settings
    metrics.add_gauge(
        "connections", "Connections of all listeners.", lambda: server.connection_count
    )
    metrics.add_counter(
        "restarts",
        "Times that this process was started again since its parent began.",
        lambda: restarts,
    )
    metrics.add_gauge("tokens", "Tokens in the file of tokens.", lambda: authenticator.token_count)
    metrics.add_counter(
        "tokens_refused",
        "Times that a client sent a wrong token, or none.",
        lambda: authenticator.refused_count,
    )
    limits = {
        "native": ("native.connections_max", settings.native.connections_max),
        "http": ("http.connections_max", settings.http.connections_max),
        "grpc": ("grpc.calls_max", settings.grpc.calls_max),
    }
    for name, listener in server.listeners.items():
        server.broker.monitor.add_listener(name, *limits[name], partial(_connections, listener))


def _connections(listener: ServerListener) -> int:
    return listener.connection_count


OpenListener = Callable[[Broker, Authenticator, Settings, MakeAccess], Awaitable[ServerListener]]


def _import_listeners(
    settings: Settings, child: ChildParts | None
) -> list[tuple[str, OpenListener]]:
    """Import, in a thread, the other listeners that the settings open and whose extras are installed."""
    return list(_other_listeners(settings) if child is None else _shared_listeners(child))


def _shared_listeners(child: ChildParts) -> Iterator[tuple[str, OpenListener]]:
    if child.http is not None:
        yield "http", partial(_http_listener().open, inherited=child.http)
    if child.grpc_address is not None:
        yield "grpc", partial(_grpc_listener().open, shared_address=child.grpc_address)


def _other_listeners(settings: Settings) -> Iterator[tuple[str, OpenListener]]:
    if settings.http.listen is not None:
        if not has_extra("http"):
            logger.info("the HTTP listener stays closed; to open it, " + how_to_install("http"))
        else:
            yield "http", _http_listener().open
    if settings.grpc.listen is not None:
        if not has_extra("grpc"):
            logger.info("the gRPC listener stays closed; to open it, " + how_to_install("grpc"))
        else:
            yield "grpc", _grpc_listener().open


def _http_listener() -> type[HttpListener]:
    from runnel.protocols.http.app import litestar_app
    from runnel.protocols.http.listener import HttpListener

    litestar_app()  # cached; making it takes as long as the import
    return HttpListener


def _grpc_listener() -> type[GrpcListener]:
    from runnel.protocols.grpc.listener import GrpcListener

    return GrpcListener


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def serve(
    settings: Settings,
    *,
    ready: Callable[[Server], None] | None = None,
    settings_reload: SettingsReload | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal does not wait for the clients.

    SIGHUP reloads the settings. Where it means that the terminal was closed, it drains as SIGTERM does.
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
        # A closed terminal may send it twice, from kernel and shell: the second one must not hurry the drain.
        if not signals:
            on_signal()

    is_end = settings_reload is None or hangup_ends()
    reactions: dict[int, Callable[[], object]] = dict.fromkeys(_SIGNALS, on_signal)
    reactions[signal.SIGHUP] = on_hangup if is_end else reload_asked.set
    with handled_signals(reactions):
        async with open_server(settings) as server:
            opened = server
            for _ in range(signals):  # those that came during the opening: a recovery may take long
                server.stop()
            if ready is not None:
                ready(server)
            notify(ServiceState.READY)
            async with AsyncExitStack() as tasks:
                if settings_reload is not None:
                    watch = _reload_when_asked(server, settings_reload, reload_asked)
                    watching = asyncio.get_running_loop().create_task(watch)
                    tasks.push_async_callback(_cancel, watching)
                await server.wait_stop()
            notify(ServiceState.STOPPING)
            await server.drain()


async def _reload_when_asked(
    server: Server, settings_reload: SettingsReload, asked: asyncio.Event
) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await server.reload(settings_reload)
        except Exception:
            # A bug, but the broker keeps serving with the settings it has.
            logger.exception("the settings could not be reloaded")


def run(
    settings: Settings,
    *,
    ready: Callable[[Server], None] | None = None,
    settings_reload: SettingsReload | None = None,
) -> None:
    """Run `serve` as a process, on uvloop if it is installed."""
    prepare_process(settings)

    def begin(server: Server) -> None:
        spare_collector(server)
        if ready is not None:
            ready(server)

    run_loop(serve(settings, ready=begin, settings_reload=settings_reload))


def prepare_process(settings: Settings) -> None:
    """Set up the process that will serve: its open files and its memory."""
    _allow_files(settings)
    keep_freed_memory()


def spare_collector(server: Server) -> None:
    """Keep the garbage collector away from everything that there is once the server is open, and let it begin.

    All objects of now live as long as the process. If the garbage collector kept visiting them, each visit would hold
    up all messages for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    server.broker.topic_creator.after_step = _keep_for_good


def _keep_for_good() -> None:
    """Keep the garbage collector away from new topics: visiting 120,000 of them held the loop for 260 ms."""
    gc.collect(1)  # or freezing would keep young garbage
    gc.freeze()


def _allow_files(settings: Settings) -> None:
    """Raise the process's limit of open files to what the settings allow."""
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


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run this on uvloop, if it is installed."""
    if find_spec("uvloop") is None:
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)
