"""Monitoring: statistics, and the system topics."""

from __future__ import annotations

import json
from typing import Any

from runnel.client.consumer import Subscription
from runnel.config import Keep, Retain, Rotate, TopicRule
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, take, take_payloads, verb

LIVE = TopicRule(match="live/*", keep=Keep.NONE)
AGED = TopicRule(
    match="*", journal="main", rotate=Rotate(bytes_max=1), retain=Retain(age_ns=10 * 10**9)
)


async def event(events: Subscription, kind: str) -> dict[str, Any]:
    """The next event of a kind."""
    while True:
        [message] = await take(events, 1)
        told: dict[str, Any] = json.loads(message.payload)
        assert told["kind"] == message.tags["kind"]
        if told["kind"] == kind:
            return told


@verb(LIVE)
async def test_statistics_count_messages_in_and_out(stage: Stage) -> None:
    async with stage.bus.subscribe("a", "live/*") as subscription:
        await stage.publish("a", b"1", b"2")
        await stage.publish("live/a", b"3")
        await take(subscription, 3)
        await stage.bus.fetch("a")
        told = await stage.bus.statistics()
    totals, gauges = told["totals"], told["gauges"]
    # The counters contain the broker's own events, too.
    assert totals["messages_in"] >= 3
    assert totals["messages_out"] == 3 + 2
    assert totals["fetches"] == 1
    assert totals["topics_made"] >= 2
    assert gauges["subscriptions"] == 1
    assert gauges["topics_live"] >= 1


@verb()
async def test_metrics_come_with_the_clock_and_are_hidden_from_ordinary_patterns(
    stage: Stage,
) -> None:
    async with (
        stage.bus.subscribe("!system/metrics/broker") as metrics,
        stage.bus.subscribe("*") as everything,
    ):
        await stage.publish("a", b"1")
        stage.advance(1.1)
        [message] = await take(metrics, 1)
        told = json.loads(message.payload)
        assert told.keys() == (await stage.bus.statistics()).keys()
        await stage.publish("a", b"2")
        assert await take_payloads(everything, 2) == [b"1", b"2"]


@verb()
async def test_whoever_begins_to_watch_sees_the_latest_figures(stage: Stage) -> None:
    async with stage.bus.subscribe("!system/metrics/broker") as metrics:
        stage.advance(1.1)
        [first] = await take(metrics, 1)
    async with stage.bus.subscribe("!system/metrics/*", start="last") as metrics:
        topics = {message.topic: message for message in await take(metrics, 1)}
        while "!system/metrics/broker" not in topics:
            topics |= {message.topic: message for message in await take(metrics, 1)}
    assert topics["!system/metrics/broker"].payload == first.payload


@verb()
async def test_events_tell_of_topics(stage: Stage) -> None:
    async with stage.bus.subscribe("!system/events") as events:
        await stage.publish("a", b"x")
        made = await event(events, "topic_made")
        assert (made["subject"], made["keep"], made["journal"]) == ("a", "disk", "main")
        assert made["time_ns"] == stage.clock.time_ns()
        await stage.bus.purge_topic("a")
        assert (await event(events, "topic_purged"))["subject"] == "a"
        await stage.bus.delete_topic("a")
        assert (await event(events, "topic_deleted"))["subject"] == "a"


@verb(needs=[Ability.CREDIT])
async def test_events_tell_of_slow_readers(stage: Stage) -> None:
    async with (
        stage.bus.subscribe("!system/events") as events,
        stage.bus.subscribe("a", buffer_bytes=1),
    ):
        await stage.publish("a", b"1", b"2", b"3")
        assert (await event(events, "slow_reader"))["patterns"] == ["a"]


@verb(AGED)
async def test_events_tell_of_retention(stage: Stage) -> None:
    async with stage.bus.subscribe("!system/events") as events:
        await stage.publish("a", b"1", b"2")
        stage.advance(100)
        told = await event(events, "retention")
        assert told["segments_removed"] > 0


@verb(AGED, needs=[Ability.RESTART])
async def test_events_tell_of_files_that_rotate(stage: Stage) -> None:
    async with stage.bus.subscribe("!system/events") as events:
        await stage.publish("a", b"1", b"2", b"3")
        stage.advance(1.1)
        assert (await event(events, "segment_rotated"))["subject"] == "main/0"


@verb(needs=[Ability.GREETING])
async def test_welcome_tells_node_and_limits(stage: Stage) -> None:
    server = stage.bus.server
    assert (server.cluster, server.node) == ("runnel", "node-1")
    assert (server.message_bytes_max, server.batch_bytes_max) == (2**20, 2**22)
    assert await stage.bus.ping() >= 0
