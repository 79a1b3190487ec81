"""All connections of the native listener, by TCP, TLS or in-process: limits their number and silence, drains them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Final

from runnel.broker.access import MakeAccess, local_access
from runnel.broker.broker import Broker
from runnel.broker.connections import ReadRows
from runnel.config import Settings
from runnel.errors import BusyError, ClosedError, RunnelError
from runnel.platform.port_listener import DrainDeadline
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.native.pipe import connect_pipe
from runnel.protocols.native.protocol import HELLO_BYTES_MAX, RECEIVE_BYTES, NativeConnection
from runnel.protocols.native.request_quota import RequestQuota
from runnel.protocols.native.wake_up import WakeUp
from runnel.security.authenticator import Authenticator

# Refused connections that may still receive the reason; further ones are closed at once.
_REFUSED_MAX: Final = 64
_SWEEP_SECONDS_MAX: Final = 1.0
_SWEEPS_PER_TIMEOUT: Final = 4
_NS_PER_SECOND: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


class NativeServer:
    """The state that all native connections share. Made within a running loop; `close` it before the broker."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        authenticator: Authenticator,
        make_access: MakeAccess | None = None,
    ) -> None:
        """Without `make_access` the broker has everything: it is alone."""
        self.broker = broker
        self.make_access: MakeAccess = make_access or local_access(broker)
        self.authenticator = authenticator
        self.settings = settings
        self.tasks = OwnedTasks("the native listener")
        self.request_quota = RequestQuota()
        self._loop = asyncio.get_running_loop()
        self.wake_up = WakeUp(self._loop)
        self.connections: set[NativeConnection] = set()
        self._refused: set[NativeConnection] = set()
        # In the order of their arrival. `_make_room` removes the connections that were admitted since.
        self._unadmitted: dict[NativeConnection, None] = {}
        # All connections share it: frames are copied out of it before the next read.
        self._receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._refusal: RunnelError | None = None
        self._empty = asyncio.Event()  # there are no connections
        self._empty.set()
        drain_seconds_max = settings.native.drain_timeout_ns / _NS_PER_SECOND
        self._drain_deadline = DrainDeadline(broker.clock, drain_seconds_max)
        broker.connections.listeners.append(self.rows)
        self._sweep_task = self._loop.create_task(self._sweep())

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

        The client needs no token and may be silent for any time: it is part of the broker's own process.
        """
        server = NativeConnection(self, self._receive_buffer, authenticator=None, times_out=False)
        _, transport = connect_pipe(self._loop, server, client)
        return transport

    def enter(self, connection: NativeConnection) -> None:
        """Accept or refuse a new connection."""
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
            self._unadmitted[connection] = None
            return
        self.broker.metrics.counters.connections_refused += 1
        self._refused.add(connection)
        connection.refuse(refusal, lingers=len(self._refused) <= _REFUSED_MAX)

    def _make_room(self) -> bool:
        """Abort the connection that has waited longest for admission. False: all are admitted.

        Otherwise silent connections could keep out all clients.
        """
        while self._unadmitted:
            oldest = next(iter(self._unadmitted))
            del self._unadmitted[oldest]
            if oldest.awaits_admission:
                self.broker.metrics.counters.connections_idle += 1
                oldest.abort()
                self.leave(oldest)  # now: the loop calls `connection_lost` only later
                return True
        return False

    def leave(self, connection: NativeConnection) -> None:
        self.connections.discard(connection)
        self._unadmitted.pop(connection, None)
        self._refused.discard(connection)
        if not self.connections and not self._refused:
            self._empty.set()

    def _all(self) -> Iterator[NativeConnection]:
        return itertools.chain(list(self.connections), list(self._refused))

    @property
    def connection_count(self) -> int:
        return len(self.connections)

    def rows(self) -> ReadRows:
        """For each connection id, the function that reads its row for the metrics."""
        return {connection.connection_id: connection.row for connection in self.connections}

    async def _sweep(self) -> None:
        """Check the times of all connections at intervals, instead of a timer for each."""
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
        """Finish accepted requests, begin no new ones, close every connection.

        False: time was up, or `hurry` was called, before all requests were finished. `close` aborts the rest.
        """
        timeout_ns = self.settings.native.drain_timeout_ns
        self._refusal = ClosedError("the broker is shutting down; connect again later")
        for connection in list(self.connections):
            connection.session.drain(timeout_ns // _NS_PER_MS)
        return await self._drain_deadline.lasts_for(self._finish())

    def hurry(self) -> None:
        """End a drain under way at once."""
        self._drain_deadline.hurry()

    async def _finish(self) -> None:
        # Wait for all before closing any: a message that one connection published may still go to another.
        for connection in list(self.connections):
            await connection.session.wait_idle()
        for connection in list(self.connections):
            connection.session.close()
        await self._empty.wait()

    async def close(self) -> None:
        """Abort all remaining connections, and wait until their tasks have ended."""
        self._refusal = ClosedError("the broker has been closed")
        self._sweep_task.cancel()
        if self.rows in self.broker.connections.listeners:
            self.broker.connections.listeners.remove(self.rows)
        for connection in self._all():
            connection.session.consumers.close(is_clean=True)  # their work has not failed
            connection.abort()
        await self._empty.wait()
        self.tasks.cancel()
        await self.tasks.wait()
        await asyncio.wait({self._sweep_task})
