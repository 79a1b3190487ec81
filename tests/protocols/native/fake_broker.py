"""A broker whose every answer the test decides: it records requests, and does what the test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from runnel.broker.broker import (
    Broker,
    ConnectionStats,
    FetchResult,
    Level,
    LiveDelivery,
    LiveSink,
    LiveSubscription,
    Published,
    ShardId,
)
from runnel.broker.cluster_nodes import ClusterNodes
from runnel.broker.connections import Connections
from runnel.broker.fetcher import FetchRequest
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.limits.quotas import Quotas
from runnel.broker.live.subscription import SubscribeRequest
from runnel.broker.monitoring.audit import Audit
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.pages import Listed, ListRequest
from runnel.broker.topics import TopicListRequest
from runnel.config import SecuritySettings
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.fakes.clock import VirtualClock
from tests.protocols.native.fake_work import FakeWork


@dataclass
class FakeSubscription:
    """Writes down what is done to it."""

    number: int
    sink: LiveSink
    patterns: Sequence[str]
    credit_bytes: int
    partitions: Sequence[wire.PartitionPlace] = ()
    shards: Sequence[wire.ShardPlace] = (wire.ShardPlace("main", 0, 1, 1),)
    elsewhere: Sequence[wire.Owner] = ()
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def grant(self, credit_bytes: int) -> None:
        self.credit_bytes += credit_bytes
        self.calls.append("grant")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")

    def deliver(self, payload: bytes) -> None:
        self.sink.deliver(
            self.number, LiveDelivery(ShardId("main"), 1, 2, (payload,), len(payload), 1)
        )


class FakeBroker:
    """Publishes are answered at once, until `holds_publishes`; then `pending` has their futures."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.audit = Audit(self.clock, lambda *_: None)
        self.metrics = Metrics(topics_max=10, journal_of=lambda _: "main")
        self.events = Events(self.clock)
        self.audit = Audit(self.clock, lambda *_: None)
        self.quotas = Quotas(SecuritySettings(), self.clock, self.metrics.counters, self.events)
        self.connections = Connections(LoopShare(), self.clock)
        self.nodes = ClusterNodes()
        self.connection_ids = itertools.count(1)
        self.published: list[bytes] = []
        self.pending: list[asyncio.Future[Published]] = []
        self.holds_publishes = False
        self.delivers_publishes = False  # at once, to every subscription
        self.refusals: list[Exception] = []  # raised by the next publishes, one each
        self.room = asyncio.Event()
        self.room_waits = 0
        self.subscriptions: list[FakeSubscription] = []
        self.may_subscribe = asyncio.Event()
        self.may_subscribe.set()
        self.fetches = 0
        self.shares_fetched = False  # several fetches wait for the same answer
        self.fetched: asyncio.Future[FetchResult] = asyncio.get_running_loop().create_future()
        self.topics_deleted: list[str] = []
        self.may_delete = asyncio.Event()
        self.may_delete.set()
        self.failure: Exception | None = None  # raised by the verbs that just answer
        self.consumer_groups = FakeWork()
        self.topics = FakeTopics(self._check)
        self.cursors = FakeCursors(self._check)

    @property
    def as_broker(self) -> Broker:
        return cast(Broker, self)

    def rows(self) -> list[ConnectionStats]:
        return [read() for rows in self.connections.listeners for read in rows().values()]

    async def warn_of_habits(self, where: str, patterns: Iterable[str]) -> None: ...

    # --- Verbs ---

    def publish(
        self, batch: Batch, level: Level | None = None, account: object = None
    ) -> asyncio.Future[Published]:
        return self._publish(batch.messages()[0].payload, level)

    def send(
        self,
        message: Message,
        level: Level | None = None,
        *,
        partition: int | None = None,
        account: object = None,
    ) -> asyncio.Future[Published]:
        return self._publish(message.payload, level)

    def _publish(self, payload: bytes, level: Level | None) -> asyncio.Future[Published]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.published.append(payload)
        if self.delivers_publishes:
            for subscription in self.subscriptions:
                subscription.deliver(payload)
        future: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        self.pending.append(future)
        if not self.holds_publishes:
            self.answer(future, level)
        return future

    def answer(self, future: asyncio.Future[Published], level: Level | None = None) -> None:
        number = self.pending.index(future) + 1
        future.set_result(Published([number], number, 1, 7, level or Level.STORED))

    async def wait_room(self, topic: str, partition: int | None = None) -> None:
        self.room_waits += 1
        await self.room.wait()

    async def subscribe(self, request: SubscribeRequest) -> LiveSubscription:
        await self.may_subscribe.wait()
        self._check()
        subscription = FakeSubscription(
            request.number, request.sink, request.patterns, request.credit_bytes
        )
        self.subscriptions.append(subscription)
        return cast(LiveSubscription, subscription)

    async def fetch(self, request: FetchRequest) -> FetchResult:
        self.fetches += 1
        return await asyncio.shield(self.fetched) if self.shares_fetched else await self.fetched

    async def delete_topic(self, name: str, *, part_only: bool = False) -> None:
        await self.may_delete.wait()
        self._check()
        self.topics_deleted.append(name)

    async def purge_topic(self, name: str, *, part_only: bool = False) -> None:
        self._check()

    def routes(self, topics: Sequence[str]) -> list[wire.Route]:
        self._check()
        return [wire.Route(topic, "disk", [wire.Owner("main", 0, 1)]) for topic in topics]

    async def new_term(self, producer: str) -> int:
        return 5

    def statistics(self) -> dict[str, object]:
        return {"node": "fake"}

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class FakeTopics:
    """The directory of a broker's topics."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    async def describe(
        self, name: str, *, asker: object, part_only: bool = False
    ) -> wire.TopicState:
        self._check()
        return wire.TopicState(name, "disk", "main", 1, 0, 0)

    async def list(self, request: TopicListRequest) -> tuple[list[wire.TopicState], bool]:
        return [wire.TopicState(request.pattern, "disk", "main", request.limit, 0, 0)], True


class FakeCursors:
    """The cursors of a broker."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    async def set(
        self,
        name: str,
        places: Sequence[wire.CursorPlace],
        account: object = None,
        *,
        ends: object = None,
    ) -> None:
        self._check()

    async def remove(self, name: str) -> None:
        self._check()

    def known(self, name: str) -> list[wire.CursorState]:
        return []

    async def list(self, name: str, **options: object) -> Sequence[wire.CursorState]:
        return [wire.CursorState(name, (), 0)]

    async def page(self, request: ListRequest[wire.CursorState]) -> Listed[wire.CursorState]:
        return [wire.CursorState("all", (), 0)], True
