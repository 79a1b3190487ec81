"""Consumers over several nodes: shards move, nodes come and go, and programs notice as little as possible."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from runnel.client import Bus, Consumer, LateWork, Work
from runnel.errors import LateAckError, MemberReplacedError, UnknownSubscriptionError
from runnel.log.log import ShardId
from runnel.testing import open_cluster
from runnel.testing.cluster import EmbeddedCluster

TOPICS = [f"t/{number}" for number in range(12)]
PATIENCE_S = 20


@asynccontextmanager
async def several(nodes: int = 3) -> AsyncIterator[tuple[EmbeddedCluster, Bus]]:
    """A cluster with a message in each topic."""
    async with (
        asyncio.timeout(PATIENCE_S),
        open_cluster(nodes) as cluster,
        cluster.connect() as bus,
    ):
        await publish(bus, len(TOPICS))
        yield cluster, bus


async def publish(bus: Bus, count: int, *, key: bytes | None = None) -> None:
    for number in range(count):
        await bus.publish(TOPICS[number % len(TOPICS)], b"%d" % number, key=key)


async def take(consumer: Consumer, count: int) -> list[Work]:
    return [await anext(consumer) for _ in range(count)]


def shards_of(cluster: EmbeddedCluster) -> list[ShardId]:
    return sorted({cluster.shard_of(topic) for topic in TOPICS}, key=str)


async def elsewhere(cluster: EmbeddedCluster, topic: str) -> None:
    """Move the topic's shard to another node."""
    shard = cluster.shard_of(topic)
    owner = cluster.owner(shard)
    other = next(node.name for node in cluster.nodes if node.is_running and node is not owner)
    await cluster.move(shard, other)


async def backlog(cluster: EmbeddedCluster, name: str = "s") -> int:
    """What is owed, as the owners of the shards know."""
    total = 0
    for node in cluster.nodes:
        if node.is_running:
            [state] = await node.broker._core.consumer_groups.subscriptions(name)
            total += sum(member.backlog for member in state.members)
    return total


# --- Every node has a part ---


async def all_of_it(mode: str, window: int) -> None:
    async with several() as (cluster, bus):
        await publish(bus, 48)
        async with bus.consume("s", "t/*", mode=mode, window_messages=window) as consumer:
            seen = Counter[tuple[str, int]]()
            for _ in range(60):
                work = await anext(consumer)
                seen[work.topic, work.offset] += 1
                assert consumer.statistics.leased <= window
                await work.ack()
            assert set(seen.values()) == {1}
            await consumer.flush()
            assert await backlog(cluster) == 0


@pytest.mark.parametrize("window", [1, 2, 7, 256])
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_a_consumer_gets_what_all_nodes_have_within_one_window(mode: str, window: int) -> None:
    asyncio.run(all_of_it(mode, window))


def test_a_named_member_of_a_multicast_gets_what_all_nodes_have() -> None:
    async def scenario() -> None:
        async with (
            several() as (cluster, bus),
            bus.consume("s", "t/*", mode="multicast", member="m", start="earliest") as first,
            bus.consume("s", member="n") as second,
        ):
            works = await take(first, 12)
            await first.ack(*works, stored=True)
            await publish(bus, 12)
            assert {work.offset for work in await take(second, 12)} == {2}
            assert {work.offset for work in await take(first, 12)} == {2}
            definitions = {
                node.broker._core._stores.main.metadata.subscription("s") for node in cluster.nodes
            }
            assert len(definitions) == 1  # no member was lost, though each node added them

    asyncio.run(scenario())


def test_latest_is_the_same_moment_at_every_node() -> None:
    async def scenario() -> None:
        async with (
            several() as (_, bus),
            bus.consume("s", "t/*", start="latest") as consumer,
        ):
            await publish(bus, 12)
            assert {work.offset for work in await take(consumer, 12)} == {2}

    asyncio.run(scenario())


# --- Planned moves ---


async def moved_under_work(mode: str) -> None:
    random = Random(mode)
    late: list[LateWork] = []
    seen = Counter[tuple[str, int]]()
    running: dict[tuple[str, bytes | None], int] = {}
    last: dict[tuple[str, bytes | None], int] = {}
    async with several() as (cluster, bus):
        stop = asyncio.Event()

        async def work_on(work: Work) -> None:
            seen[work.topic, work.offset] += 1
            if mode == "key_shared":
                key = (work.topic, work.key)
                assert key not in running
                assert last.get(key, 0) < work.offset
                running[key] = last[key] = work.offset
                await asyncio.sleep(random.random() * 0.01)
                del running[key]
            else:
                await asyncio.sleep(random.random() * 0.01)

        async def move_about() -> None:
            while not stop.is_set():
                shard = random.choice(shards_of(cluster))
                await cluster.move(shard, random.choice(cluster.nodes).name)

        async with (
            bus.consume("s", "t/*", mode=mode, window_messages=20, on_late=late.append) as first,
            bus.consume("s", window_messages=20, on_late=late.append) as second,
            asyncio.TaskGroup() as tasks,
        ):
            processing = [
                tasks.create_task(each.process(work_on, concurrency=4, stop=stop))
                for each in (first, second)
            ]
            moving = tasks.create_task(move_about())
            for number in range(150):
                await bus.publish(TOPICS[number % 12], b"", key=b"k%d" % (number % 5))
            await cluster.until(lambda: len(seen) == 162)
            stop.set()
            await asyncio.wait([moving, *processing])
        assert set(seen.values()) == {1}
        assert not late
        assert await backlog(cluster) == 0


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_planned_moves_repeat_no_work_and_call_no_ack_late(mode: str) -> None:
    asyncio.run(moved_under_work(mode))


