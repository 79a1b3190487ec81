"""Metrics as messages, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runnel.broker.monitoring.metric_tables import ConnectionStats, LiveSubscriptionStats
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.monitoring.reporter import Reporter
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.config import BrokerSettings, Keep, Settings, TopicRule
from runnel.errors import LimitExceededError
from runnel.log.log import LogStatistics, ShardId, ShardStatistics
from runnel.log.memory import MemoryLog
from runnel.topics.policies import Policies
from tests.broker.fake_publisher import FakePublisher, settle
from tests.fakes.clock import VirtualClock
from tests.log.samples import one

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


def shard(journal: str, **values: int) -> ShardStatistics:
    named = set(ShardStatistics.__struct_fields__) - {"shard", "is_read_only"}
    numbers = {name: values.pop(name, 0) for name in named}
    assert not values
    return ShardStatistics(shard=ShardId(journal), is_read_only=False, **numbers)


class FakeLog:
    """A log that has whatever statistics a test gives it."""

    def __init__(self) -> None:
        self.shards: list[ShardStatistics] = []

    def statistics(self) -> LogStatistics:
        return LogStatistics(topics=len(self.shards), shards=self.shards, open_files=3, damage=())


class Watched:
    """A reporter, everything it looks at, and what it published."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.clock = VirtualClock()
        self.log = FakeLog()
        self.metrics = Metrics(
            topics_max=self.settings.broker.metrics_topics_max,
            journal_of=lambda topic: topic.split("/")[0],
        )
        self.stores = StoreStatistics({"disk": self.log}, self.clock)
        self.stores.register(self.metrics)
        self.published = FakePublisher()
        self.connections: list[ConnectionStats] = []
        self.subscriptions: list[LiveSubscriptionStats] = []
        self.reporter = Reporter(
            self.settings,
            self.clock,
            self.metrics,
            self.stores,
            self.published.publish,
            connections=self.read_connections,
            subscriptions=lambda: self.subscriptions,
        )

    async def read_connections(self) -> dict[int, ConnectionStats]:
        return {row.id: row for row in self.connections}

    def last(self, name: str) -> Any:
        return self.published.documents(f"!system/metrics/{name}")[-1]

    async def pass_time(self, ns: int = SECOND_NS) -> None:
        self.clock.advance(ns)
        await settle(20)


def run(scenario: Callable[[Watched], Awaitable[None]], settings: Settings | None = None) -> None:
    async def main() -> None:
        watched = Watched(settings)
        running = asyncio.get_running_loop().create_task(watched.reporter.run())
        await settle(5)
        try:
            await scenario(watched)
        finally:
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())


def test_all_documents_are_published_every_interval() -> None:
    async def scenario(watched: Watched) -> None:
        await watched.pass_time(SECOND_NS - 1)
        assert not watched.published.seen
        await watched.pass_time(1)
        names = [topic.removeprefix("!system/metrics/") for topic, _, _ in watched.published.seen]
        assert names == ["broker", "topics", "journals", "connections", "subscriptions"]
        await watched.pass_time()
        assert len(watched.published.seen) == 10
        for _, document, _ in watched.published.seen:
            assert document["node"] == "node-1"
            assert document["time_ns"] > 0

    run(scenario)


def test_interval_is_a_setting() -> None:
    async def scenario(watched: Watched) -> None:
        for _ in range(10):
            await watched.pass_time(100 * MILLISECOND_NS)
        assert len(watched.published.documents("!system/metrics/broker")) == 10

    run(scenario, Settings(broker=BrokerSettings(metrics_interval_ns=100 * MILLISECOND_NS)))


def test_rates_are_per_second_of_the_interval_and_totals_go_on() -> None:
    async def scenario(watched: Watched) -> None:
        counters = watched.metrics.counters
        counters.messages_in += 500
        await watched.pass_time()
        counters.messages_in += 250
        counters.messages_out += 10
        await watched.pass_time()
        document = watched.last("broker")
        assert document["rates"]["messages_in"] == 250
        assert document["rates"]["commands_in"] == 250
        assert document["rates"]["commands_out"] == 10
        assert document["totals"]["messages_in"] == 750
        assert document["uptime_ns"] == 2 * SECOND_NS

    run(scenario)


