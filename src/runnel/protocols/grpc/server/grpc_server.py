"""The active calls of the gRPC listener, their shared state, and their end when the broker shuts down."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final, Protocol

from runnel.broker.access import MakeAccess, local_access
from runnel.broker.broker import Broker, ConnectionStats
from runnel.broker.connections import ReadRows
from runnel.config import Settings
from runnel.errors import ClosedError, RunnelError
from runnel.platform.diagnostics import LogThrottle, get_logger
from runnel.platform.port_listener import DrainDeadline
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.security.authenticator import Authenticator

logger = get_logger("runnel.grpc")

_NS_PER_SECOND: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


class ActiveCall(Protocol):
    """An admitted call that has not ended."""

    @property
    def id(self) -> int: ...
    @property
    def is_stream(self) -> bool: ...
    def closing(self) -> None: ...
    def finish_with(self, error: BaseException) -> None: ...
    def row(self) -> ConnectionStats: ...


class GrpcServer:
    """The state that all calls share. Make it within a running loop; close it before the broker."""

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
        self.tasks = OwnedTasks("the gRPC listener")
        self.turns = itertools.count()  # partitions of requests without keys: one after the other
        self.calls: set[ActiveCall] = set()
        self.punished = 0  # calls with a wrong token that wait for their answer
        self._unknown_methods = LogThrottle()
        self._refusal: RunnelError | None = None
        self._empty = asyncio.Event()  # no call is under way
        self._empty.set()
        drain_seconds_max = settings.grpc.drain_timeout_ns / _NS_PER_SECOND
        self._patience = DrainDeadline(broker.clock, drain_seconds_max)
        broker.connections.listeners.append(self.rows)

    @property
    def is_closing(self) -> bool:
        return self._refusal is not None

    # --- Calls ---

    @property
    def refusal(self) -> RunnelError | None:
        """The error that new calls get, once none are accepted."""
        return self._refusal

    def add(self, call: ActiveCall) -> None:
        self.calls.add(call)
        self._empty.clear()

    def remove(self, call: ActiveCall) -> None:
        self.calls.discard(call)
        if not self.calls:
            self._empty.set()

    def on_unknown_method(self) -> None:
        """Count and log a call of a method that does not exist, or whose name is not text."""
        self.broker.metrics.counters.protocol_errors += 1
        if times := self._unknown_methods.count(asyncio.get_running_loop().time()):
            logger.warning("a method was called that does not exist", times=times)

    def rows(self) -> ReadRows:
        """For each stream, by id, a function that reads it as the metrics show it."""
        return {call.id: call.row for call in self.calls if call.is_stream}

    # --- The end ---

    def closing_notice(self) -> pb.Closing:
        """The notice that streams get before the broker shuts down."""
        within_ms = self.settings.grpc.drain_timeout_ns // _NS_PER_MS
        return pb.Closing(text=str(shutting_down()), within_ms=within_ms)

    async def drain(self) -> bool:
        """Accept no more calls, notify the streams, and let the active calls finish.

        False: some did not finish within the deadline or before `hurry` was called. `close` ends these.
        """
        self._refusal = shutting_down()
        for call in list(self.calls):
            call.closing()
        return await self._patience.lasts_for(self._empty.wait())

    def hurry(self) -> None:
        """End the drain under way at once."""
        self._patience.hurry()

    async def close(self) -> None:
        """End the remaining calls, and wait for their tasks."""
        self._refusal = shutting_down()
        if self.rows in self.broker.connections.listeners:
            self.broker.connections.listeners.remove(self.rows)
        for call in list(self.calls):
            call.finish_with(self._refusal)
        await self.tasks.wait()


def shutting_down() -> ClosedError:
    return ClosedError("the broker is shutting down; call again later")
