"""Slow readers miss nothing of kept topics, and get a gap for what they miss of ephemeral ones."""

from __future__ import annotations

import asyncio

import pytest

from runnel.client.consumer import Subscription
from runnel.config import BrokerSettings, Keep, Retain, TopicRule
from runnel.errors import SlowReaderError
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, nothing_more, take, take_payloads, until, verb

LIVE = TopicRule(match="live/*", keep=Keep.NONE)
MEMORY = TopicRule(match="m/*", keep=Keep.MEMORY)
SMALL_QUEUE = BrokerSettings(live_queue_bytes_max=4000)
SIZE = 500  # bytes of a payload: a few of them fill buffer and queue
LARGE = 2**18  # bytes: some dozens are more than sockets and windows hold


def numbered(number: int) -> bytes:
    return (b"%d" % number).ljust(SIZE)


async def read_on(subscription: Subscription, seen: list[bytes]) -> None:
    while True:
        seen += await take_payloads(subscription, 1)


@verb(MEMORY)
async def test_slow_reader_of_kept_topics_catches_up_and_misses_nothing(stage: Stage) -> None:
    for topic in ("d", "m/a"):
        for pattern in (topic, f"{topic[:-1]}?"):
            first = (await stage.bus.publish(topic, b"begin")).offset + 1
            async with stage.bus.subscribe(pattern, buffer_bytes=1000) as slow:
                for number in range(100):
                    await stage.bus.publish(topic, numbered(number))
                messages = await take(slow, 100)
                assert [m.offset for m in messages] == list(range(first, first + 100))
                assert [m.payload for m in messages] == [numbered(n) for n in range(100)]
                await stage.bus.publish(topic, b"live again")
                assert await take_payloads(slow, 1) == [b"live again"]
                assert not slow.gaps


@verb(TopicRule(match="a", retain=Retain(age_ns=10**9)), needs=[Ability.CREDIT])
async def test_slow_reader_by_pattern_is_told_what_retention_took(stage: Stage) -> None:
    async with stage.bus.subscribe("?", buffer_bytes=1) as slow:
        for number in range(10):
            await stage.bus.publish("a", numbered(number))
        stage.advance(5)
        await stage.bus.publish("a", b"young")
        messages = await take(slow, 1)
        while messages[-1].payload != b"young":
            messages += await take(slow, 1)
    assert len(messages) < 11
    assert {gap.reason for gap in slow.gaps} == {"retention"}


@verb(TopicRule(match="a", retain=Retain(age_ns=10**9)), needs=[Ability.CREDIT])
async def test_slow_reader_of_a_topic_is_told_what_retention_took(stage: Stage) -> None:
    async with stage.bus.subscribe("a", buffer_bytes=1) as slow:
        for number in range(10):
            await stage.bus.publish("a", numbered(number))
        stage.advance(5)
        await stage.bus.publish("a", b"young")
        messages = await take(slow, 1)
        while messages[-1].payload != b"young":
            messages += await take(slow, 1)
    [gap] = slow.gaps
    assert (gap.reason, gap.topic, gap.missed) == ("retention", "a", 11 - len(messages))


@verb()
async def test_slow_reader_does_not_slow_another(stage: Stage) -> None:
    async with (
        stage.bus.subscribe("a", buffer_bytes=1) as slow,
        stage.bus.subscribe("a") as quick,
    ):
        for number in range(50):
            await stage.bus.publish("a", numbered(number))
            assert await take_payloads(quick, 1) == [numbered(number)]
        assert await take_payloads(slow, 50) == [numbered(number) for number in range(50)]


@verb(needs=[Ability.CREDIT, Ability.ALONE])
async def test_slow_reader_is_seen_in_the_statistics(stage: Stage) -> None:
    async with stage.bus.subscribe("a", buffer_bytes=1) as slow:
        for number in range(10):
            await stage.bus.publish("a", numbered(number))
        told = await stage.bus.statistics()
        assert told["gauges"]["subscriptions_behind"] == 1
        await take(slow, 10)
        waiting = asyncio.ensure_future(
            take_payloads(slow, 1)
        )  # a reader that waits has read the rest
        await until(stage.bus.statistics, lambda told: not told["gauges"]["subscriptions_behind"])
        await stage.bus.publish("a", b"live again")
        assert await waiting == [b"live again"]


