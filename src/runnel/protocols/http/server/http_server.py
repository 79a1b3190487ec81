"""The server of the HTTP listener: admits connections, enforces their timeouts, counts streams, drains and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Final, Protocol

from uvicorn.config import Config
from uvicorn.server import ServerState

from runnel.broker.access import MakeAccess, local_access
from runnel.broker.broker import Broker
from runnel.broker.connections import ReadRows
from runnel.config import Settings
from runnel.errors import BusyError, ClosedError, LimitExceededError, RunnelError
from runnel.platform.port_listener import DrainDeadline
from runnel.protocols.http.consumers.polling_consumers import PollingConsumers
from runnel.protocols.http.encoding.sent_last_values import SentLists
from runnel.protocols.http.server.connection import HttpConnection
from runnel.security.authenticator import Authenticator

# Refused connections that may be sent their error at the same time; beyond that, one of them is cut off.
_REFUSED_MAX: Final = 64
_SWEEP_SECONDS_MAX: Final = 1.0
_SWEEPS_PER_TIMEOUT: Final = 4
_NS_PER_SECOND: Final = 1_000_000_000
# Caches must not store answers, and browsers must not guess another content type.
_SAFE_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)


class LongCall(Protocol):
    """A call that may take long, and has to end when the listener closes."""

    def end(self, error: RunnelError) -> None: ...


class HttpServer:
    """The state that all requests share. Made within a running loop; `close` it before the broker."""

    def __init__(
        self,
        broker: Broker,
        authenticator: Authenticator,
        settings: Settings,
        make_access: MakeAccess | None = None,
    ) -> None:
        """Without `make_access` the broker has everything: it is alone."""
        self.broker = broker
        self.make_access: MakeAccess = make_access or local_access(broker)
        self.authenticator = authenticator
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.closing = asyncio.Event()
        """Set when draining begins: streams and long polls end."""
        self.connections: set[HttpConnection] = set()
        self._refused: set[HttpConnection] = set()
        self._calls: set[LongCall] = set()
        self.sent_last_values = SentLists()
        self._stream_count = 0
        self._keyless_turn = 0
        self._state = ServerState()
        self._update_date()
        self._changed = asyncio.Event()  # a connection was closed, or a request was answered
        drain_seconds_max = settings.http.drain_timeout_ns / _NS_PER_SECOND
        self._drain_deadline = DrainDeadline(broker.clock, drain_seconds_max)
        self._is_closed = False
        broker.connections.listeners.append(self.rows)
        broker.metrics.add_limit(
            "http.streams_max", settings.http.streams_max, lambda: self._stream_count
        )
        self.polling_consumers = PollingConsumers(
            broker, authenticator, settings.http.consumers_max
        )
        self._sweeping = self.loop.create_task(self._sweep(), name="runnel-http")

    # --- Connections ---

    def new_connection(self, config: Config) -> HttpConnection:
        return HttpConnection(self, config, self._state)

    def enter(self, connection: HttpConnection) -> RunnelError | None:
        """Admit a new connection, or return the error that refuses it."""
        refusal: RunnelError | None = None
        connections_max = self.settings.http.connections_max
        if self.is_closing:
            refusal = ClosedError("the broker is shutting down; connect again later")
        elif len(self.connections) >= connections_max and not self._make_room():
            refusal = BusyError(
                f"the HTTP listener has {connections_max} connections with requests under way; no more are allowed "
                "(http.connections_max); try again later"
            )
        counters = self.broker.metrics.counters
        if refusal is None:
            counters.connections_opened += 1
            self.connections.add(connection)
            return None
        counters.connections_refused += 1
        self._refused.add(connection)
        if len(self._refused) > _REFUSED_MAX:
            self._refused.pop().transport.abort()
        return refusal

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest. False: all are busy.

        Otherwise idle connections could keep out every other client, even the liveness probe.
        """
        idle = [each for each in self.connections if not each.is_busy]
        if not idle:
            return False
        longest = min(idle, key=lambda each: each.quiet_since_ns)
        self.broker.metrics.counters.connections_idle += 1
        longest.transport.abort()
        self.leave(longest)  # now, because the loop calls `connection_lost` later
        return True

    def leave(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        self._refused.discard(connection)
        self._changed.set()

    def on_answered(self) -> None:
        """A request has been answered."""
        self._changed.set()

    @property
    def connection_count(self) -> int:
        return len(self.connections)

    def rows(self) -> ReadRows:
        """By connection id: the function that reads the connection's statistics."""
        return {connection.id: connection.row for connection in self.connections}

    @contextmanager
    def enter_stream(self) -> Iterator[None]:
        """Count a stream, or a request that waits for a message, towards `http.streams_max`."""
        streams_max = self.settings.http.streams_max
        if self._stream_count >= streams_max:
            raise LimitExceededError(
                f"http.streams_max = {streams_max} streams and waiting requests are under way; no more are allowed"
            )
        self._stream_count += 1
        try:
            yield
        finally:
            self._stream_count -= 1

    def next_keyless(self, partitions: int) -> int:
        """The partition for the messages of a batch that have no key: round robin."""
        self._keyless_turn += 1
        return self._keyless_turn % partitions

    @property
    def stream_count(self) -> int:
        return self._stream_count

    async def _sweep(self) -> None:
        """Check the timeouts of all connections periodically, instead of a timer for each."""
        http = self.settings.http
        shortest_ns = min(http.request_timeout_ns, http.idle_timeout_ns)
        pause_seconds = min(_SWEEP_SECONDS_MAX, shortest_ns / _NS_PER_SECOND / _SWEEPS_PER_TIMEOUT)
        while True:
            await self.broker.clock.sleep(pause_seconds)
            self._update_date()
            now_ns = self.broker.clock.monotonic_ns()
            for connection in [*self.connections, *self._refused]:
                connection.check_times(now_ns)

    def _update_date(self) -> None:
        date = formatdate(self.broker.clock.time_ns() / _NS_PER_SECOND, usegmt=True)
        usual = [(b"date", date.encode()), *_SAFE_HEADERS]
        self._state.default_headers = usual
        self.usual_fields = b"".join([b"%b: %b\r\n" % field for field in usual])

    # --- Long calls ---

    def add_call(self, call: LongCall) -> None:
        """End this call when the listener closes, unless `remove_call` comes first."""
        if self.is_closing:
            call.end(_closing())
        else:
            self._calls.add(call)

    def remove_call(self, call: LongCall) -> None:
        self._calls.discard(call)

    # --- Closing ---

    @property
    def is_closing(self) -> bool:
        return self.closing.is_set()

    async def drain(self) -> bool:
        """End streams, finish the requests under way, close every connection.

        False: the time was up, or `hurry` was called, before all were finished. `close` cuts off the rest.
        """
        self._begin_closing()
        return await self._drain_deadline.lasts_for(self._finish())

    def hurry(self) -> None:
        """End the drain that is under way."""
        self._drain_deadline.hurry()

    async def close(self) -> None:
        """Cut off the remaining connections, and wait until their tasks have ended."""
        self._begin_closing()
        self._sweeping.cancel()
        if self.rows in self.broker.connections.listeners:
            self.broker.connections.listeners.remove(self.rows)
        for connection in [*self.connections, *self._refused]:
            connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait({self._sweeping, *tasks})
        await self._wait_empty()
        await self.polling_consumers.close()

    def _begin_closing(self) -> None:
        if not self.is_closing:
            self.closing.set()
            for call in list(self._calls):
                call.end(_closing())
            self.polling_consumers.begin_closing()

    async def _finish(self) -> None:
        for connection in list(self.connections):
            connection.shutdown()  # at once, or when the request under way is answered
        await self._wait_empty()

    async def _wait_empty(self) -> None:
        while self.connections or self._refused:
            self._changed.clear()
            await self._changed.wait()


def _closing() -> ClosedError:
    return ClosedError("the broker is shutting down; try again later")
