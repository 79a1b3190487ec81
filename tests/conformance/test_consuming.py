"""Acknowledged work: consuming, ack, nack, and which consumer gets which message in each mode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from runnel.client import Bus
from runnel.client.consumer import Consumer, Work
from runnel.config import Keep, TopicRule
from runnel.errors import ClientFault, LateAckError, MemberReplacedError
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, nothing_more, take, take_work, verb

MEMORY = TopicRule(match="m/*", keep=Keep.MEMORY)


def payloads(works: Sequence[Work]) -> list[bytes]:
    return [work.payload for work in works]


def offsets(works: Sequence[Work]) -> list[int]:
    return [work.offset for work in works]


async def publish_keys(bus: Bus, *keys: bytes) -> None:
    """Publish a message for each key. Its payload is its number."""
    for number, key in enumerate(keys, 1):
        await bus.publish("a", b"%d" % number, key=key)


async def take_after(stage: Stage, seconds: float, consumer: Consumer) -> Work:
    """The next message, after so much time. The broker handles all earlier requests first."""
    waiting = asyncio.ensure_future(anext(consumer))
    await stage.bus.ping()
    assert not waiting.done()
    stage.advance(seconds)
    return await waiting


# --- Shared ---


@verb(MEMORY)
async def test_what_was_there_and_what_comes_is_delivered_and_acked(stage: Stage) -> None:
    for topic in ("d", "m/a"):
        await stage.publish(topic, b"1", b"2")
        async with stage.bus.consume(topic, topic) as consumer:
            await stage.publish(topic, b"3")
            works = await take_work(consumer, 3)
            assert payloads(works) == [b"1", b"2", b"3"]
            assert {work.delivery_count for work in works} == {1}
            await consumer.ack(*works)
            await consumer.flush()
            await nothing_more(stage, consumer)
        (member,) = (await stage.bus.subscription(topic)).members
        assert (member.backlog, member.in_flight) == (0, 0)


@verb()
async def test_consumers_share_the_work_and_windows_are_kept(stage: Stage) -> None:
    other = await stage.connect()
    async with (
        stage.bus.consume("s", "a", window_messages=3) as one,
        other.consume("s", "a", window_messages=2) as two,
    ):
        await stage.publish("a", *(b"%d" % number for number in range(7)))
        mine, theirs = await take_work(one, 3), await take_work(two, 2)
        await nothing_more(stage, one)
        await mine[0].ack()
        mine += await take_work(one, 1)
        await theirs[0].ack()
        theirs += await take_work(two, 1)
        assert sorted(offsets([*mine, *theirs])) == list(range(1, 8))


@verb()
async def test_topics_made_later_join_and_subscriptions_and_readers_do_not_mind_each_other(
    stage: Stage,
) -> None:
    async with (
        stage.bus.consume("s", "orders/*") as consumer,
        stage.bus.consume("other", "orders/*", mode="key_shared") as other,
        stage.bus.subscribe("orders/*") as live,
    ):
        await stage.publish("orders/a", b"1")
        await stage.publish("orders/b", b"2")
        await stage.publish("elsewhere", b"3")
        for work in await take_work(consumer, 2):
            await work.ack()
        worked = payloads(await take_work(other, 2))
        read = [message.payload for message in await take(live, 2)]
        if Ability.ALONE in stage.listener.cannot:  # the topics may lie in shards of several nodes
            worked, read = sorted(worked), sorted(read)
        assert worked == read == [b"1", b"2"]


@verb()
async def test_batches_come_whole_and_ack_up_to_takes_what_was_received(stage: Stage) -> None:
    await stage.publish("a", *(b"%d" % number for number in range(6)))
    async with stage.bus.consume("s", "a", window_messages=2) as consumer:
        async for batch in consumer.batches():
            assert [message.offset for message in batch] in ([1], [1, 2])
            await batch.ack(stored=True)
            break
    async with stage.bus.consume("s") as consumer:
        begin = (await stage.bus.subscription("s")).partitions[0].floor
        works = await take_work(consumer, 7 - begin)
        assert offsets(works) == list(range(begin, 7))
        await consumer.ack_up_to(works[-2])
        await consumer.flush()
        assert (await stage.bus.subscription("s")).partitions[0].floor == 6


@verb()
async def test_what_was_not_acked_goes_back_uncounted_when_a_consumer_leaves(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    async with stage.bus.consume("s", "a") as consumer:
        works = await take_work(consumer, 3)
        await works[1].ack()
    async with stage.bus.consume("s") as consumer:
        again = await take_work(consumer, 2)
        assert [(work.offset, work.failures) for work in again] == [(1, 0), (3, 0)]
        await nothing_more(stage, consumer)


@verb(
    needs=[Ability.ALONE]
)  # while its shard moves, a nack may come after the test has moved the clock
async def test_nacked_message_comes_again_after_its_delay_and_counts(stage: Stage) -> None:
    stage.advance(1)
    async with stage.bus.consume("s", "a", retry_delay_s=5, backoff=3) as consumer:
        await stage.publish("a", b"1")
        first_ns = stage.clock.time_ns()
        await (await anext(consumer)).nack(reason="bad luck")
        await nothing_more(stage, consumer)
        work = await take_after(stage, 5, consumer)
        assert (work.payload, work.failures, work.delivery_count) == (b"1", 1, 2)
        assert work.first_delivery_ns == first_ns
        await work.nack()
        await stage.bus.ping()
        stage.advance(14)
        await nothing_more(stage, consumer)
        work = await take_after(stage, 1, consumer)
        await work.nack(delay_s=0)
        assert (await anext(consumer)).failures == 3


@verb()
async def test_message_whose_lease_has_ended_comes_again_and_its_ack_is_late(stage: Stage) -> None:
    async with stage.bus.consume("s", "a", lease_s=10) as consumer:
        await stage.publish("a", b"1")
        late = await anext(consumer)
        again = await take_after(stage, 11, consumer)
        assert (again.offset, again.failures) == (1, 1)
        with pytest.raises(LateAckError):
            await late.ack(stored=True)
        await again.ack(stored=True)
        assert [each.begin for each in consumer.late] == [1]


@verb()
async def test_extended_lease_lasts(stage: Stage) -> None:
    async with stage.bus.consume("s", "a", lease_s=10) as consumer:
        await stage.publish("a", b"1")
        work = await anext(consumer)
        await work.extend(100)
        await stage.bus.ping()
        stage.advance(60)
        await nothing_more(stage, consumer)
        await work.ack(stored=True)


# --- Key shared ---


@verb(
    needs=[Ability.ALONE]
)  # of several nodes, one without a share of a small window gives it nothing
async def test_key_is_with_one_consumer_at_a_time_and_moves_when_nothing_of_it_is_in_flight(
    stage: Stage,
) -> None:
    other = await stage.connect()
    async with (
        stage.bus.consume("s", "a", mode="key_shared") as one,
        other.consume("s", "a", mode="key_shared", window_messages=1) as two,
    ):
        await publish_keys(stage.bus, b"x", b"x", b"y", b"x", b"y", b"y")
        with_two = await anext(two)
        key = with_two.key
        mine = await take_work(one, 3)
        assert {work.key for work in mine} == {b"x", b"y"} - {key}
        assert offsets(mine) == sorted(offsets(mine))
        await nothing_more(stage, one)
        await two.close()
        rest = await take_work(one, 3)
        assert {work.key for work in rest} == {key}
        assert offsets(rest) == sorted(offsets(rest))


@verb()
async def test_failed_message_comes_again_before_the_later_ones_of_its_key(stage: Stage) -> None:
    async with stage.bus.consume("s", "a", mode="key_shared", retry_delay_s=5) as consumer:
        await publish_keys(stage.bus, b"x", b"y", b"x", b"x")
        first = await anext(consumer)
        assert first.key == b"x"
        await first.nack()
        other = await anext(consumer)  # other keys continue
        assert other.key == b"y"
        await nothing_more(stage, consumer)
        again = [await take_after(stage, 5, consumer), *await take_work(consumer, 2)]
        assert [(work.offset, work.failures) for work in again] == [(1, 1), (3, 0), (4, 0)]


@verb()
async def test_messages_without_a_key_have_no_order(stage: Stage) -> None:
    async with stage.bus.consume("s", "a", mode="key_shared", retry_delay_s=5) as consumer:
        await stage.publish("a", b"1", b"2")
        await (await anext(consumer)).nack()
        await (await anext(consumer)).ack(stored=True)
        assert (await take_after(stage, 5, consumer)).offset == 1


# --- Multicast ---


@verb()
async def test_each_member_gets_everything_since_it_joined_and_has_acks_of_its_own(
    stage: Stage,
) -> None:
    await stage.publish("a", b"before")
    async with stage.bus.consume("s", "a", mode="multicast", member="x") as x:
        await stage.publish("a", b"1")
        async with stage.bus.consume("s", "a", mode="multicast", member="y") as y:
            await stage.publish("a", b"2")
            assert payloads(await take_work(x, 2)) == [b"1", b"2"]
            (work,) = await take_work(y, 1)
            assert work.payload == b"2"
            await work.ack(stored=True)
    await stage.publish("a", b"3")
    async with stage.bus.consume("s", member="y") as y, stage.bus.consume("s", member="x") as x:
        assert payloads(await take_work(y, 1)) == [b"3"]
        assert payloads(await take_work(x, 3)) == [b"1", b"2", b"3"]


@verb(needs=[Ability.TOLD])
async def test_member_that_comes_again_takes_its_own_place(stage: Stage) -> None:
    other = await stage.connect()
    async with stage.bus.consume("s", "a", mode="multicast", member="m") as former:
        await stage.publish("a", b"1")
        work = await anext(former)
        async with other.consume("s", member="m") as heir:
            with pytest.raises(MemberReplacedError, match="'m'"):
                await anext(former)
            assert (await anext(heir)).failures == 0
            with pytest.raises(LateAckError):
                await work.ack(stored=True)


@verb()
async def test_unnamed_member_is_owed_nothing_once_it_has_gone(stage: Stage) -> None:
    async with stage.bus.consume("s", "a", mode="multicast") as consumer:
        await stage.publish("a", b"1")
        assert payloads(await take_work(consumer, 1)) == [b"1"]
        assert len((await stage.bus.subscription("s")).members) == 1
    assert (await stage.bus.subscription("s")).members == []


# --- Restarting ---


@verb(needs=[Ability.RESTART])
async def test_restart_delivers_again_what_was_not_acked_and_counts_only_failures(
    stage: Stage,
) -> None:
    await stage.publish("a", b"1", b"2", b"3", b"4")
    consumer = stage.bus.consume("s", "a", retry_delay_s=60)
    await consumer.open()
    works = await take_work(consumer, 4)
    await works[2].nack()
    await consumer.ack(works[0], works[3], stored=True)
    await stage.restart()
    async with stage.bus.consume("s") as consumer:
        again = await anext(consumer)
        assert (again.offset, again.failures) == (2, 0)
        await again.ack(stored=True)
        again = await take_after(stage, 60, consumer)
        assert (again.offset, again.failures) == (3, 1)


# --- Errors ---


@verb()
async def test_work_is_acknowledged_where_it_was_given(stage: Stage) -> None:
    await stage.publish("a", b"1")
    async with stage.bus.consume("s", "a") as one, stage.bus.consume("t", "a") as two:
        work = await anext(one)
        with pytest.raises(ClientFault, match=r"another (consumer|subscription)"):
            await two.ack(work)
        with pytest.raises(ClientFault, match=r"delay.*-1"):
            await work.nack(delay_s=-1)