@verb(LIVE, broker=SMALL_QUEUE, needs=[Ability.CREDIT])
async def test_oldest_are_dropped_and_the_reader_is_told_how_many_of_which_topic(
    stage: Stage,
) -> None:
    async with stage.bus.subscribe("live/*", buffer_bytes=1000) as slow:
        for number in range(40):
            await stage.bus.publish(f"live/{'ab'[number % 2]}", numbered(number))
        messages = await take(slow, 1)
        while messages[-1].payload != numbered(39):
            messages += await take(slow, 1)
    for topic, last in (("live/a", 20), ("live/b", 20)):
        offsets = [message.offset for message in messages if message.topic == topic]
        missed = set(range(1, last + 1)) - set(offsets)
        gaps = [gap for gap in slow.gaps if gap.topic == topic]
        assert offsets == sorted(set(offsets))
        assert sum(gap.missed for gap in gaps) == len(missed) > 0
        assert {gap.reason for gap in gaps} == {"overflow"}
        told = {n for gap in gaps for n in range(gap.first_offset, gap.next_offset)}
        assert missed <= told


@verb(LIVE, broker=SMALL_QUEUE, needs=[Ability.CREDIT])
async def test_newest_of_each_topic_stays(stage: Stage) -> None:
    async with stage.bus.subscribe("live/*", overflow="newest_per_topic", buffer_bytes=600) as slow:
        for number in range(60):
            await stage.bus.publish(f"live/{'abc'[number % 3]}", numbered(number))
        messages = await take(slow, 1)
        newest = {numbered(number) for number in (57, 58, 59)}
        while newest - {message.payload for message in messages}:
            messages += await take(slow, 1)
        await nothing_more(stage, slow)
    for topic in ("live/a", "live/b", "live/c"):
        offsets = [message.offset for message in messages if message.topic == topic]
        assert offsets == sorted(offsets)
        missed = sum(gap.missed for gap in slow.gaps if gap.topic == topic)
        assert missed == 20 - len(offsets) > 0


@verb(LIVE, broker=SMALL_QUEUE, needs=[Ability.CREDIT])
async def test_disconnect_ends_the_subscription_and_no_other(stage: Stage) -> None:
    async with (
        stage.bus.subscribe("live/a", overflow="disconnect", buffer_bytes=1000) as slow,
        stage.bus.subscribe("live/a") as quick,
    ):
        for number in range(40):
            await stage.bus.publish("live/a", numbered(number))
        seen: list[bytes] = []
        with pytest.raises(SlowReaderError, match=r"broker\.live_queue_bytes_max = 4000"):
            await read_on(slow, seen)
        assert seen == [numbered(number) for number in range(len(seen))]
        assert await take_payloads(quick, 40) == [numbered(number) for number in range(40)]
        assert (await stage.bus.publish("live/a", b"after")).receivers == 1


@verb(LIVE, broker=SMALL_QUEUE)
async def test_reader_that_does_not_read_is_told_what_it_missed_however_much_was_under_way(
    stage: Stage,
) -> None:
    async with stage.bus.subscribe("live/a", buffer_bytes=1) as slow:
        for number in range(80):
            await stage.bus.publish("live/a", (b"%d" % number).ljust(LARGE))
        messages = await take(slow, 1)
        while not messages[-1].payload.startswith(b"79 "):
            messages += await take(slow, 1)
        missed = sum(gap.missed for gap in slow.gaps)
        assert {gap.reason for gap in slow.gaps} == {"overflow"}
        assert len(messages) + missed == 80
        assert [m.offset for m in messages] == sorted({m.offset for m in messages})


@verb(LIVE, broker=SMALL_QUEUE)
async def test_reader_with_room_misses_nothing_of_a_topic_that_is_not_kept(stage: Stage) -> None:
    async with stage.bus.subscribe("live/a") as reader:
        for number in range(100):
            await stage.bus.publish("live/a", numbered(number))
        assert await take_payloads(reader, 100) == [numbered(number) for number in range(100)]
        assert not reader.gaps


@verb(LIVE, MEMORY, broker=SMALL_QUEUE, needs=[Ability.CREDIT])
async def test_overflow_of_topics_not_kept_costs_nothing_of_kept_ones(stage: Stage) -> None:
    async with stage.bus.subscribe("*", buffer_bytes=1000) as slow:
        for number in range(50):
            for topic in ("live/a", "d", "m/a"):
                await stage.bus.publish(topic, numbered(number))
        kept: dict[str, list[int]] = {"d": [], "m/a": []}
        while min(map(len, kept.values())) < 50:
            [message] = await take(slow, 1)
            if message.topic in kept:
                kept[message.topic].append(message.offset)
        assert list(kept.values()) == [list(range(1, 51))] * 2
        assert {gap.topic for gap in slow.gaps} == {"live/a"}
