"""Live subscriptions: where they start, which topics they match, and that they miss and repeat nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from runnel.client import Gap
from runnel.config import Keep, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, OffsetAheadError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, nothing_more, take, take_payloads, verb

SPREAD = TopicRule(match="p/*", partitions=3)
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=300))
LIVE = TopicRule(match="live/*", keep=Keep.NONE)
STATE = TopicRule(match="state/*", keep=Keep.NONE, last_value=True)
KINDS = (TopicRule(match="m/*", keep=Keep.MEMORY), LIVE)


# --- Start ---


@verb()
async def test_latest_begins_with_what_comes_next(stage: Stage) -> None:
    await stage.publish("a", b"before")
    async with stage.bus.subscribe("a") as subscription:
        await stage.publish("a", b"1", b"2")
        messages = await take(subscription, 2)
    assert [(m.payload, m.offset) for m in messages] == [(b"1", 2), (b"2", 3)]


@verb(SMALL)
async def test_earliest_gives_all_there_is_and_goes_on_live(stage: Stage) -> None:
    await stage.publish("a", *(b"%d" % number for number in range(30)))
    async with (
        stage.bus.subscribe("a", start="earliest") as literal,
        stage.bus.subscribe("?", start="earliest") as glob,
    ):
        await stage.publish("a", *(b"%d" % number for number in range(30, 60)))
        for subscription in (literal, glob):
            messages = await take(subscription, 60)
            assert [message.payload for message in messages] == [b"%d" % n for n in range(60)]
            assert [message.offset for message in messages] == list(range(1, 61))


@verb()
async def test_last_gives_the_last_of_every_topic_then_live(stage: Stage) -> None:
    for topic in ("s/a", "s/b", "other"):
        await stage.publish(topic, b"old", b"last of " + topic.encode())
    async with stage.bus.subscribe("s/*", start="last") as subscription:
        assert sorted(await take_payloads(subscription, 2)) == [b"last of s/a", b"last of s/b"]
        await stage.publish("s/b", b"new")
        assert await take_payloads(subscription, 1) == [b"new"]
        await nothing_more(stage, subscription)


@verb(SPREAD)
async def test_last_gives_the_last_of_every_partition(stage: Stage) -> None:
    for number in range(6):
        await stage.bus.publish("p/a", b"%d" % number, partition=number % 2)
    async with stage.bus.subscribe("p/a", start="last") as subscription:
        assert sorted(await take_payloads(subscription, 2)) == [b"4", b"5"]
        await nothing_more(stage, subscription)


@verb(needs=[Ability.OFFSETS])
async def test_offset_of_one_topic(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    async with stage.bus.subscribe("a", start=2) as subscription:
        await stage.publish("a", b"4")
        assert await take_payloads(subscription, 3) == [b"2", b"3", b"4"]
    async with stage.bus.subscribe("a", start=5) as subscription:  # the next one
        await stage.publish("a", b"5")
        assert await take_payloads(subscription, 1) == [b"5"]


@verb(SPREAD, needs=[Ability.OFFSETS])
async def test_offsets_of_several_topics_and_partitions(stage: Stage) -> None:
    for partition in (0, 1, 2):
        for number in (1, 2, 3):
            await stage.bus.publish("p/a", b"%d.%d" % (partition, number), partition=partition)
    await stage.publish("b", b"b1", b"b2")
    places: dict[str | tuple[str, int], int] = {("p/a", 0): 3, ("p/a", 1): 2, "b": 2}
    async with stage.bus.subscribe("p/a", "b", start=places) as subscription:
        payloads = await take_payloads(subscription, 4)
        assert sorted(payloads) == [b"0.3", b"1.2", b"1.3", b"b2"]
        await nothing_more(stage, subscription)


@verb(SMALL, needs=[Ability.ALONE])
async def test_time_begins_with_what_was_received_then_or_later(stage: Stage) -> None:
    for number in range(10):
        await stage.publish("ab"[number % 2], b"%d" % number)
        stage.advance(1)
    time_ns = stage.clock.time_ns() - 4_500_000_000
    moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    async with (
        stage.bus.subscribe("?", start=moment) as glob,
        stage.bus.subscribe("a", start=("time", time_ns)) as literal,
    ):
        await stage.publish("a", b"10")
        assert await take_payloads(glob, 5) == [b"6", b"7", b"8", b"9", b"10"]
        assert await take_payloads(literal, 3) == [b"6", b"8", b"10"]


@verb(needs=[Ability.OFFSETS])
async def test_offset_ahead_of_the_topic_is_refused(stage: Stage) -> None:
    await stage.publish("a", b"1")
    with pytest.raises(OffsetAheadError, match="the next message will be 2"):
        await stage.bus.subscribe("a", start=3).open()


@verb(TopicRule(match="a", retain=Retain(age_ns=10 * 10**9)), needs=[Ability.OFFSETS])
async def test_offset_that_is_gone_is_a_gap_and_then_what_is_left(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    stage.advance(20)
    await stage.publish("a", b"4")
    gaps: list[Gap] = []
    async with stage.bus.subscribe("a", start=2, on_gap=gaps.append) as subscription:
        assert await take_payloads(subscription, 1) == [b"4"]
        assert list(subscription.gaps) == gaps
    [gap] = gaps
    assert (gap.reason, gap.topic, gap.partition, gap.missed) == ("retention", "a", 0, 2)
    assert (gap.first_offset, gap.next_offset) == (2, 4)


# --- Patterns ---


@verb()
async def test_message_that_several_patterns_match_comes_once(stage: Stage) -> None:
    async with stage.bus.subscribe("a/*", "*/1", "a/1", "b") as subscription:
        for topic in ("a/1", "b", "c/1", "c/2", "a/2"):
            await stage.publish(topic, topic.encode())
        assert await take_payloads(subscription, 4) == [b"a/1", b"b", b"c/1", b"a/2"]
        await nothing_more(stage, subscription)


@verb(*KINDS)
async def test_one_subscription_reads_topics_of_every_kind(stage: Stage) -> None:
    topics = ("d", "m/a", "live/a")
    async with stage.bus.subscribe("*") as subscription:
        for number in range(10):
            for topic in topics:
                await stage.publish(topic, b"%d" % number)
        messages = await take(subscription, 30)
        for topic in topics:
            offsets = [message.offset for message in messages if message.topic == topic]
            assert offsets == list(range(1, 11))


@verb(*KINDS)
async def test_topic_made_later_is_read_from_its_first_message_whatever_the_start(
    stage: Stage,
) -> None:
    await stage.publish("n/old", b"before")
    now_ns = stage.clock.time_ns()
    for start in ("latest", "last", "earliest", ("time", now_ns + 10**12)):
        async with stage.bus.subscribe("n/*", start=start) as subscription:
            new = f"n/{start}"
            await stage.publish(new, b"1", b"2")
            messages = await take(subscription, 1)
            while messages[-1].topic != new:
                messages += await take(subscription, 1)
            messages += await take(subscription, 1)
            assert [message.offset for message in messages[-2:]] == [1, 2]
    async with stage.bus.subscribe("later") as subscription:
        await stage.publish("later", b"1")
        assert await take_payloads(subscription, 1) == [b"1"]


@verb(needs=[Ability.ALONE])
async def test_history_of_several_topics_comes_in_the_order_in_which_it_was_stored(
    stage: Stage,
) -> None:
    for number in range(30):
        await stage.publish("abc"[number % 3], b"%d" % number)
    async with stage.bus.subscribe("*", start="earliest") as subscription:
        assert await take_payloads(subscription, 30) == [b"%d" % number for number in range(30)]


@verb(needs=[Ability.BATCHES, Ability.ALONE])
async def test_only_wanted_runs_of_a_batch_come(stage: Stage) -> None:
    mixed = [Message(topic, topic.encode()) for topic in ("a/1", "b", "a/2", "c", "a/1")]
    async with stage.bus.subscribe("a/*") as subscription:
        await stage.bus.publish_batch(Batch.from_messages(mixed))
        assert await take_payloads(subscription, 3) == [b"a/1", b"a/2", b"a/1"]
        await nothing_more(stage, subscription)


# --- Reading ---


@verb()
async def test_leaving_the_loop_loses_nothing(stage: Stage) -> None:
    await stage.bus.publish_batch(Batch.from_messages([Message("a", b"%d" % n) for n in range(9)]))
    async with stage.bus.subscribe("a", start="earliest") as subscription:
        seen = []
        async for message in subscription:
            seen.append(message.payload)
            if len(seen) == 4:
                break
        seen += await take_payloads(subscription, 5)
    assert seen == [b"%d" % number for number in range(9)]


@verb(needs=[Ability.BATCHES])
async def test_batches_and_arrow_hold_the_same(stage: Stage) -> None:
    await stage.bus.publish_batch(Batch.from_messages([Message("a", b"%d" % n) for n in range(5)]))
    async with stage.bus.subscribe("a", start="earliest") as subscription:
        batch = await anext(subscription.batches())
        assert [message.offset for message in batch.messages()] == [1, 2, 3, 4, 5]
    async with stage.bus.subscribe("a", start="earliest") as subscription:
        record_batch = await anext(subscription.to_arrow())
        assert record_batch.column("payload").to_pylist() == [b"0", b"1", b"2", b"3", b"4"]


@verb(*KINDS)
async def test_nothing_comes_after_unsubscribing(stage: Stage) -> None:
    async with stage.bus.subscribe("*") as subscription:
        await stage.publish("a", b"1")
        assert await take_payloads(subscription, 1) == [b"1"]
    assert (await stage.bus.publish("live/a", b"2")).receivers == 0
    await stage.publish("a", b"2")
    assert [message async for message in subscription] == []
    assert (await stage.bus.topic("a")).subscribers == 0


@verb()
async def test_reader_that_waits_is_ended_by_close(stage: Stage) -> None:
    async with stage.bus.subscribe("a") as subscription:
        waiting = asyncio.ensure_future(anext(subscription, None))
        await stage.bus.ping()
        await subscription.close()
        assert await waiting is None


@verb()
async def test_many_subscriptions_of_one_client_do_not_mind_each_other(stage: Stage) -> None:
    subscriptions = [stage.bus.subscribe(f"t/{number}") for number in range(40)]
    for subscription in subscriptions:
        await subscription.open()
    for number in range(40):
        await stage.publish(f"t/{number}", b"%d" % number)
    for number, subscription in enumerate(subscriptions):
        assert await take_payloads(subscription, 1) == [b"%d" % number]
        await subscription.close()


# --- Last values ---


@verb(STATE)
async def test_last_value_of_a_topic_that_is_not_kept_waits_for_readers(stage: Stage) -> None:
    await stage.publish("state/a", b"1", b"2")
    await stage.publish("state/b", b"3")
    async with stage.bus.subscribe("state/*", start="last") as subscription:
        assert sorted(await take_payloads(subscription, 2)) == [b"2", b"3"]
    assert [topic.name for topic in await stage.bus.topics()] == ["state/a", "state/b"]


@verb(TopicRule(match="a", retain=Retain(age_ns=10**9), last_value=True))
async def test_last_value_outlives_retention(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    stage.advance(100)
    await stage.publish("other", b"x")
    async with stage.bus.subscribe("a", start="last") as subscription:
        assert await take_payloads(subscription, 1) == [b"2"]
        await stage.publish("a", b"3")
        assert await take_payloads(subscription, 1) == [b"3"]


@verb(TopicRule(match="a", retain=Retain(age_ns=10**9)))
async def test_without_last_value_nothing_outlives_retention(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    stage.advance(100)
    async with stage.bus.subscribe("a", start="last") as subscription:
        await nothing_more(stage, subscription)


@verb()
async def test_start_that_makes_no_sense_says_what_would(stage: Stage) -> None:
    with pytest.raises(ClientFault, match="needs one topic"):
        stage.bus.subscribe("a*", start=1)
    with pytest.raises(ClientFault, match="needs one topic"):
        stage.bus.subscribe("a", "b", start=1)
    with pytest.raises(ClientFault, match="none of 'latest', 'last', 'earliest'"):
        stage.bus.subscribe("a", start="newest")
    with pytest.raises(ClientFault, match="time zone"):
        stage.bus.subscribe("a", start=datetime(2026, 1, 1))  # noqa: DTZ001 - that is the point


@verb(needs=[Ability.OFFSETS])
async def test_offsets_of_what_is_not_subscribed_to_are_refused(stage: Stage) -> None:
    with pytest.raises(ClientFault, match="'b' is none"):
        await stage.bus.subscribe("a", start={"b": 1}).open()
    with pytest.raises(ClientFault, match="wildcards"):
        await stage.bus.subscribe("a", "b*", start={"a": 1}).open()