def test_work_that_was_begun_is_acknowledged_at_the_new_owner() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), bus.consume("s", "t/*") as consumer:
            works = await take(consumer, 12)
            for topic in TOPICS:
                await elsewhere(cluster, topic)
            await consumer.ack(*works, stored=True)
            assert await backlog(cluster) == 0
            assert consumer.statistics.received == 12

    asyncio.run(scenario())


def test_work_that_was_begun_fails_at_the_new_owner_and_comes_again_from_there() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), bus.consume("s", "t/*") as consumer:
            works = await take(consumer, 12)
            for topic in TOPICS:
                await elsewhere(cluster, topic)
            await consumer.nack(*works, delay_s=0)
            again = await take(consumer, 12)
            assert {work.failures for work in again} == {1}
            await consumer.ack(*again, stored=True)
            assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_messages_that_were_not_begun_stay_with_the_consumer() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus):
            for _ in range(9):
                await bus.publish("t/0", b"", key=b"k")
            async with bus.consume("s", "t/0", mode="key_shared") as consumer:
                first = await anext(consumer)
                await elsewhere(cluster, "t/0")
                await elsewhere(cluster, "t/0")
                rest = await take(consumer, 9)
                assert [work.offset for work in (first, *rest)] == list(range(1, 11))
                assert consumer.statistics.received == 10
                await consumer.ack(first, *rest, stored=True)
                assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_a_failed_message_comes_before_later_ones_of_its_key_after_a_move() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus):
            for _ in range(4):
                await bus.publish("t/0", b"", key=b"k")
            async with bus.consume("s", "t/0", mode="key_shared") as consumer:
                _, first, second = await take(consumer, 3)
                await first.nack(delay_s=0)
                await elsewhere(cluster, "t/0")
                await second.ack()
                again = await take(consumer, 4)
                assert [work.offset for work in again] == [2, 3, 4, 5]

    asyncio.run(scenario())


def test_flush_waits_for_acks_whose_shard_moves() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), bus.consume("s", "t/*") as consumer:
            works = await take(consumer, 12)
            shard = cluster.shard_of("t/0")
            moving = asyncio.create_task(elsewhere(cluster, "t/0"))
            for work in works:
                await asyncio.sleep(0)
                await work.ack()
            await consumer.flush()
            await moving
            assert cluster.owner(shard) is not None
            assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_a_member_without_a_name_keeps_its_place_when_shards_move() -> None:
    async def scenario() -> None:
        async with (
            several() as (cluster, bus),
            bus.consume("s", "t/*", mode="multicast") as first,
            bus.consume("s", mode="multicast", start="earliest") as second,
        ):
            assert {work.offset for work in await take(second, 12)} == {1}
            await publish(bus, 24)
            works = await take(first, 24)
            await first.ack(*works[:12], stored=True)
            for topic in TOPICS:
                await elsewhere(cluster, topic)
            await publish(bus, 12)
            more = await take(first, 12)
            assert {work.offset for work in more} == {4}
            await first.ack(*works[12:], *more, stored=True)
            for topic in TOPICS:
                await elsewhere(cluster, topic)
            await publish(bus, 12)
            assert {work.offset for work in await take(first, 12)} == {5}
            assert Counter(work.offset for work in await take(second, 48)) == dict.fromkeys(
                (2, 3, 4, 5), 12
            )
            assert not first.late

    asyncio.run(scenario())


def test_what_a_member_without_a_name_had_done_is_forgotten_with_it() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus):
            async with bus.consume("s", "t/*", mode="multicast", start="earliest") as consumer:
                await consumer.ack(*await take(consumer, 12), stored=True)
                for topic in TOPICS:
                    await elsewhere(cluster, topic)

            def is_forgotten() -> bool:
                return not any(
                    journal.table.members()
                    for node in cluster.nodes
                    for journal in node.broker._core.consumer_groups._state.all()
                )

            await cluster.until(is_forgotten)

    asyncio.run(scenario())


def test_an_ack_is_late_whose_consumer_has_ended_while_its_shard_moved() -> None:
    async def scenario() -> None:
        async with (
            several() as (cluster, bus),
            cluster.nodes[1].connect() as other,
            bus.consume("s", "t/0", mode="multicast", member="m", start="earliest") as former,
        ):
            work = await anext(former)
            # No other node says that it has leased it.
            former.part_moving(work.delivery.part, 1, [work.delivery.id])
            async with other.consume("s", member="m"):
                with pytest.raises(MemberReplacedError):
                    await anext(former)
                with pytest.raises(LateAckError):
                    await work.ack(stored=True)

    asyncio.run(scenario())


