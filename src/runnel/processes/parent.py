"""The parent of a broker of several processes: it holds the directory and the ports, and keeps its children alive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final, Protocol

import msgspec

from runnel.config import ClusterSettings, LogLevel, Settings
from runnel.config.changes import taken_over
from runnel.errors import SettingsError, Unavailable, from_details
from runnel.platform.clock import SystemClock
from runnel.platform.diagnostics import get_logger
from runnel.platform.service_manager import ServiceState, notify
from runnel.platform.signals import handled_signals, hangup_ends
from runnel.platform.tasks import OwnedTasks
from runnel.processes.channel import Channel
from runnel.processes.messages import (
    EndWord,
    Heartbeat,
    Joined,
    Launch,
    NewSettings,
    Reloaded,
    Serving,
    StartFailure,
    ToChild,
    decode_from_child,
)
from runnel.processes.ports import SharedPorts
from runnel.processes.supervisor import (
    AnnounceAll,
    EndSupervision,
    KillChild,
    ReapChild,
    StartChild,
    SupervisionRules,
    Supervisor,
    SupervisorAction,
    TellChild,
    ToldWord,
)

logger = get_logger("runnel")

_NS_PER_SECOND: Final = 1_000_000_000
# A child's last words are read before it is reaped; they are there, unless something else holds its socket.
_LAST_WORDS_SECONDS_MAX: Final = 1.0
# How often a node is declared dead, if the state cannot be written, and the pause between.
_DECLARATIONS_MAX: Final = 5
_DECLARATION_PAUSE_SECONDS: Final = 0.2
# Broker and listeners close after they have drained, which takes a while on a slow disk.
_CLOSING_NS_MAX: Final = 30 * _NS_PER_SECOND
# The parent talks to the service manager, not its children.
_NOT_FOR_CHILDREN: Final = "NOTIFY_SOCKET"


class NodesDirectory(Protocol):
    """The data directory of several nodes: locked, checked as a whole, and with the state that they share."""

    @property
    def recovered(self) -> Sequence[str]:
        """The problems that opening found, as lines for an operator."""
        ...

    def life_of(self, name: str) -> int | None:
        """The incarnation of a node that lives, as far as is known; None: it does not."""
        ...

    async def declare_dead(self, name: str, incarnation: int) -> None:
        """Fence a node whose process has ended. Unavailable: try again."""

    async def close(self) -> None:
        """Record that all nodes have ended in good order, and release the lock."""


class ParentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How a parent starts its children, and what it does for the whole broker."""

    settings: Settings
    count: int
    command: Sequence[str]
    """Begins each child; the node's name and the descriptor of its socket are added."""
    log_format: str
    load: Callable[[], Settings]
    """Reads the settings again."""
    set_log_level: Callable[[LogLevel], None]
    announce: Callable[[Mapping[str, str], Sequence[str]], None]
    """Called once, with the addresses of the listeners and what was found at the opening, when all children serve."""
    open_directory: Callable[[Settings], Awaitable[NodesDirectory]]
    rules: SupervisionRules


class _ChildProcess:
    """One process of a child, and the messages to it."""

    def __init__(self, number: int, life: int) -> None:
        self.number = number
        self.life = life
        self.process: Process | None = None
        self.incarnation: int | None = None
        self._channel: Channel | None = None
        self._unsent: list[ToChild] = []
        self._is_killed = False

    def send(self, message: ToChild) -> None:
        if self._channel is None:
            self._unsent.append(message)
        else:
            self._channel.send(message)

    def kill(self) -> None:
        self._is_killed = True
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def connected(self, channel: Channel, launch: Launch) -> None:
        self._channel = channel
        for message in (launch, *self._unsent):
            channel.send(message)
        self._unsent.clear()

    def started(self, process: Process) -> None:
        self.process = process
        if self._is_killed:
            self.kill()


