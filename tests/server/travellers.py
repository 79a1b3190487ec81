"""Clients of every door that go on while their server comes and goes: publishers, readers and workers, one of each.

Those of HTTP and gRPC do what their users would do by hand: when the server has gone they come again, a reader with the
position that it was told last. What was under way meanwhile may have been stored or not; what was acknowledged was.
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
from tests.server.serving import Server

PATTERN: Final = "t/*"
# No client gives up while the server is away: a busy machine may take its time to start one.
DEADLINE_S: Final = 60.0
# Between two messages, and before somebody comes again.
_PAUSE_S: Final = 0.01

Connect = Callable[[], AbstractAsyncContextManager[Any]]
Place = tuple[str, int]  # topic and offset


def connecting(server: Server, door: str) -> Connect:
    if door == "native":
        return lambda: connect(server.url, deadline_s=DEADLINE_S)
    address = server.addresses[door]
    return {"http": lambda: connect_http(address), "grpc": lambda: connect_grpc(address)}[door]


class Publisher:
    """To a topic of its own; `acknowledged` has the payload of every offset that it was promised."""

    def __init__(self, door: str, connect_again: Connect) -> None:
        self.topic = f"t/{door}"
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


class Reader:
    """Of everything, from the first message on; `found` is what came, by topic and in order."""

    def __init__(self, door: str, connect_again: Connect) -> None:
        self.found: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self.count = 0
        self._word = {"http": "last_id", "grpc": "position"}.get(door, "")
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
        options = {self._word: self._place} if self._place else {}
        subscription = bus.subscribe(PATTERN, start="earliest", **options)
        try:
            async for message in subscription:
                yield message
        finally:  # everything that has arrived was read, so the position is behind it
            assert not subscription.gaps
            if self._word:
                self._place = getattr(subscription, self._word)


class Worker:
    """On a subscription of its own to everything: what it was given, and what it was promised never to see again."""

    def __init__(self, door: str, connect_again: Connect) -> None:
        self.subscription = f"work-{door}"
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


class Travellers:
    """A publisher, a reader and a worker at each of these doors."""

    def __init__(self, server: Server, doors: tuple[str, ...]) -> None:
        ways = {door: connecting(server, door) for door in doors}
        self.publishers = [Publisher(door, way) for door, way in ways.items()]
        self.readers = [Reader(door, way) for door, way in ways.items()]
        self.workers = [Worker(door, way) for door, way in ways.items()]
        self._running: list[asyncio.Task[None]] = []

    @property
    def everybody(self) -> list[Publisher | Reader | Worker]:
        return [*self.publishers, *self.readers, *self.workers]

    def set_out(self) -> None:
        for each in self.everybody:
            self._running.append(asyncio.create_task(each.run()))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something has come about; whoever has failed meanwhile tells why."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for task in self._running:
                    if task.done():
                        task.result()
                await asyncio.sleep(_PAUSE_S)

    async def progress(self, count: int) -> None:
        """Until everybody has got on by so many messages."""
        before = [each.count for each in self.everybody]
        await self.wait_for(
            lambda: all(
                each.count >= begin + count
                for each, begin in zip(self.everybody, before, strict=True)
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
