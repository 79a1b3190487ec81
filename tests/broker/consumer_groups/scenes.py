"""A broker that can be started anew on the same disk, and consumers that write down what they are leased."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from runnel.broker.broker import Broker
from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery
from runnel.config import BrokerSettings, LimitSettings, LogSettings, Settings, TopicRule
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.heads import Start
from runnel.formats.message import Message
from runnel.formats.work_heads import Attempt, Consume, DeliveryPart, SubscriptionState, WorkOptions
from tests.broker.scenes import TURNS_MAX, Store
from tests.fakes.clock import NS_PER_SECOND, VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers

LOG = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0)


@dataclass
class Worker:
    """A sink that keeps everything, and its consumer."""

    connection_id: int = 1
    peer: str = "a test"
    deliveries: list[WorkDelivery] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    parts: dict[tuple[str, int], DeliveryPart] = field(
        default_factory=dict
    )  # by topic and offset: its last lease
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    recalls: list[DeliveryPart] = field(default_factory=list)
    lates: list[DeliveryPart] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    error: RunnelError | None = None
    on_delivery: Callable[[], None] = lambda: None
    consumer: WorkConsumer = field(init=False)

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        self.deliveries += deliveries
        for delivery in deliveries:
            lease = delivery.lease
            batch = Batch.unpack(b"".join(delivery.buffers))
            assert len(batch) == delivery.messages
            assert delivery.each() == batch.messages()
            for message in batch:
                assert (message.topic, message.partition) == (lease.topic, lease.partition)
                assert lease.begin <= message.offset < lease.end
                self.messages.append(message)
                place = (message.topic, message.offset)
                self.parts[place] = DeliveryPart(lease.delivery, message.offset, message.offset + 1)
            for attempt in lease.attempts:
                self.attempts[lease.topic, attempt.offset] = attempt
        self.on_delivery()

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self.recalls += parts

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self.lates += parts

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        self.expired += deliveries

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self.error = error

    def offsets(self, topic: str = "a") -> list[int]:
        return [message.offset for message in self.messages if message.topic == topic]

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    def ack(self, *offsets: int, topic: str = "a") -> Sequence[DeliveryPart]:
        return self.consumer.ack((), [self.parts[topic, offset] for offset in offsets])

    def nack(
        self, *offsets: int, topic: str = "a", delay_ns: int | None = None
    ) -> Sequence[DeliveryPart]:
        parts = [self.parts[topic, offset] for offset in offsets]
        return self.consumer.nack(parts, delay_ns=delay_ns, reason="a test says so")


@dataclass
class Scene:
    """What a scene has in its hands."""

    settings: Settings
    store: Store
    clock: VirtualClock
    disk: FakeDisk
    workers: SimulatedWorkers
    broker: Broker = field(init=False)

    async def start(self) -> None:
        self.broker = await Broker.open(
            self.settings,
            directory=None if self.store is Store.MEMORY else "data",
            disk=self.disk,
            clock=self.clock,
            workers=self.workers,
        )

    async def restart(self) -> None:
        """As after an orderly end. What is in memory is gone, so this is for scenes on disk."""
        await self.broker.close()
        await self.start()

    async def publish(
        self, topic: str, *payloads: bytes, key: bytes | None = None, partition: int = 0
    ) -> Sequence[int]:
        """One batch; the offset of its first message."""
        messages = [Message(topic, payload, key, partition=partition) for payload in payloads]
        return (await self.broker.publish(Batch.from_messages(messages))).base_offsets

    async def consume(
        self,
        *patterns: str,
        subscription: str = "s",
        mode: str = "",
        member: str = "",
        window_messages: int = 1000,
        window_bytes: int = 2**24,
        start: Start | None = None,
        options: WorkOptions | None = None,
    ) -> Worker:
        worker = Worker()
        request = Consume(
            1,
            1,
            subscription,
            patterns,
            mode,
            window_messages,
            window_bytes,
            member,
            start,
            options,
        )
        worker.consumer = await self.broker.consumer_groups.consume(1, worker, request)
        worker.consumer.start()
        return worker

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until something holds."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            await asyncio.sleep(0)
        pytest.fail("it never came about")

    async def settle(self) -> None:
        """Let everything happen that happens by itself."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def until_dead(self, letters: int) -> None:
        for _ in range(100):
            if (await self.state()).dead >= letters:
                return
            await self.settle()
        pytest.fail(f"there never were {letters} dead letters")

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * NS_PER_SECOND))

    async def state(self, name: str = "s") -> SubscriptionState:
        return (await self.broker.consumer_groups.subscriptions(name))[0]

    async def backlog(self, name: str = "s") -> int:
        return sum(member.backlog for member in (await self.state(name)).members)


Play = Callable[[Scene], Awaitable[None]]


def scene(
    *rules: TopicRule,
    stores: Sequence[Store] = tuple(Store),
    log: LogSettings = LOG,
    limits: LimitSettings | None = None,
) -> Callable[[Play], Callable[[Store], None]]:
    """Makes a test of a coroutine: it runs once on a fake disk and once in memory."""

    def decorate(play: Play) -> Callable[[Store], None]:
        @pytest.mark.parametrize("store", stores, ids=lambda store: store.value)
        def test(store: Store) -> None:
            settings = Settings(
                topics=rules, log=log, limits=limits or LimitSettings(), broker=BrokerSettings()
            )
            asyncio.run(_run(store, settings, play))

        test.__name__ = play.__name__
        test.__doc__ = play.__doc__
        return test

    return decorate


async def _run(store: Store, settings: Settings, play: Play) -> None:
    workers = SimulatedWorkers(Random(play.__name__))
    at = Scene(settings, store, VirtualClock(), FakeDisk(1), workers)
    await at.start()
    try:
        await play(at)
    finally:
        await at.broker.close()
        workers.close()
