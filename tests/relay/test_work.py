"""Subscriptions and dead letters at any node: listed, described, moved and settled for the whole cluster."""

from __future__ import annotations

import asyncio

import pytest

from runnel.errors import UnknownSubscriptionError
from runnel.testing.cluster import EmbeddedCluster
from tests.relay.stage import Basic, scenario

NAMES = [f"t/{number:02}" for number in range(12)]


@scenario
async def test_backlog_of_all_owners_is_described_at_any_node(cluster: EmbeddedCluster) -> None:
    async with cluster.connect() as publisher:
        for name in NAMES:
            await publisher.publish(name, b"1")
            await publisher.publish(name, b"2")
    async with Basic(cluster.nodes[0]) as bus:
        await bus.make_subscription("work", "t/*", start="earliest")
    for node in cluster.nodes:
        for client in (Basic(node), node.connect()):
            async with client as bus:
                state = await bus.subscription("work")
                assert [member.backlog for member in state.members] == [24]
                assert [each.topic for each in state.partitions] == NAMES
                [listed] = await bus.subscriptions()
                assert [member.backlog for member in listed.members] == [24]
                with pytest.raises(UnknownSubscriptionError):
                    await bus.subscription("nothing")


@scenario
async def test_move_holds_at_every_owner(cluster: EmbeddedCluster) -> None:
    async with cluster.connect() as publisher:
        for name in NAMES:
            await publisher.publish(name, b"1")
    async with Basic(cluster.nodes[0]) as bus, Basic(cluster.nodes[1]) as other:
        await bus.make_subscription("work", "t/*", start="earliest")
        await other.move_subscription("work", "latest")
        state = await bus.subscription("work")
        assert [member.backlog for member in state.members] == [0]
        await bus.move_subscription("work", "earliest")
        state = await other.subscription("work")
        assert [member.backlog for member in state.members] == [12]
        await other.delete_subscription("work")
        assert await other.subscriptions() == []


@scenario
async def test_dead_letters_are_listed_and_dropped_at_any_node(cluster: EmbeddedCluster) -> None:
    async with cluster.connect() as bus:
        await bus.publish("t/00", b"fails")
        owner = cluster.owner(cluster.shard_of("t/00"))
        assert owner is not None
        await cluster.move(cluster.shard_of("!dead/work"), owner.name)
        async with bus.consume("work", "t/*", deliveries_max=1) as consumer:
            await (await anext(consumer)).nack(reason="no")
            await consumer.flush()
        while not (await bus.subscription("work")).dead:  # noqa: ASYNC110 - at another node
            await asyncio.sleep(0.01)
    for node in cluster.nodes:
        async with Basic(node) as basic:
            letters = [letter async for letter in basic.dead_letters("work")]
            assert [letter.payload for letter in letters] == [b"fails"]
            assert (await basic.subscription("work")).dead == 1
    async with Basic(cluster.nodes[1]) as basic:
        assert await basic.drop_dead("work", "all") == 1
    async with Basic(cluster.nodes[2]) as basic:
        assert [letter async for letter in basic.dead_letters("work")] == []
