"""All connections of the native listener, whatever they came through: their number, their silence, and their end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Final

from runnel.broker.broker import Broker
from runnel.broker.connections import ReadRows
from runnel.config import Settings
from runnel.errors import BusyError, ClosedError, RunnelError
from runnel.platform.port_listener import DrainDeadline
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.native.pipe import connect_pipe
from runnel.protocols.native.protocol import HELLO_BYTES_MAX, RECEIVE_BYTES, NativeConnection
from runnel.protocols.native.turns import Turns
from runnel.protocols.native.wake_up import WakeUp
from runnel.security.authenticator import Authenticator

# Connections that were turned away and are still being told so; beyond that they are just closed.
_REFUSED_MAX: Final = 64
_SWEEP_SECONDS_MAX: Final = 1.0
_SWEEPS_PER_TIMEOUT: Final = 4
_NS_PER_SECOND: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


class NativeServer:
    """What connections share. Made within a running loop; `close` it before the broker."""

    def __init__(self, broker: Broker, settings: Settings, authenticator: Authenticator) -> None:
        self.broker = broker
        self.authenticator = authenticator
        self.settings = settings
        self.tasks = OwnedTasks("the native listener")
        self.turns = Turns()
        self._loop = asyncio.get_running_loop()
        self.wake_up = WakeUp(self._loop)
        self.connections: set[NativeConnection] = set()
        self._refused: set[NativeConnection] = set()
        # In the order in which they came. Those that were admitted since are taken out when it is looked through.
        self._strangers: dict[NativeConnection, None] = {}
        # One for all: whatever arrives is copied out of it before the next read.
        self._receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._refusal: RunnelError | None = None
        self._empty = asyncio.Event()  # nobody is there
        self._empty.set()
        drain_seconds_max = settings.native.drain_timeout_ns / _NS_PER_SECOND
        self._patience = DrainDeadline(broker.clock, drain_seconds_max)
        broker.connections.listeners.append(self.rows)
        self._sweeping = self._loop.create_task(self._sweep())

    # --- Connections ---

    def new_connection(self) -> NativeConnection:
        """The protocol for a plain socket."""
        return NativeConnection(
            self, self._receive_buffer, authenticator=self.authenticator, times_out=True
        )

    def new_encrypted_connection(self) -> NativeConnection:
        """The protocol for TLS, which may hold on to a receive buffer longer than one read."""
        return NativeConnection(
            self,
            memoryview(bytearray(HELLO_BYTES_MAX)),
            authenticator=self.authenticator,
            times_out=True,
            own_buffer_bytes=RECEIVE_BYTES // 4,
        )

    def connect(self, client: asyncio.BaseProtocol) -> asyncio.Transport:
        """Connect a client within the process; returns the client's transport.

        It may be silent for as long as it likes, and needs no token: a process neither loses itself nor keeps
        itself out.
        """
        server = NativeConnection(self, self._receive_buffer, authenticator=None, times_out=False)
        _, transport = connect_pipe(self._loop, server, client)
        return transport

    def enter(self, connection: NativeConnection) -> None:
        """A connection is there: let it in, or turn it away."""
        self._empty.clear()
        refusal = self._refusal
        connections_max = self.settings.native.connections_max
        is_full = len(self.connections) >= connections_max
        if refusal is None and is_full and not self._make_room():
            refusal = BusyError(
                f"the broker has {connections_max} connections; no more are allowed "
                "(native.connections_max); try again later"
            )
        if refusal is None:
            connection.connection_id = next(self.broker.connection_ids)
            self.connections.add(connection)
            self._strangers[connection] = None
            return
        self.broker.metrics.counters.connections_refused += 1
        self._refused.add(connection)
        connection.refuse(refusal, lingers=len(self._refused) <= _REFUSED_MAX)

    def _make_room(self) -> bool:
        """End the connection that has waited for longest to be admitted. False: all are admitted.

        Else silent ones could keep out everybody.
        """
        while self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            if oldest.is_stranger:
                self.broker.metrics.counters.connections_idle += 1
                oldest.abort()
                self.leave(oldest)  # at once, for the loop tells it of its end only later
                return True
        return False

    def leave(self, connection: NativeConnection) -> None:
        self.connections.discard(connection)
        self._strangers.pop(connection, None)
        self._refused.discard(connection)
        if not self.connections and not self._refused:
            self._empty.set()

    def _all(self) -> Iterator[NativeConnection]:
        return itertools.chain(list(self.connections), list(self._refused))

    @property
    def connection_count(self) -> int:
        return len(self.connections)

    def rows(self) -> ReadRows:
        """The connections by id: how to read each as the metrics show it."""
        return {connection.connection_id: connection.row for connection in self.connections}

    async def _sweep(self) -> None:
        """One look at all connections now and then, instead of a timer for each."""
        native = self.settings.native
        shortest_ns = min(native.handshake_timeout_ns, native.idle_timeout_ns)
        pause_seconds = min(_SWEEP_SECONDS_MAX, shortest_ns / _NS_PER_SECOND / _SWEEPS_PER_TIMEOUT)
        while True:
            await self.broker.clock.sleep(pause_seconds)
            now_ns = self.broker.clock.monotonic_ns()
            for connection in self._all():
                connection.check_times(now_ns)

    # --- The end ---

    async def drain(self) -> bool:
        """Finish what was accepted, begin nothing new, close every connection.

        False: time was up, or `hurry` was called, before all was finished. What is left, `close` cuts off.
        """
        timeout_ns = self.settings.native.drain_timeout_ns
        self._refusal = ClosedError("the broker is shutting down; connect again later")
        for connection in list(self.connections):
            connection.session.drain(timeout_ns // _NS_PER_MS)
        return await self._patience.lasts_for(self._finish())

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self._patience.hurry()

    async def _finish(self) -> None:
        # All of them before any is closed: what one has published, another may still be sent.
        for connection in list(self.connections):
            await connection.session.wait_idle()
        for connection in list(self.connections):
            connection.session.close()
        await self._empty.wait()

    async def close(self) -> None:
        """Cut off every connection that is left, and wait until nothing of it is at work."""
        self._refusal = ClosedError("the broker has been closed")
        self._sweeping.cancel()
        if self.rows in self.broker.connections.listeners:
            self.broker.connections.listeners.remove(self.rows)
        for connection in self._all():
            connection.session.consumers.close(is_clean=True)  # it is not they who failed
            connection.abort()
        await self._empty.wait()
        self.tasks.cancel()
        await self.tasks.wait()
        await asyncio.wait({self._sweeping})
