"""A whole broker at work, and its `/metrics`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from runnel.broker.broker import Broker, LiveDelivery
from runnel.broker.consumer_groups.sink import WorkDelivery
from runnel.broker.fetcher import FetchRequest
from runnel.broker.live.subscription import SubscribeRequest
from runnel.config import (
    BrokerSettings,
    GrpcSettings,
    HttpSettings,
    Keep,
    NativeSettings,
    Settings,
    TopicRule,
)
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, GapState, Start
from runnel.formats.work_heads import Consume, DeliveryPart
from runnel.server import Server, open_server

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# What a name may be is what a label must bear.
HOSTILE = 'orders/"quoted"\\back{slash},é=1'
RULES = (
    TopicRule(match="live/*", keep=Keep.NONE),
    TopicRule(match="memory/*", keep=Keep.MEMORY),
)


class Scraped(msgspec.Struct):
    """A scrape, parsed."""

    text: str
    families: list[Metric]

    def value(self, name: str, **labels: str) -> float:
        (found,) = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        return float(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [
            dict(sample.labels)
            for family in self.families
            for sample in family.samples
            if sample.name == name
        ]


@asynccontextmanager
async def running(data: Path, **more: object) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    settings = msgspec.structs.replace(
        Settings(
            data=str(data),
            native=NativeSettings(listen="127.0.0.1:0"),
            http=HttpSettings(listen="127.0.0.1:0"),
            grpc=GrpcSettings(listen=None),
            broker=BrokerSettings(metrics_interval_ns=3600 * 10**9),  # they end when a test says so
            topics=RULES,
        ),
        **more,
    )
    async with open_server(settings) as server:
        url = f"http://{server.addresses['http']}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield server, client


async def scrape(client: httpx.AsyncClient, *, accept: str = "") -> Scraped:
    answer = await client.get("/metrics", headers={"accept": accept} if accept else {})
    assert answer.status_code == 200, answer.text
    is_open = answer.headers["content-type"].startswith("application/openmetrics-text")
    return Scraped(answer.text, list((parse_open if is_open else parse_text)(answer.text)))


class Reader:
    """A sink that lets everything pass."""

    connection_id = 1
    peer = "a test"

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None: ...
    def gap(self, subscription: int, gap: GapState) -> None: ...
    def ended(self, subscription: int, error: RunnelError) -> None: ...


class Worker:
    """A consumer that keeps what it is leased."""

    connection_id = 1
    peer = "a test"

    def __init__(self) -> None:
        self.deliveries: list[WorkDelivery] = []

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        self.deliveries += deliveries

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...
    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...
    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None: ...
    def consumer_ended(self, consumer: int, error: RunnelError) -> None: ...


async def scrape_at_work(server: Server, client: httpx.AsyncClient) -> Scraped:
    """With a row of everything: an interval has ended in which there was traffic."""
    await work(server.broker)
    # Readings are cached for fifty times as long as they took, and on a busy machine one from before the work may
    # have taken long.
    server.broker.monitor._stores.forget()
    server.broker.monitor._live.forget()
    server.broker.monitor._cursors.forget()
    await server.broker._reporter.report()
    scraped = await scrape(client)
    while "runnel_disk_free_bytes" not in scraped.text:  # a thread looks at the disk
        scraped = await scrape(client)
    return scraped


async def work(broker: Broker) -> None:
    """Something of everything: publishing, reading live, fetching, a cursor, acknowledged work."""
    now_ns = broker.clock.time_ns()
    subscription = await broker.subscribe(
        SubscribeRequest(
            1, Reader(), ["*"], Start("latest"), credit_bytes=2**30, overflow="drop_oldest"
        )
    )
    subscription.start()
    worker = Worker()
    request = Consume(1, 1, HOSTILE, patterns=[HOSTILE], mode="shared", start=Start("earliest"))
    consumer = await broker.consumer_groups.consume(1, worker, request)
    consumer.start()
    for topic in (HOSTILE, "memory/a", "live/a"):
        messages = [Message(topic, b"x" * 100, event_time_ns=now_ns - 10**9) for _ in range(10)]
        await broker.publish(Batch.from_messages(messages))
    await broker.fetch(FetchRequest(HOSTILE))
    await broker.cursors.set(HOSTILE, [CursorPlace(HOSTILE, 0, 3)])
    await broker.sync()