def test_ticks_that_a_busy_loop_missed_are_not_made_up_for() -> None:
    async def scenario(watched: Watched) -> None:
        watched.metrics.counters.messages_in += 350
        watched.metrics.traffic.count_in("a", 350, 3500)
        await watched.pass_time(7 * SECOND_NS // 2)
        (document,) = watched.published.documents("!system/metrics/broker")
        assert document["interval_ns"] == 7 * SECOND_NS // 2
        assert document["rates"]["messages_in"] == 100
        assert watched.last("topics")["topics"][0]["rates"]["bytes_in"] == 1000
        await watched.pass_time(SECOND_NS // 2)  # back in step
        assert len(watched.published.documents("!system/metrics/broker")) == 2
        assert watched.last("broker")["interval_ns"] == SECOND_NS // 2

    run(scenario)


def test_histograms_tell_of_the_interval_and_of_everything() -> None:
    async def scenario(watched: Watched) -> None:
        watched.metrics.publish_time.observe(5 * MILLISECOND_NS)
        await watched.pass_time()
        watched.metrics.publish_time.observe(1 * MILLISECOND_NS)
        await watched.pass_time()
        told = watched.last("broker")["histograms"]["publish_time"]
        assert (told["interval"]["count"], told["interval"]["max_ns"]) == (1, MILLISECOND_NS)
        assert (told["total"]["count"], told["total"]["max_ns"]) == (2, 5 * MILLISECOND_NS)

    run(scenario)


def test_document_can_be_had_at_any_time_without_ending_the_interval() -> None:
    async def scenario(watched: Watched) -> None:
        watched.metrics.counters.messages_in += 50
        watched.clock.advance(SECOND_NS // 2)
        before: Any = watched.reporter.document()
        assert before["rates"]["messages_in"] == 100  # since the beginning
        await watched.pass_time(SECOND_NS // 2)
        watched.metrics.counters.messages_in += 7
        watched.clock.advance(1)
        now: Any = watched.reporter.document()
        assert now["totals"]["messages_in"] == 57
        assert now["rates"]["messages_in"] == 50  # of the last whole interval
        await watched.pass_time()
        assert watched.last("broker")["rates"]["messages_in"] == pytest.approx(7, rel=1e-6)

    run(scenario)


def test_gauges_of_the_logs_are_in_the_document() -> None:
    async def scenario(watched: Watched) -> None:
        watched.log.shards = [
            shard("a", stored_bytes=10, segments=1, queued_bytes=5, syncs=2),
            shard("b", stored_bytes=20, segments=4),
        ]
        await watched.pass_time()
        document = watched.last("broker")
        assert document["gauges"]["stored_bytes"] == 30
        assert document["gauges"]["segments"] == 5
        assert document["gauges"]["queued_bytes"] == 5
        assert document["gauges"]["open_files"] == 3
        assert document["totals"]["syncs"] == 2

    run(scenario)


def test_hundred_thousand_topics_do_not_drown_a_dashboard() -> None:
    async def scenario(watched: Watched) -> None:
        for number in range(100_000):
            watched.metrics.traffic.count_in(f"j{number % 500}/{number}", 1, 10)
        watched.metrics.traffic.count_in("j0/0", 50, 500)
        await watched.pass_time()
        document = watched.last("topics")
        assert len(document["topics"]) == 100
        assert document["topics"][0]["topic"] == "j0/0"
        assert len(document["others"]) == 101
        assert document["others"][-1]["journal"] == ""  # of journals that have no row
        counted = document["topics"] + document["others"]
        assert sum(row["rates"]["messages_in"] for row in counted) == 100_050
        journals = watched.last("journals")
        assert len(journals["journals"]) == 100
        rows = [*journals["journals"], journals["others"]]
        assert sum(row["rates"]["messages_in"] for row in rows) == 100_050
        assert journals["others"]["journals"] == 400

    run(scenario)


def test_journals_tell_traffic_storage_and_recent_sync_times() -> None:
    async def scenario(watched: Watched) -> None:
        watched.log.shards = [
            shard("a", stored_bytes=10, syncs=10, sync_time_ns=1000, sync_time_max_ns=500),
            shard("b", stored_bytes=99),
        ]
        await watched.pass_time()
        watched.log.shards[0] = shard(
            "a", stored_bytes=70, syncs=14, sync_time_ns=1400, sync_time_max_ns=500
        )
        watched.metrics.traffic.count_in("a/x", 5, 50)
        watched.metrics.traffic.count_out("live/x", 2, 20)
        await watched.pass_time()
        rows = {row["journal"]: row for row in watched.last("journals")["journals"]}
        assert list(rows) == ["a", "live", "b"]  # the busiest, then the largest
        assert rows["a"]["stored_bytes"] == 70
        assert rows["a"]["sync_time_mean_ns"] == 100
        assert rows["a"]["sync_time_max_ns"] == 500
        assert rows["a"]["rates"]["messages_in"] == 5
        assert rows["b"]["sync_time_mean_ns"] is None  # it had none
        assert "stored_bytes" not in rows["live"]  # nothing is kept
        assert watched.last("journals")["total"]["stored_bytes"] == 169

    run(scenario)


def connection(number: int, **values: int) -> ConnectionStats:
    return ConnectionStats(
        number, "native", f"10.0.0.1:{number}", "test", 7, 1, 0, flow=Flow(**values)
    )


def test_busiest_connections_come_first_and_no_more_than_a_hundred() -> None:
    async def scenario(watched: Watched) -> None:
        watched.connections = [connection(number, messages_in=1000) for number in range(200)]
        await watched.pass_time()
        watched.connections = [
            connection(number, messages_in=1000 + number, bytes_out=number) for number in range(200)
        ]
        await watched.pass_time()
        document = watched.last("connections")
        assert document["count"] == 200
        assert len(document["connections"]) == 100
        first = document["connections"][0]
        assert (first["id"], first["peer"], first["client"]) == (199, "10.0.0.1:199", "test")
        assert first["rates"]["messages_in"] == 199
        assert first["totals"]["messages_in"] == 1199

    run(scenario)


def test_rates_of_a_new_connection_are_of_what_it_did_since() -> None:
    async def scenario(watched: Watched) -> None:
        await watched.pass_time()
        watched.connections = [connection(1, messages_out=40)]
        await watched.pass_time()
        (row,) = watched.last("connections")["connections"]
        assert row["rates"]["messages_out"] == 40

    run(scenario)


def test_most_behind_subscriptions_come_first() -> None:
    def subscription(number: int, *, lag: int = 0, queued: int = 0) -> LiveSubscriptionStats:
        return LiveSubscriptionStats(1, number, "peer", ["a", "b"] * 10, lag > 0, lag, queued, 0)

    async def scenario(watched: Watched) -> None:
        watched.subscriptions = [subscription(number) for number in range(150)]
        watched.subscriptions += [
            subscription(200, lag=5),
            subscription(201, lag=900),
            subscription(202, queued=10),
        ]
        await watched.pass_time()
        document = watched.last("subscriptions")
        assert (document["count"], document["behind"]) == (153, 2)
        assert len(document["subscriptions"]) == 100
        rows = document["subscriptions"][:3]
        assert [row["number"] for row in rows] == [201, 200, 202]
        assert [row["state"] for row in rows] == ["behind", "behind", "live"]
        assert rows[0]["lag"] == 900
        assert rows[0]["pattern_count"] == 20
        assert len(rows[0]["patterns"]) == 4

    run(scenario)


def test_what_cannot_be_published_is_reported_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(watched: Watched) -> None:
        watched.published.failure = LimitExceededError("too large")
        await watched.pass_time()
        await watched.pass_time()
        assert len(caplog.records) == 5  # one a document
        watched.published.failure = None
        await watched.pass_time()
        assert len(watched.published.seen) == 5

    run(scenario)


def test_a_source_that_fails_does_not_end_the_reporting(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(watched: Watched) -> None:
        broken = True

        def read() -> int:
            if broken:
                raise KeyError("a bug")
            return 5

        watched.metrics.add_gauge("odd", "A gauge.", read)
        await watched.pass_time()
        assert caplog.messages == ["metrics could not be sampled"]
        broken = False
        await watched.pass_time()
        assert watched.last("broker")["gauges"]["odd"] == 5

    run(scenario)


def test_statistics_of_a_real_log_are_understood() -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        rules = (TopicRule(match="*", keep=Keep.MEMORY, journal="m"),)
        log = MemoryLog(settings=Settings(), policies=Policies(rules), clock=clock)
        await log.append(one("a", b"1", b"2"))
        reading = StoreStatistics({"memory": log}, clock).read()
        assert reading.journals["m"].messages == 2
        assert reading.total.stored_bytes == reading.journals["m"].stored_bytes > 0
        assert reading.largest == ["m"]

    asyncio.run(scenario())