class Parent:
    """Runs the children until they have ended for good."""

    def __init__(self, setup: ParentSetup) -> None:
        self._setup = setup
        self._settings = setup.settings  # in effect
        self._wanted = setup.settings  # as they were read last
        self._supervisor = Supervisor(setup.count, setup.rules)
        self._children: dict[int, _ChildProcess] = {}
        self._former_ends: dict[int, str] = {}
        self._tasks = OwnedTasks("the parent of the broker's processes")
        self._clock = SystemClock()
        self._ticking: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[EndSupervision] = asyncio.get_running_loop().create_future()
        self._reloading: asyncio.Task[None] | None = None
        self._stop_count = 0
        self._ports: SharedPorts
        self._directory: NodesDirectory

    async def run(self) -> int:
        """Returns the exit code. RunnelError: the broker cannot start."""
        is_end = hangup_ends()
        reactions: dict[int, Callable[[], object]] = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGHUP: self._on_hangup if is_end else self._on_reload,
        }
        with handled_signals(reactions):
            async with AsyncExitStack() as opened:
                self._ports = await SharedPorts.open(self._settings)
                opened.callback(self._ports.close)
                self._directory = await self._setup.open_directory(self._settings)
                opened.push_async_callback(self._directory.close)
                opened.push_async_callback(self._kill_all)
                if self._stop_count:
                    return 0
                self._act(self._supervisor.begin(self._now_ns()))
                end = await self._end
        if end.failure is not None:
            raise from_details(*end.failure, {})
        return end.exit_code

    # --- Signals ---

    def _on_stop(self) -> None:
        self._stop_count += 1
        if not self._children:
            return  # the directory is being opened
        if self._stop_count == 1:
            notify(ServiceState.STOPPING)
            logger.info("shutting down", processes=len(self._children))
            self._ports.close()
        self._act(self._supervisor.stop(self._now_ns()))

    def _on_hangup(self) -> None:
        # A closed terminal may send it twice, from kernel and shell: the second one must not hurry the drain.
        if not self._stop_count:
            self._on_stop()

    def _on_reload(self) -> None:
        if self._reloading is None or self._reloading.done():
            self._reloading = self._tasks.start(self._reload())

    async def _reload(self) -> None:
        try:
            # In a thread: a slow file system must not block the loop.
            self._wanted = await asyncio.to_thread(self._setup.load)
        except SettingsError as error:
            logger.error(  # noqa: TRY400 - a wrong file, not a bug
                "the settings were not reloaded, everything stays as it was", problem=str(error)
            )
            return
        self._settings = taken_over(self._settings, self._wanted)
        self._setup.set_log_level(self._settings.log_level)
        self._act(self._supervisor.reload(self._now_ns()))

    # --- What the supervisor decides ---

    def _now_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _act(self, actions: Sequence[SupervisorAction]) -> None:
        for action in actions:
            self._do(action)
        if self._ticking is not None:
            self._ticking.cancel()
        if not self._end.done():
            delay_s = (self._supervisor.next_tick_ns() - self._now_ns()) / _NS_PER_SECOND
            self._ticking = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._act(self._supervisor.tick(self._now_ns()))

    def _do(self, action: SupervisorAction) -> None:
        match action:
            case StartChild(number, life):
                child = self._children[number] = _ChildProcess(number, life)
                self._tasks.start(self._live(child))
            case TellChild(number, ToldWord.RELOAD):
                self._children[number].send(NewSettings(self._for_child(number, self._wanted)))
            case TellChild(number, word):
                self._children[number].send(EndWord(is_hurried=word is ToldWord.HURRY))
            case KillChild(number, why):
                logger.error("a process is killed", process=self._name(number), why=why)
                self._children[number].kill()
            case ReapChild():
                self._reap(action)
            case AnnounceAll():
                self._setup.announce(self._ports.addresses, self._directory.recovered)
                notify(ServiceState.READY)
            case EndSupervision():
                self._end.set_result(action)

    # --- The life of a child ---

    async def _live(self, child: _ChildProcess) -> None:
        number, life = child.number, child.life
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        child.connected(channel, self._launch(child))
        exit_code = -1
        try:
            reading = self._tasks.start(self._listen_to(child, channel))
            try:
                process = await self._spawn(number, theirs)
            except OSError as error:
                logger.error(  # noqa: TRY400 - the system's fault
                    "a process could not be started",
                    process=self._name(number),
                    problem=str(error),
                )
            else:
                theirs.close()
                child.started(process)
                exit_code = await process.wait()
            theirs.close()
            await asyncio.wait({reading}, timeout=_LAST_WORDS_SECONDS_MAX)
            reading.cancel()
        finally:
            theirs.close()
            await channel.close()
        self._act(self._supervisor.ended(number, life, exit_code, self._now_ns()))

    async def _spawn(self, number: int, theirs: socket.socket) -> Process:
        inherited = [each.fileno() for each in self._ports.sockets.values()]
        environment = {
            name: value for name, value in os.environ.items() if name != _NOT_FOR_CHILDREN
        }
        return await asyncio.create_subprocess_exec(
            *self._setup.command,
            self._name(number),
            str(theirs.fileno()),
            pass_fds=[theirs.fileno(), *inherited],
            stdin=DEVNULL,
            stdout=DEVNULL,
            env=environment,
            # Signals of a terminal go to the parent alone: it passes them on in its own order.
            start_new_session=True,
        )

    def _launch(self, child: _ChildProcess) -> Launch:
        return Launch(
            settings=self._for_child(child.number, self._settings),
            number=child.number,
            life=child.life,
            log_level=self._settings.log_level,
            log_format=self._setup.log_format,
            sockets={name: each.fileno() for name, each in self._ports.sockets.items()},
            grpc_address=self._ports.addresses.get("grpc"),
            former_end=self._former_ends.get(child.number, ""),
        )

    async def _listen_to(self, child: _ChildProcess, channel: Channel) -> None:
        number, life, supervisor = child.number, child.life, self._supervisor
        async for content in channel.receive():
            now_ns = self._now_ns()
            supervisor.heard(number, life, now_ns)
            match decode_from_child(content):
                case Heartbeat():
                    pass
                case Joined(incarnation):
                    child.incarnation = incarnation
                case Serving():
                    self._act(supervisor.serves(number, life, now_ns))
                case Reloaded():
                    self._act(supervisor.reloaded(number, life, now_ns))
                case StartFailure(code, text):
                    supervisor.failed(number, life, (code, text))

    def _reap(self, reaped: ReapChild) -> None:
        number, exit_code = reaped.number, reaped.exit_code
        end = _named_end(exit_code) if reaped.failure is None else reaped.failure[1]
        self._former_ends[number] = end
        name = self._name(number)
        # It may have ended before it could say in which incarnation it had joined.
        incarnation = self._children[number].incarnation or self._directory.life_of(name)
        has_left = reaped.is_expected and exit_code == 0
        if incarnation is not None and not has_left:
            self._tasks.start(self._declare_dead(name, incarnation))
        if reaped.restart_in_ns is not None:
            logger.error(
                "a process has ended and is started again",
                process=self._name(number),
                end=end or "in good order",
                after_ms=reaped.restart_in_ns // 1_000_000,
            )
        elif exit_code != 0 and reaped.failure is None:
            logger.error("a process has ended", process=self._name(number), end=end)

    async def _declare_dead(self, name: str, incarnation: int) -> None:
        """Fence it at once: its shards are free for the others then."""
        for _ in range(_DECLARATIONS_MAX):
            try:
                await self._directory.declare_dead(name, incarnation)
            except Unavailable as error:
                logger.warning(
                    "a node could not be declared dead", process=name, problem=str(error)
                )
                await self._clock.sleep(_DECLARATION_PAUSE_SECONDS)
            else:
                return

    async def _kill_all(self) -> None:
        """Whatever has happened, no child is left."""
        if self._ticking is not None:
            self._ticking.cancel()
        for child in self._children.values():
            child.kill()
        await self._tasks.finish()

    # --- Names ---

    def _name(self, number: int) -> str:
        return node_name(self._settings, number)

    def _for_child(self, number: int, settings: Settings) -> Settings:
        cluster = msgspec.structs.replace(settings.cluster, node=self._name(number))
        return msgspec.structs.replace(settings, cluster=cluster)


def run_parent(setup: ParentSetup) -> int:
    """Run the children as a process; returns the exit code."""

    async def run() -> int:
        return await Parent(setup).run()

    return asyncio.run(run())


def node_name(settings: Settings, number: int) -> str:
    """The name of a child as a node: `node-1` and so on, or the name that was set, with the number."""
    set_name = settings.cluster.node
    base = "node" if set_name == ClusterSettings().node else set_name
    return f"{base}-{number}"


def supervision_rules(settings: Settings) -> SupervisionRules:
    """The usual times, with time for the drains that the settings allow."""
    drain_ns = max(
        settings.native.drain_timeout_ns,
        settings.http.drain_timeout_ns,
        settings.grpc.drain_timeout_ns,
    )
    return SupervisionRules(drain_ns_max=drain_ns + _CLOSING_NS_MAX)


def _named_end(exit_code: int) -> str:
    if exit_code >= 0:
        return "" if exit_code == 0 else f"exit code {exit_code}"
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"
