"""Consumers of clients that know nothing of nodes: merged at the node that they are connected to."""

from __future__ import annotations

import asyncio

import pytest

from runnel.client import Bus
from runnel.client.consumer import Consumer, Work
from runnel.errors import LateAckError, RunnelError
from runnel.testing.cluster import EmbeddedCluster
from tests.relay.stage import Basic, scenario

NAMES = [f"t/{number:02}" for number in range(12)]


async def publish(cluster: EmbeddedCluster, names: list[str], *payloads: bytes) -> None:
    async with cluster.connect() as bus:
        for payload in payloads:
            for name in names:
                await bus.publish(name, payload)


async def take(consumer: Consumer, count: int) -> list[Work]:
    return [await anext(consumer) for _ in range(count)]


async def backlog(bus: Bus, name: str) -> int:
    return sum(member.backlog for member in (await bus.subscription(name)).members)


@scenario
async def test_work_of_all_owners_comes_once_and_is_stored(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1", b"2", b"3")
    async with Basic(cluster.nodes[1]) as bus:
        async with bus.consume("work", "t/*") as consumer:
            works = await take(consumer, 36)
            assert sorted((each.topic, each.payload) for each in works) == sorted(
                (name, payload) for name in NAMES for payload in (b"1", b"2", b"3")
            )
            for number in {work.delivery.id for work in works}:
                assert number > 0
            for work in works[:-1]:
                await work.ack()
            await works[-1].ack(stored=True)
        assert await backlog(bus, "work") == 0


@scenario
async def test_closing_gives_back_and_stores(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    async with Basic(cluster.nodes[0]) as bus:
        async with bus.consume("work", "t/*") as consumer:
            works = await take(consumer, 12)
            for work in works[:5]:
                await work.ack()
        async with bus.consume("work", "t/*") as consumer:
            again = await take(consumer, 7)
            assert {work.topic for work in again} == {work.topic for work in works[5:]}
            assert all(work.failures == 0 for work in again)


@scenario
async def test_lost_consumer_counts_as_failure(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    async with Basic(cluster.nodes[0]) as bus:
        await bus.make_subscription("work", "t/*", start="earliest", retry_delay_s=0)
    async with Basic(cluster.nodes[0]) as bus:
        consumer = bus.consume("work")
        await consumer.open()
        await take(consumer, 12)
        bus._router.home.abandon()  # as if the program were killed
    async with Basic(cluster.nodes[2]) as other, other.consume("work") as again:
        works = await take(again, 12)
        assert {work.topic for work in works} == set(NAMES)
        assert [work.failures for work in works] == [1] * 12


@scenario
async def test_no_more_than_the_window_and_all_owners_have_their_turn(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES, b"1", b"2")
    async with (
        Basic(cluster.nodes[2]) as bus,
        bus.consume("work", "t/*", window_messages=1) as consumer,
    ):
        found = set()
        for _ in range(24):
            work = await anext(consumer)
            assert consumer.statistics.leased == 1
            found.add((work.topic, work.payload))
            await work.ack(stored=True)
        assert len(found) == 24


@scenario
async def test_nacked_work_comes_again(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    async with (
        Basic(cluster.nodes[0]) as bus,
        bus.consume("work", "t/*", retry_delay_s=0) as consumer,
    ):
        for work in await take(consumer, 12):
            await work.nack(reason="no")
        again = await take(consumer, 12)
        assert {work.topic for work in again} == set(NAMES)
        assert {work.failures for work in again} == {1}


@scenario
async def test_keys_stay_in_order_over_failures_and_moves(cluster: EmbeddedCluster) -> None:
    names = NAMES[:4]
    async with cluster.connect() as publisher:
        for number in range(30):
            for name in names:
                await publisher.publish(name, b"%d" % number, key=b"%d" % (number % 3))
    done: dict[tuple[str, bytes | None], list[int]] = {}
    async with (
        Basic(cluster.nodes[0]) as bus,
        bus.consume(
            "work", "t/*", mode="key_shared", retry_delay_s=0, window_messages=40
        ) as consumer,
    ):
        failed: set[tuple[str, int]] = set()
        count = 0
        while count < 30 * 4:
            work = await anext(consumer)
            number = int(work.payload)
            if number % 7 == 3 and (work.topic, number) not in failed:
                failed.add((work.topic, number))
                await work.nack(reason="once")
                continue
            done.setdefault((work.topic, work.key), []).append(number)
            await work.ack()
            count += 1
            if count % 20 == 0:
                name = names[count % 4]
                await cluster.move(cluster.shard_of(name), cluster.nodes[count % 3].name)
    for (_, key), numbers in done.items():
        assert numbers == [n for n in range(30) if b"%d" % (n % 3) == key]


@scenario
async def test_planned_moves_repeat_no_work(cluster: EmbeddedCluster) -> None:
    names = NAMES[:4]
    await publish(cluster, names, b"0")
    seen: list[tuple[str, bytes]] = []
    async with (
        Basic(cluster.nodes[0]) as bus,
        bus.consume("work", "t/*", window_messages=16) as consumer,
    ):
        publishing = asyncio.ensure_future(
            publish(cluster, names, *(b"%d" % number for number in range(1, 40)))
        )
        held: list[Work] = []
        turn = 0
        while len(seen) < 160:
            work = await anext(consumer)
            seen.append((work.topic, work.payload))
            held.append(work)
            if len(held) == 8:
                turn += 1
                await cluster.move(cluster.shard_of(names[turn % 4]), cluster.nodes[turn % 3].name)
                for each in held:
                    await each.ack()
                held.clear()
        for each in held:
            await each.ack(stored=True)
        await publishing
        await consumer.flush()
        assert not consumer.late
        assert len(set(seen)) == 160
        assert await backlog(bus, "work") == 0


@scenario
async def test_work_of_a_killed_node_comes_again_from_the_next_owner(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES, b"1")
    async with Basic(cluster.nodes[0]) as bus, bus.consume("work", "t/*") as consumer:
        works = await take(consumer, 12)
        dead = cluster.nodes[1]
        lost = {work.topic for work in works if cluster.owner(cluster.shard_of(work.topic)) is dead}
        assert lost
        await cluster.kill(dead.name)
        await cluster.settled()
        again = await take(consumer, len(lost))
        assert {work.topic for work in again} == lost
        for work in again:
            await work.ack()
        for work in works:
            if work.topic not in lost:
                await work.ack()
        gone = next(work for work in works if work.topic in lost)
        with pytest.raises((LateAckError, RunnelError)):
            await gone.ack(stored=True)
        while await backlog(bus, "work"):  # noqa: ASYNC110 - at other nodes
            await asyncio.sleep(0.01)


@scenario
async def test_every_member_of_a_multicast_gets_everything(cluster: EmbeddedCluster) -> None:
    async with (
        Basic(cluster.nodes[0]) as bus,
        Basic(cluster.nodes[1]) as other,
        bus.consume("all", "t/*", mode="multicast", member="a") as first,
        other.consume("all", "t/*", mode="multicast", member="b") as second,
    ):
        await publish(cluster, NAMES, b"1")
        for consumer in (first, second):
            works = await take(consumer, 12)
            assert {work.topic for work in works} == set(NAMES)
            for work in works:
                await work.ack()
        await first.flush()
        await second.flush()
        members = (await bus.subscription("all")).members
        assert {(member.name, member.consumers > 0, member.backlog) for member in members} == {
            ("a", True, 0),
            ("b", True, 0),
        }


@scenario
async def test_lease_that_ends_is_owed_to_others(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES[:3], b"1")
    async with Basic(cluster.nodes[0]) as bus, Basic(cluster.nodes[1]) as other:
        await bus.make_subscription("work", "t/*", start="earliest", lease_s=1, processing_max_s=1)
        async with bus.consume("work") as slow:
            works = await take(slow, 3)
            async with other.consume("work") as quick:
                again = set()
                for _ in range(3):
                    work = await anext(quick)
                    again.add(work.topic)
                    await work.ack(stored=True)
                assert again == {work.topic for work in works}
            with pytest.raises(LateAckError):
                await works[0].ack(stored=True)


@scenario
async def test_deleted_subscription_ends_the_consumer(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    async with Basic(cluster.nodes[0]) as bus, bus.consume("work", "t/*") as consumer:
        await take(consumer, 12)
        async with cluster.connect() as other:
            await other.delete_subscription("work")
        with pytest.raises(RunnelError):
            await take(consumer, 1)
