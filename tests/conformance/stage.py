"""Makes tests of coroutines: each is run once at every door that can do what it needs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec
import pytest

from runnel.client.bus import Bus
from runnel.client.consumer import Consumer
from runnel.client.subscription import Subscription
from runnel.client.work import Work
from runnel.config import BrokerSettings, LogSettings, NativeSettings, Settings, TopicRule
from runnel.formats.message import Message
from runnel.testing import VirtualClock
from tests.conformance.doors import DOORS, Ability, Connect, Door

T = TypeVar("T")

NS_PER_SECOND = 1_000_000_000
DAY_S = 86_400
# Far more than any of these tests takes: whoever waits longer waits in vain.
PATIENCE_S = 30.0
# Tests let days pass within a moment; no connection is to be called idle for that.
PATIENT = NativeSettings(idle_timeout_ns=10_000 * DAY_S * NS_PER_SECOND)
LOG = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)


class Stage:
    """What a test has in its hands: a broker behind a door, its clock, and clients of it."""

    def __init__(self, door: Door, settings: Settings) -> None:
        self.door = door
        self.settings = settings
        self.clock = VirtualClock()
        self.bus: Bus  # the first client
        self._connect: Connect
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        self._connect = await self._opened.enter_async_context(
            self.door.open(self.settings, self.clock)
        )
        self.bus = await self.connect()

    async def close(self) -> None:
        await self._opened.aclose()

    async def connect(self) -> Bus:
        """One more client."""
        return await self._opened.enter_async_context(self._connect())

    async def restart(self, *rules: TopicRule) -> None:
        """The broker ends and begins again with what it has stored, and with other rules if some are given."""
        await self.close()
        if rules:
            self.settings = msgspec.structs.replace(self.settings, topics=rules)
        await self.open()

    def advance(self, seconds: float) -> None:
        self.clock.advance(round(seconds * NS_PER_SECOND))

    async def publish(self, topic: str, *payloads: bytes) -> None:
        """One message after the other."""
        for payload in payloads:
            await self.bus.publish(topic, payload)

    async def payloads(self, topic: str, partition: int | None = None) -> list[bytes]:
        """All that a topic has, from the first message there is."""
        state = await self.bus.topic(topic)
        first = state.partitions[partition or 0].first_offset
        page = await self.bus.fetch(topic, first, partition=partition)
        return [message.payload for message in page.messages]


async def take(subscription: Subscription, count: int) -> list[Message]:
    """The next so many messages."""
    messages: list[Message] = []
    while len(messages) < count:
        messages.append(await anext(subscription))
    return messages


async def take_payloads(subscription: Subscription, count: int) -> list[bytes]:
    return [message.payload for message in await take(subscription, count)]


async def take_work(consumer: Consumer, count: int) -> list[Work]:
    """The next so many messages that are leased to it."""
    return [await anext(consumer) for _ in range(count)]


async def until(look: Callable[[], Awaitable[T]], is_right: Callable[[T], bool]) -> T:
    """Ask again and again until the answer is right. Every asking lets the broker work."""
    while True:
        answer = await look()
        if is_right(answer):
            return answer


async def nothing_more(stage: Stage, reader: Subscription | Consumer) -> None:
    """Whatever was under way has arrived, and it was nothing: the broker's answers come in order."""
    waiting: asyncio.Future[object] = asyncio.ensure_future(_next_of(reader))
    for _ in range(3):
        await stage.bus.ping()
    if waiting.done():
        pytest.fail(f"there was one more: {waiting.result()!r}")
    waiting.cancel()
    await asyncio.wait({waiting})


async def _next_of(reader: Subscription | Consumer) -> object:
    return await anext(reader)


Verb = Callable[[Stage], Awaitable[None]]


def verb(
    *rules: TopicRule,
    needs: Sequence[Ability] = (),
    settings: Settings | None = None,
    broker: BrokerSettings | None = None,
) -> Callable[[Verb], Callable[[Door], None]]:
    """Makes a test of a coroutine that takes a `Stage`."""
    doors = [door for door in DOORS if door.can(frozenset(needs))]

    def decorate(run: Verb) -> Callable[[Door], None]:
        @pytest.mark.parametrize("door", doors, ids=lambda door: door.name)
        def test(door: Door) -> None:
            with tempfile.TemporaryDirectory(prefix="runnel-test-") as directory:
                whole = settings or Settings(
                    topics=rules, log=LOG, native=PATIENT, broker=broker or BrokerSettings()
                )
                data = door.data(f"{directory}/data")
                asyncio.run(_run(door, msgspec.structs.replace(whole, data=data), run))

        test.__name__ = run.__name__
        test.__doc__ = run.__doc__
        return test

    return decorate


async def _run(door: Door, settings: Settings, run: Verb) -> None:
    stage = Stage(door, settings)
    async with asyncio.timeout(PATIENCE_S):
        try:
            await stage.open()
            await run(stage)
        finally:
            await stage.close()
