"""A broker on a fake disk or in memory, and a reader that writes down what it is sent."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from runnel.broker.access import Access
from runnel.broker.broker import Broker, Level, LiveDelivery, LiveSubscription
from runnel.broker.live.subscription import SubscribeRequest
from runnel.config import BrokerSettings, Keep, LogSettings, Settings, TopicRule
from runnel.errors import BusyError, RunnelError
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.message import Message
from runnel.formats.wire import GapState, Start
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers

LOG = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0)
LIVE = TopicRule(match="live/*", keep=Keep.NONE)
PLENTY = 2**40
LATEST, LAST, EARLIEST = Start("latest"), Start("last"), Start("earliest")
TURNS_MAX = 100_000


class Store(enum.Enum):
    MEMORY = "memory"
    FAKE_DISK = "fake disk"


@dataclass
class Reader:
    """A sink that keeps everything. `messages` are those of one subscription, in order of arrival."""

    connection_id: int = 1
    peer: str = "a test"
    messages: list[Message] = field(default_factory=list)
    gaps: list[GapState] = field(default_factory=list)
    error: RunnelError | None = None
    deliveries: list[LiveDelivery] = field(default_factory=list)

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:
        self.deliveries.append(delivery)
        data = b"".join(delivery.buffers)
        for batch in unpack_blocks(data):
            self.messages += batch.messages()
        assert len(data) == delivery.size

    def gap(self, subscription: int, gap: GapState) -> None:
        self.gaps.append(gap)

    def ended(self, subscription: int, error: RunnelError) -> None:
        self.error = error

    def offsets(self, topic: str, partition: int = 0) -> list[int]:
        return [
            message.offset
            for message in self.messages
            if (message.topic, message.partition) == (topic, partition)
        ]

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]


@dataclass
class At:
    """What a scene has in its hands."""

    broker: Broker
    clock: VirtualClock
    store: Store
    pattern: str = ""  # the one of several that the scene is run with
    disk: FakeDisk = field(default_factory=lambda: FakeDisk(1))

    async def publish(
        self, topic: str, *payloads: bytes, partition: int = 0, level: Level | None = None
    ) -> Sequence[int]:
        """One batch; the offset of its first message."""
        messages = [Message(topic, payload, partition=partition) for payload in payloads]
        published = await self.broker.publish(Batch.from_messages(messages), level)
        return published.base_offsets

    async def subscribe(
        self,
        *patterns: str,
        start: Start = LATEST,
        credit_bytes: int = PLENTY,
        overflow: str = "drop_oldest",
        is_started: bool = True,
    ) -> tuple[Reader, LiveSubscription]:
        reader = Reader()
        subscription = await self.broker.subscribe(
            SubscribeRequest(
                1, reader, patterns, start, credit_bytes=credit_bytes, overflow=overflow
            )
        )
        if is_started:
            subscription.start()
        return reader, subscription

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until something holds."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            await asyncio.sleep(0)
        pytest.fail("it never came about")

    async def settle(self, subscription: LiveSubscription) -> None:
        """Until a subscription has caught up and nothing more comes by itself."""
        await self.until(lambda: not subscription.is_behind)
        for _ in range(20):
            await asyncio.sleep(0)


async def publish_batch(broker: Broker | Access, batch: Batch) -> None:
    """As listeners do it: whenever there is no room, wait and try again."""
    while True:
        try:
            await broker.publish(batch)
        except BusyError:
            await broker.wait_room(batch.envelope.topics[0])
        else:
            return


Scene = Callable[[At], Awaitable[None]]


def scene(
    *rules: TopicRule,
    settings: BrokerSettings | None = None,
    log: LogSettings = LOG,
    patterns: Sequence[str] = ("",),
) -> Callable[[Scene], Callable[[Store, str], None]]:
    """Makes a test of a coroutine: it runs once on a fake disk and once in memory, with each pattern."""

    def decorate(run: Scene) -> Callable[[Store, str], None]:
        @pytest.mark.parametrize("store", list(Store), ids=lambda store: store.value)
        @pytest.mark.parametrize("pattern", patterns)
        def test(store: Store, pattern: str) -> None:
            whole = Settings(topics=rules, log=log, broker=settings or BrokerSettings())
            asyncio.run(_run(store, whole, pattern, run))

        test.__name__ = run.__name__
        test.__doc__ = run.__doc__
        return test

    return decorate


async def _run(store: Store, settings: Settings, pattern: str, run: Scene) -> None:
    clock = VirtualClock()
    workers = SimulatedWorkers(Random(run.__name__))
    disk = FakeDisk(1)
    broker = await Broker.open(
        settings,
        directory=None if store is Store.MEMORY else "data",
        disk=disk,
        clock=clock,
        workers=workers,
    )
    try:
        await run(At(broker, clock, store, pattern, disk))
    finally:
        await broker.close()
        workers.close()
