"""Makes tests of coroutines: each runs once for every listener that has the abilities it needs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec
import pytest

from runnel.client import Bus
from runnel.client.consumer import Consumer, Subscription, Work
from runnel.config import BrokerSettings, LogSettings, NativeSettings, Settings, TopicRule
from runnel.formats.message import Message
from runnel.testing import VirtualClock
from tests.conformance.listeners import LISTENERS, Ability, Connect, ListenerSetup

T = TypeVar("T")

NS_PER_SECOND = 1_000_000_000
DAY_S = 86_400
# Far more than any of these tests takes.
PATIENCE_S = 30.0
# Tests let days pass within a moment. No connection may be idle for that long.
PATIENT = NativeSettings(idle_timeout_ns=10_000 * DAY_S * NS_PER_SECOND)
LOG = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)


class Stage:
    """The objects of a test: a broker behind a listener, its clock, and its clients."""

    def __init__(self, listener: ListenerSetup, settings: Settings) -> None:
        self.listener = listener
        self.settings = settings
        self.clock = VirtualClock()
        self.bus: Bus  # the first client
        self._connect: Connect
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        self._connect = await self._opened.enter_async_context(
            self.listener.open(self.settings, self.clock)
        )
        self.bus = await self.connect()

    async def close(self) -> None:
        await self._opened.aclose()

    async def connect(self) -> Bus:
        """Open one more client."""
        return await self._opened.enter_async_context(self._connect())

    async def restart(self, *rules: TopicRule) -> None:
        """Close the broker and open it again on the same data, with other topic rules if any are given."""
        await self.close()
        if rules:
            self.settings = msgspec.structs.replace(self.settings, topics=rules)
        await self.open()

    def advance(self, seconds: float) -> None:
        self.clock.advance(round(seconds * NS_PER_SECOND))

    async def publish(self, topic: str, *payloads: bytes) -> None:
        """Publish one message after the other."""
        for payload in payloads:
            await self.bus.publish(topic, payload)

    async def payloads(self, topic: str, partition: int | None = None) -> list[bytes]:
        """The payloads of all messages in a topic."""
        state = await self.bus.topic(topic)
        first = state.partitions[partition or 0].first_offset
        page = await self.bus.fetch(topic, first, partition=partition)
        return [message.payload for message in page.messages]


async def take(subscription: Subscription, count: int) -> list[Message]:
    """The next messages, so many."""
    messages: list[Message] = []
    while len(messages) < count:
        messages.append(await anext(subscription))
    return messages


async def take_payloads(subscription: Subscription, count: int) -> list[bytes]:
    return [message.payload for message in await take(subscription, count)]


async def take_work(consumer: Consumer, count: int) -> list[Work]:
    """The next leased messages, so many."""
    return [await anext(consumer) for _ in range(count)]


async def until(look: Callable[[], Awaitable[T]], is_right: Callable[[T], bool]) -> T:
    """Ask until the answer is right. Each request lets the broker work."""
    while True:
        answer = await look()
        if is_right(answer):
            return answer


async def nothing_more(stage: Stage, reader: Subscription | Consumer) -> None:
    """Fails if one more message arrives. The broker answers in order, so all that was under way has arrived."""
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
) -> Callable[[Verb], Callable[[ListenerSetup], None]]:
    """Make a test of a coroutine that takes a `Stage`."""
    able = [listener for listener in LISTENERS if listener.can(frozenset(needs))]

    def decorate(run: Verb) -> Callable[[ListenerSetup], None]:
        listeners = [listener for listener in able if listener.is_for(run.__module__)]

        @pytest.mark.parametrize("listener", listeners, ids=lambda listener: listener.name)
        def test(listener: ListenerSetup) -> None:
            with tempfile.TemporaryDirectory(prefix="runnel-test-") as directory:
                whole = settings or Settings(
                    topics=rules, log=LOG, native=PATIENT, broker=broker or BrokerSettings()
                )
                data = listener.data(f"{directory}/data")
                asyncio.run(_run(listener, msgspec.structs.replace(whole, data=data), run))

        test.__name__ = run.__name__
        test.__doc__ = run.__doc__
        return test

    return decorate


async def _run(listener: ListenerSetup, settings: Settings, run: Verb) -> None:
    stage = Stage(listener, settings)
    async with asyncio.timeout(PATIENCE_S):
        try:
            await stage.open()
            await run(stage)
        finally:
            await stage.close()
