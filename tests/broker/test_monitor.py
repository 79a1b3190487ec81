"""A broker that is watched: ages at delivery, limits, troubles, the loop's lag."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from runnel.broker.broker import Broker
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.broker.monitoring.histogram import TimeHistogram
from runnel.broker.monitoring.loop_lag import LoopLag
from runnel.config import LogSettings
from runnel.errors import DiskFullError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from runnel.formats.work_heads import Consume
from tests.broker.consumer_groups.scenes import Worker
from tests.broker.scenes import LIVE, At, Store, scene
from tests.fakes.disk import Kind

SECOND_NS = 1_000_000_000
# More than any disk has: publishing would be refused.
FULL = LogSettings(allocate_bytes=4096, disk_reserve_bytes=2**62)


async def publish(at: At, topic: str, *, age_s: int | None, codec: Codec = Codec.NONE) -> None:
    now_ns = at.clock.time_ns()
    event_time_ns = 0 if age_s is None else now_ns - age_s * SECOND_NS
    messages = [Message(topic, b"x" * 100, event_time_ns=event_time_ns) for _ in range(5)]
    await at.broker.publish(Batch.from_messages(messages, codec=codec))


def used(broker: Broker) -> dict[str, Any]:
    return {setting: each["used"] for setting, each in broker.metrics.limits().items()}


# --- Ages ---


@scene(LIVE, patterns=("a", "live/a"))
async def test_age_at_delivery_is_measured_once_a_batch_that_somebody_was_sent(at: At) -> None:
    age = at.broker.metrics.live_age
    await publish(at, at.pattern, age_s=1)
    assert age.total().count == 0  # it has no readers
    await at.subscribe(at.pattern)
    await at.subscribe("*")
    await publish(at, at.pattern, age_s=3)
    assert (age.total().count, age.total().sum_ns) == (1, 3 * SECOND_NS)


@scene(LIVE, patterns=("a", "live/a"))
async def test_without_an_event_time_and_compressed_there_is_no_age(at: At) -> None:
    await at.subscribe(at.pattern)
    await publish(at, at.pattern, age_s=None)
    await publish(at, at.pattern, age_s=5, codec=Codec.ZSTD)
    assert at.broker.metrics.live_age.total().count == 0


@scene()
async def test_what_the_broker_says_itself_has_no_age(at: At) -> None:
    _, subscription = await at.subscribe("!system/*")
    await at.settle(subscription)
    at.clock.advance(SECOND_NS)
    await at.settle(subscription)
    assert at.broker.metrics.totals()["deliveries"] > 0
    assert at.broker.metrics.live_age.total().count == 0


@scene()
async def test_age_of_acknowledged_work_is_that_of_the_message_when_it_is_leased(at: At) -> None:
    await publish(at, "a", age_s=1)
    at.clock.advance(10 * SECOND_NS)
    worker = Worker()
    worker.consumer = await at.broker.consumer_groups.consume(
        1, worker, Consume(1, 1, "s", ["a"], "shared")
    )
    worker.consumer.start()
    await at.until(lambda: len(worker.messages) == 5)
    seen = at.broker.metrics.work_age.total()
    assert (seen.count, seen.sum_ns) == (1, 11 * SECOND_NS)


# --- Traffic ---


@scene()
async def test_fetched_and_leased_messages_are_traffic_of_their_topic(at: At) -> None:
    await publish(at, "a", age_s=1)
    traffic = at.broker.metrics.traffic
    traffic.end_interval()
    await at.broker.fetch(FetchRequest("a"))
    worker = Worker()
    worker.consumer = await at.broker.consumer_groups.consume(
        1, worker, Consume(1, 1, "s", ["a"], "shared")
    )
    worker.consumer.start()
    await at.until(lambda: len(worker.messages) == 5)
    rows = {row.topic: row.flow for row in traffic.end_interval().busiest}
    assert rows["a"].messages_out == 10


# --- Limits ---


@scene()
async def test_everything_in_use_is_reported_beside_its_limit(at: At) -> None:
    await publish(at, "a", age_s=1)
    await at.subscribe("a")
    await at.broker.cursors.set("c", [CursorPlace("a", 0, 1)])
    await at.broker.consumer_groups.make_subscription(SubscriptionRequest("s", ["a"], "shared"))
    batch = Batch.from_messages([Message("a", b"1")], producer="shop", term=1, number=0)
    await at.broker.publish(batch)
    await at.broker.monitor.refresh()
    in_use = used(at.broker)
    assert in_use["limits.topics_max"] >= 1
    assert in_use["limits.cursors_max"] == 1
    assert in_use["limits.durable_subscriptions_max"] == 1
    assert in_use["limits.producers_max"] == 1
    assert in_use["broker.subscriptions_max"] == 1
    assert in_use["log.write_queue_bytes_max"] == 0
    assert (in_use["log.memory_journal_bytes_max"] > 0) == (at.store is Store.MEMORY)


@scene()
async def test_limits_are_published(at: At) -> None:
    reader, subscription = await at.subscribe("!system/metrics/broker")
    await at.settle(subscription)
    at.clock.advance(SECOND_NS)
    await at.settle(subscription)
    document = msgspec.json.decode(reader.messages[-1].payload)
    assert document["limits"]["broker.subscriptions_max"] == {
        "limit": 100_000,
        "used": 1,
        "at_limit": "refused",
    }
    assert document["histograms"].keys() >= {"live_age", "work_age", "loop_lag"}
    assert document["gauges"]["ready"] == 1


# --- Troubles ---


@scene(log=FULL)
async def test_full_disk_is_a_trouble_that_ends_being_ready(at: At) -> None:
    watching = asyncio.ensure_future(at.broker.monitor.watch_disk())
    if at.store is Store.MEMORY:
        await watching  # there is none to watch
        assert not at.broker.monitor.troubles()
        return
    await at.until(lambda: bool(at.broker.monitor.troubles()))
    (trouble,) = at.broker.monitor.troubles()
    assert trouble.startswith("the disk is full: ")
    gauges = at.broker.metrics.gauges()
    assert gauges["ready"] == 0
    assert gauges["disk_reserve_bytes"] == 2**62
    watching.cancel()
    await asyncio.wait({watching})


@scene(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=50_000))
async def test_a_disk_that_publishing_has_filled_up_to_the_reserve_is_a_trouble(at: At) -> None:
    if at.store is Store.MEMORY:
        return
    batch_bytes_max = at.broker.settings.limits.batch_bytes_max
    at.disk.capacity_bytes = at.disk.used_bytes + 50_000 + batch_bytes_max + 4_000
    watching = asyncio.ensure_future(at.broker.monitor.watch_disk())
    await at.until(lambda: "disk_full" in at.broker.metrics.gauges())
    assert not at.broker.monitor.troubles()
    with suppress(DiskFullError):
        while True:
            await at.publish("a", b"x" * 500_000)
    # What is left is more than the reserve, and yet the next one is refused.
    assert at.disk.room_bytes > 50_000
    at.clock.advance(20 * SECOND_NS)
    await at.until(lambda: bool(at.broker.monitor.troubles()))
    (trouble,) = at.broker.monitor.troubles()
    assert "log.disk_reserve_bytes = 50000" in trouble
    assert at.broker.metrics.gauges()["disk_full"] == 1
    at.disk.capacity_bytes = None
    at.clock.advance(SECOND_NS)
    await at.until(lambda: not at.broker.monitor.troubles())
    watching.cancel()
    await asyncio.wait({watching})


@scene()
async def test_inodes_that_run_out_are_a_trouble(at: At) -> None:
    if at.store is Store.MEMORY:
        return
    at.disk.room_files = 3
    watching = asyncio.ensure_future(at.broker.monitor.watch_disk())
    await at.until(lambda: bool(at.broker.monitor.troubles()))
    assert at.broker.monitor.troubles() == ["the disk is full: 3 more files can be made (inodes)"]
    assert at.broker.metrics.gauges()["disk_full"] == 1
    at.disk.room_files = 1000
    at.clock.advance(SECOND_NS)
    await at.until(lambda: not at.broker.monitor.troubles())
    watching.cancel()
    await asyncio.wait({watching})


@scene()
async def test_a_refusal_for_want_of_room_is_a_trouble_for_a_while(at: At) -> None:
    """A user's quota does not show in what is free."""
    if at.store is Store.MEMORY:
        return
    await at.publish("a", b"1")
    at.disk.fail(Kind.WRITE, errno.EDQUOT)
    with pytest.raises(DiskFullError):
        await at.publish("a", b"2")
    (trouble,) = at.broker.monitor.troubles()
    assert "refused within the last 10 s" in trouble
    at.clock.advance(10 * SECOND_NS)
    assert not at.broker.monitor.troubles()


# --- The loop ---


def test_loop_that_is_held_up_is_seen_to_lag() -> None:
    async def main() -> None:
        histogram = TimeHistogram()
        lag = LoopLag(histogram)
        began = time.perf_counter()
        while time.perf_counter() - began < 0.15:
            pass  # the timer was due after 0.1 s
        await asyncio.sleep(0)  # the loop looks at its timers
        await asyncio.sleep(0)
        lag.close()
        assert histogram.total().max_ns >= 40_000_000

    asyncio.run(main())
