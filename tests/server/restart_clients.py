"""Clients of every listener that reconnect when their server is restarted: a publisher, a reader and a consumer each.

The HTTP and gRPC clients do what their users do by hand: they connect again, a reader with the last position that it
got. Messages under way when the server ended may be stored or not; acknowledged ones are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from runnel.client import connect
from runnel.errors import LateAckError, Unavailable
from runnel.formats.message import Message
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http
from tests.server.server_process import ServerProcess

PATTERN: Final = "t/*"
# No client gives up while the server is down: a busy machine may need long to start one.
DEADLINE_S: Final = 60.0
# Between two messages, and before a client connects again.
_PAUSE_S: Final = 0.01

Connect = Callable[[], AbstractAsyncContextManager[Any]]
Place = tuple[str, int]  # topic and offset


def connector(server: ServerProcess, listener: str) -> Connect:
    if listener == "native":
        return lambda: connect(server.url, deadline_s=DEADLINE_S)
    address = server.addresses[listener]
    return {"http": lambda: connect_http(address), "grpc": lambda: connect_grpc(address)}[listener]


class RestartPublisher:
    """Publishes to its own topic. `acknowledged` has the payload of every acknowledged offset."""

    def __init__(self, listener: str, connect_again: Connect) -> None:
        self.topic = f"t/{listener}"
        self.acknowledged: dict[int, bytes] = {}
        self.is_ending = False
        self._connect = connect_again

    @property
    def count(self) -> int:
        return len(self.acknowledged)

    async def run(self) -> None:
        number = 0
        while not self.is_ending:
            try:
                async with self._connect() as bus:
                    while not self.is_ending:
                        number += 1
                        payload = b"%d" % number
                        receipt = await bus.publish(self.topic, payload)
                        assert receipt.level == "stored"
                        assert receipt.offset not in self.acknowledged
                        self.acknowledged[receipt.offset] = payload
                        await asyncio.sleep(_PAUSE_S)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)


class RestartReader:
    """Reads all topics from the first message on. `found` has what arrived, by topic and in order."""

    def __init__(self, listener: str, connect_again: Connect) -> None:
        self.found: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self.count = 0
        self._has_position = listener != "native"  # the native client continues by itself
        self._connect = connect_again
        self._place: Any = None

    async def run(self) -> None:
        while True:
            try:
                async with self._connect() as bus:
                    async for message in self._messages(bus):
                        self.found[message.topic].append((message.offset, message.payload))
                        self.count += 1
            except Unavailable:
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _messages(self, bus: Any) -> AsyncIterator[Message]:
        options = {"position": self._place} if self._place else {}
        subscription = bus.subscribe(PATTERN, start="earliest", **options)
        try:
            async for message in subscription:
                yield message
        finally:  # all that arrived was read, so the position is after it
            assert not subscription.gaps
            if self._has_position:
                self._place = subscription.position


class RestartConsumer:
    """Consumes all topics with its own subscription. `acked` has the messages that it must never get again."""

    def __init__(self, listener: str, connect_again: Connect) -> None:
        self.subscription = f"work-{listener}"
        self.taken: dict[Place, bytes] = {}
        self.acked: set[Place] = set()
        self._connect = connect_again

    @property
    def count(self) -> int:
        return len(self.taken)

    async def run(self) -> None:
        while True:
            try:
                async with (
                    self._connect() as bus,
                    bus.consume(self.subscription, PATTERN, window_messages=50) as consumer,
                ):
                    async for batch in consumer.batches():
                        await self._work(batch)
            except (Unavailable, LateAckError):
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _work(self, batch: Any) -> None:
        taken = {
            (message.topic, message.offset): message.payload
            for message in (batch.messages() if hasattr(batch, "messages") else batch)
        }
        again = taken.keys() & self.acked
        assert not again, f"acknowledged before, and it was stored: {sorted(again)}"
        self.taken |= taken
        await batch.ack(stored=True)
        self.acked |= taken.keys()


class RestartClients:
    """A publisher, a reader and a consumer of each of these listeners."""

    def __init__(self, server: ServerProcess, listeners: tuple[str, ...]) -> None:
        ways = {listener: connector(server, listener) for listener in listeners}
        self.publishers = [RestartPublisher(listener, way) for listener, way in ways.items()]
        self.readers = [RestartReader(listener, way) for listener, way in ways.items()]
        self.workers = [RestartConsumer(listener, way) for listener, way in ways.items()]
        self._running: list[asyncio.Task[None]] = []

    @property
    def all(self) -> list[RestartPublisher | RestartReader | RestartConsumer]:
        return [*self.publishers, *self.readers, *self.workers]

    def start(self) -> None:
        for each in self.all:
            self._running.append(asyncio.create_task(each.run()))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises the error of a client that has failed."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for task in self._running:
                    if task.done():
                        task.result()
                await asyncio.sleep(_PAUSE_S)

    async def progress(self, count: int) -> None:
        """Wait until every client has handled so many more messages."""
        before = [each.count for each in self.all]
        await self.wait_for(
            lambda: all(
                each.count >= begin + count for each, begin in zip(self.all, before, strict=True)
            )
        )

    async def end_publishing(self) -> None:
        for publisher in self.publishers:
            publisher.is_ending = True
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._running[: len(self.publishers)])
        del self._running[: len(self.publishers)]

    async def discard(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
