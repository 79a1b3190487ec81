"""Live subscriptions of clients that know nothing of nodes: merged at the node that they are connected to."""

from __future__ import annotations

import asyncio

import pytest

from runnel.client.consumer import Subscription
from runnel.errors import ClientFault
from runnel.formats.message import Message
from runnel.testing.cluster import EmbeddedCluster
from tests.relay.stage import Basic, scenario

NAMES = [f"t/{number:02}" for number in range(12)]


async def take(subscription: Subscription, count: int) -> list[Message]:
    return [await anext(subscription) for _ in range(count)]


@scenario
async def test_pattern_over_all_owners_from_every_start(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[1]) as bus, cluster.connect() as publisher:
        for name in NAMES:
            await publisher.publish(name, b"1")
            await publisher.publish(name, b"2")
        async with (
            bus.subscribe("t/*", start="earliest") as earliest,
            bus.subscribe("t/*", start="last") as last,
            bus.subscribe("t/*") as latest,
            bus.subscribe(*NAMES[:3], start="earliest") as literal,
        ):
            for name in NAMES:
                await publisher.publish(name, b"3")
            by_topic: dict[str, list[bytes]] = {}
            for message in await take(earliest, 36):
                by_topic.setdefault(message.topic, []).append(message.payload)
            assert by_topic == {name: [b"1", b"2", b"3"] for name in NAMES}
            lasts = await take(last, 24)
            assert sorted((m.topic, m.payload) for m in lasts) == sorted(
                (name, payload) for name in NAMES for payload in (b"2", b"3")
            )
            assert {m.topic for m in await take(latest, 12)} == set(NAMES)
            assert len(await take(literal, 9)) == 9


@scenario
async def test_nothing_is_missed_or_repeated_while_shards_move(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[0]) as bus, cluster.connect() as publisher:
        for name in NAMES:
            await publisher.publish(name, b"0")
        async with bus.subscribe("t/*") as subscription:

            async def publish() -> None:
                for number in range(1, 40):
                    for name in NAMES[:4]:
                        await publisher.publish(name, b"%d" % number)

            publishing = asyncio.ensure_future(publish())
            turn = 0
            while not publishing.done():
                turn += 1
                await cluster.move(cluster.shard_of(NAMES[turn % 4]), cluster.nodes[turn % 3].name)
                await asyncio.sleep(0.02)
            await publishing
            found: dict[str, list[int]] = {}
            for message in await take(subscription, 39 * 4):
                found.setdefault(message.topic, []).append(int(message.payload))
            assert found == {name: list(range(1, 40)) for name in NAMES[:4]}


@scenario
async def test_slow_reader_gets_everything_within_its_credit(cluster: EmbeddedCluster) -> None:
    async with (
        Basic(cluster.nodes[2]) as bus,
        cluster.connect() as publisher,
        bus.subscribe("t/*", buffer_bytes=20_000) as subscription,
    ):
        for number in range(60):
            for name in NAMES[:4]:
                await publisher.publish(name, b"%04d" % number + bytes(1000))
        await asyncio.sleep(0.2)
        assert subscription._held_bytes < 40_000
        found: dict[str, list[int]] = {}
        for message in await take(subscription, 240):
            found.setdefault(message.topic, []).append(int(message.payload[:4]))
        assert found == {name: list(range(60)) for name in NAMES[:4]}


@scenario
async def test_ephemeral_topics_of_other_nodes_are_heard(cluster: EmbeddedCluster) -> None:
    names = [f"n/{number}" for number in range(8)]
    async with (
        Basic(cluster.nodes[0]) as bus,
        Basic(cluster.nodes[1]) as publisher,
        bus.subscribe("n/*") as subscription,
    ):
        for name in names:
            assert (await publisher.publish(name, b"x")).receivers == 1
        assert {message.topic for message in await take(subscription, 8)} == set(names)


@scenario
async def test_subscription_survives_the_death_of_another_node(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[0]) as bus, cluster.nodes[2].connect() as publisher:
        for name in NAMES:
            await publisher.publish(name, b"0")
        async with bus.subscribe("t/*") as subscription:
            await cluster.kill("node-2")
            await cluster.settled()
            for name in NAMES:
                await publisher.publish(name, b"1")
            found = await take(subscription, len(NAMES))
            assert {(m.topic, m.payload) for m in found} == {(name, b"1") for name in NAMES}


@scenario
async def test_wrong_requests_are_refused_as_by_one_broker(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        with pytest.raises(ClientFault):
            async with bus.subscribe("t/[", start="earliest"):
                pass
        await bus.publish("a", b"1")
        with pytest.raises(ClientFault, match="has not reached"):
            async with bus.subscribe("a", start=17):
                pass
