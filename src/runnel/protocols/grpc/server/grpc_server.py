"""All calls of the gRPC listener that are under way, what they share, and how they end when the broker goes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final, Protocol

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


class Underway(Protocol):
    """A call, as the listener sees it."""

    @property
    def id(self) -> int: ...
    @property
    def is_stream(self) -> bool: ...
    def closing(self) -> None: ...
    def finish_with(self, error: BaseException) -> None: ...
    def row(self) -> ConnectionStats: ...


class GrpcServer:
    """What calls share. Made within a running loop; `close` it before the broker."""

    def __init__(self, broker: Broker, authenticator: Authenticator, settings: Settings) -> None:
        self.broker = broker
        self.authenticator = authenticator
        self.settings = settings
        self.tasks = OwnedTasks("the gRPC listener")
        self.turns = (
            itertools.count()
        )  # of requests with messages that have no key, through partitions
        self.calls: set[Underway] = set()
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
        """Why nobody is let in any more, once that is so."""
        return self._refusal

    def add(self, call: Underway) -> None:
        self.calls.add(call)
        self._empty.clear()

    def remove(self, call: Underway) -> None:
        self.calls.discard(call)
        if not self.calls:
            self._empty.set()

    def on_unknown_method(self) -> None:
        """A call named a method that does not exist, or a name that is no text."""
        self.broker.metrics.counters.protocol_errors += 1
        if times := self._unknown_methods.count(asyncio.get_running_loop().time()):
            logger.warning("a method was called that does not exist", times=times)

    def rows(self) -> ReadRows:
        """The streams, by id: how to read each as the metrics show it."""
        return {call.id: call.row for call in self.calls if call.is_stream}

    # --- The end ---

    def closing_notice(self) -> pb.Closing:
        """What streams are told when the broker is about to go."""
        within_ms = self.settings.grpc.drain_timeout_ns // _NS_PER_MS
        return pb.Closing(text=str(shutting_down()), within_ms=within_ms)

    async def drain(self) -> bool:
        """Let nobody in any more, tell the streams, and let every call finish.

        False: time was up, or `hurry` was called, before all had. What is left, `close` cuts off.
        """
        self._refusal = shutting_down()
        for call in list(self.calls):
            call.closing()
        return await self._patience.lasts_for(self._empty.wait())

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self._patience.hurry()

    async def close(self) -> None:
        """End every call that is left, and wait until nothing of it is at work."""
        self._refusal = shutting_down()
        if self.rows in self.broker.connections.listeners:
            self.broker.connections.listeners.remove(self.rows)
        for call in list(self.calls):
            call.finish_with(self._refusal)
        await self.tasks.wait()


def shutting_down() -> ClosedError:
    return ClosedError("the broker is shutting down; call again later")