# --- Nodes that come and go ---


def test_what_a_lost_node_had_leased_comes_again_without_counting_as_failed() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), bus.consume("s", "t/*") as consumer:
            works = await take(consumer, 12)
            lost = cluster.nodes[2]
            theirs = {w.topic for w in works if cluster.owner(cluster.shard_of(w.topic)) is lost}
            assert theirs
            await cluster.kill(lost.name)
            again = await take(consumer, len(theirs))
            assert {work.topic for work in again} == theirs
            assert {work.failures for work in again} == {0}
            kept = [work for work in works if work.topic not in theirs]
            await consumer.ack(*kept, *again, stored=True)
            assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_a_node_that_comes_gets_a_part() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus):
            await cluster.stop("node-3")
            async with bus.consume("s", "t/*", window_messages=30) as consumer:
                await consumer.ack(*await take(consumer, 12), stored=True)
                await cluster.start("node-3")
                for topic in TOPICS:
                    await cluster.move(cluster.shard_of(topic), "node-3")
                await publish(bus, 12)
                await consumer.ack(*await take(consumer, 12), stored=True)
                assert await backlog(cluster) == 0

    asyncio.run(scenario())


# --- Definitions ---


def test_a_subscription_that_is_deleted_at_one_node_ends_its_consumers_at_all() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), cluster.nodes[2].connect() as other:
            async with bus.consume("s", "t/*") as consumer:
                await take(consumer, 12)
                await other.delete_subscription("s")
                with pytest.raises(UnknownSubscriptionError, match="was deleted"):
                    await anext(consumer)
            for node in cluster.nodes:
                with pytest.raises(UnknownSubscriptionError):
                    await node.broker._core.consumer_groups.subscriptions("s")

    asyncio.run(scenario())


def test_options_that_are_changed_at_one_node_hold_at_all() -> None:
    async def scenario() -> None:
        async with several() as (cluster, bus), cluster.nodes[1].connect() as other:
            await bus.make_subscription("s", "t/*", lease_s=5)
            await other.make_subscription("s", "t/*", lease_s=7)
            for node in cluster.nodes:
                [state] = await node.broker._core.consumer_groups.subscriptions("s")
                assert state.options.lease_ms == 7000

    asyncio.run(scenario())


# --- Dead letters ---


def letters_at_their_owner(cluster: EmbeddedCluster) -> int:
    """How many dead letters were ever stored."""
    shard = cluster.shard_of("!dead/s")
    owner = cluster.owner(shard)
    if owner is None:
        return 0
    log = owner.broker._core._stores.main
    if not log.metadata.topics.has("!dead/s"):
        return 0
    return log.shard(shard).next_offset("!dead/s", 0) - 1


def test_dead_letters_of_all_nodes_are_stored_once_and_come_back() -> None:
    async def scenario() -> None:
        async with (
            several() as (cluster, bus),
            bus.consume("s", "t/*", deliveries_max=1) as consumer,
        ):
            works = await take(consumer, 12)
            for each in works:
                await each.nack(reason="no")
            await cluster.until(lambda: letters_at_their_owner(cluster) == 12)
            for topic in TOPICS:
                await elsewhere(cluster, topic)
            letters = [letter async for letter in bus.dead_letters("s")]
            assert {letter.tags["dead.topic"] for letter in letters} == set(TOPICS)
            assert await bus.redrive("s", "all") == 12
            again = await take(consumer, 12)
            assert {work.topic for work in again} == set(TOPICS)
            await consumer.ack(*again, stored=True)
            assert letters_at_their_owner(cluster) == 12
            assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_a_dead_letter_is_stored_once_while_its_shard_and_its_messages_move() -> None:
    async def scenario() -> None:
        random = Random(5)
        async with (
            several() as (cluster, bus),
            bus.consume("s", "t/*", deliveries_max=1) as consumer,
        ):
            await publish(bus, 48)
            stop = asyncio.Event()

            async def move_about() -> None:
                while not stop.is_set():
                    shards = [*shards_of(cluster), cluster.shard_of("!dead/s")]
                    await cluster.move(random.choice(shards), random.choice(cluster.nodes).name)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(move_about())
                for _ in range(60):
                    await (await anext(consumer)).nack(reason="no")
                await cluster.until(lambda: letters_at_their_owner(cluster) >= 60)
                stop.set()
            assert letters_at_their_owner(cluster) == 60
            assert await backlog(cluster) == 0

    asyncio.run(scenario())


def test_flush_waits_for_acks_that_a_node_got_after_it_gave_up_their_shard() -> None:
    async def scenario() -> None:
        async with several(2) as (cluster, bus):
            for turns in range(30):  # at each, the ack meets the move at another moment
                async with bus.consume("s", "t/0") as consumer:
                    work = await anext(consumer)
                    moving = asyncio.ensure_future(elsewhere(cluster, "t/0"))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    await work.ack()
                await moving
                assert await backlog(cluster) == 0
                await bus.publish("t/0", b"%d" % turns)

    asyncio.run(scenario())
