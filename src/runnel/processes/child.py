"""One of several processes of a broker: serves with what its parent has opened, and ends when the parent says so."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from socket import socket
from typing import Final

from runnel.cluster import ClusterNode
from runnel.config import LogLevel, Settings
from runnel.errors import RunnelError, Unavailable
from runnel.platform.diagnostics import get_logger
from runnel.platform.listening_socket import inherited_socket, own_socket_beside
from runnel.platform.signals import handled_signals
from runnel.platform.tasks import OwnedTasks
from runnel.processes.channel import Channel, receive_blocking
from runnel.processes.messages import (
    EndWord,
    Heartbeat,
    Joined,
    Launch,
    NewSettings,
    Reloaded,
    Serving,
    StartFailure,
    decode_to_child,
)
from runnel.server import (
    ChildParts,
    Server,
    open_server,
    prepare_process,
    run_loop,
    spare_collector,
)
from runnel.settings_reload import SettingsReload

logger = get_logger("runnel")

_HEARTBEAT_SECONDS: Final = 1.0
# How long a process that ends alone waits for the others to take its shards. The rest of them moves as after a crash.
_LEAVE_SECONDS_MAX: Final = 5.0


def receive_launch(end: socket) -> Launch | None:
    """What the parent says first; None: it has ended before."""
    content = receive_blocking(end)
    if content is None:
        return None
    launch = decode_to_child(content)
    assert isinstance(launch, Launch)
    return launch


def run_child(end: socket, launch: Launch, set_log_level: Callable[[LogLevel], None]) -> int:
    """Serve until the parent says so, or has ended. Returns the exit code."""
    prepare_process(launch.settings)
    child = _Child(launch, set_log_level)
    run_loop(child.run(end))
    return child.exit_code


class _Child:
    """The state of this process."""

    def __init__(self, launch: Launch, set_log_level: Callable[[LogLevel], None]) -> None:
        self.exit_code = 1
        self._launch = launch
        self._set_log_level = set_log_level
        self._tasks = OwnedTasks("the child of the broker's parent")
        self._server: Server | None = None
        self._is_ending = False
        self._is_hurried = False
        self._is_fenced = False
        self._signals = 0
        self._new_settings: asyncio.Queue[Settings] = asyncio.Queue()

    async def run(self, end: socket) -> None:
        channel = await Channel.open(end)
        # The parent passes on what its own signals mean. SIGTERM may come from a service manager to all processes.
        reactions: dict[int, Callable[[], object]] = {
            signal.SIGTERM: self._on_terminate,
            signal.SIGINT: _ignore,
            signal.SIGHUP: _ignore,
        }
        with handled_signals(reactions):
            self._tasks.start(_beat(channel))
            self._tasks.start(self._listen(channel))
            try:
                await self._serve(channel)
                self.exit_code = int(self._is_fenced)
            except RunnelError as error:
                channel.send(StartFailure(error.code, str(error)))
            finally:
                self._tasks.cancel()
                await self._tasks.finish()
                await channel.close()

    async def _serve(self, channel: Channel) -> None:
        launch = self._launch
        async with AsyncExitStack() as opened:
            server = await opened.enter_async_context(
                open_server(launch.settings, _inherited_parts(launch))
            )
            assert server.node is not None
            channel.send(Joined(_incarnation(server.node), server.node.address))
            server.node.on_fenced = self._on_fenced
            self._server = server
            self._pass_on_end()
            spare_collector(server)
            self._tasks.start(self._reload(server, channel))
            channel.send(Serving(list(server.broker.recovered)))
            await server.wait_stop()
            await server.drain()

    # --- Words of the parent ---

    async def _listen(self, channel: Channel) -> None:
        async for content in channel.receive():
            match decode_to_child(content):
                case EndWord(is_hurried):
                    self._end(is_hurried=is_hurried)
                case NewSettings(settings):
                    self._new_settings.put_nowait(settings)
                case Launch():
                    raise AssertionError("a child is launched once")
        if not self._is_ending:
            logger.error("the parent has ended, so this process does too")
            self._end(is_hurried=False)

    async def _reload(self, server: Server, channel: Channel) -> None:
        while True:
            settings = await self._new_settings.get()
            try:
                await server.reload(SettingsReload(lambda: settings, self._set_log_level))  # noqa: B023 - used at once
            except Exception:
                # A bug, but the broker keeps serving with the settings it has.
                logger.exception("the settings could not be reloaded")
            channel.send(Reloaded())

    # --- The end ---

    def _on_fenced(self) -> None:
        """This life is over: the parent begins another one."""
        logger.error("another process has declared this node dead, so it ends")
        self._is_fenced = True
        self._end(is_hurried=True)

    def _on_terminate(self) -> None:
        """SIGTERM for this process alone, unless the parent's word comes a moment later: it has got it too."""
        self._signals += 1
        if self._signals > 1 or self._server is None:
            self._end(is_hurried=self._signals > 1)
        elif not self._is_ending:
            self._tasks.start(self._leave(self._server))

    async def _leave(self, server: Server) -> None:
        """Give the shards to the others while clients are still served, and end."""
        assert server.node is not None
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(_LEAVE_SECONDS_MAX):
                await server.node.drain()
        self._end(is_hurried=False)

    def _end(self, *, is_hurried: bool) -> None:
        """Drain, or stop draining. May be called while the server is being opened."""
        is_first, was_hurried = not self._is_ending, self._is_hurried
        self._is_ending = True
        self._is_hurried = was_hurried or is_hurried
        if self._server is not None:
            if is_first:
                self._server.stop()
            if self._is_hurried and not was_hurried:
                self._server.stop()

    def _pass_on_end(self) -> None:
        """Tell the server, which is open now, what was said meanwhile."""
        assert self._server is not None
        for is_said in (self._is_ending, self._is_hurried):
            if is_said:
                self._server.stop()


def _incarnation(node: ClusterNode) -> int:
    return node.view.nodes[node.name].incarnation


async def _beat(channel: Channel) -> None:
    while True:
        channel.send(Heartbeat())
        await asyncio.sleep(_HEARTBEAT_SECONDS)


def _inherited_parts(launch: Launch) -> ChildParts:
    sockets = {name: inherited_socket(number) for name, number in launch.sockets.items()}
    native = sockets["native"]
    first_port = launch.settings.cluster.first_port
    port = None if first_port is None else first_port + launch.number - 1
    return ChildParts(
        native=(native, own_socket_beside(native, port)),
        http=sockets.get("http"),
        grpc_address=launch.grpc_address,
        warns=launch.number == 1 and launch.life == 1,
        restarts=launch.life - 1,
        former_end=launch.former_end,
    )


def _ignore() -> None:
    """The parent gets this signal too, and decides."""
