"""The verbs about the cluster: status, move, drain and balance, through any node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from runnel.client import Bus
from runnel.config import LogSettings, Settings
from runnel.errors import ClientFault
from runnel.formats.cluster_heads import ShardReport
from runnel.testing import open_broker, open_cluster
from runnel.testing.cluster import EmbeddedCluster

SETTINGS = Settings(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0))
TOPICS = [f"t/{number}" for number in range(20)]


@asynccontextmanager
async def cluster_with_topics() -> AsyncIterator[tuple[EmbeddedCluster, Bus]]:
    async with (
        asyncio.timeout(60),
        open_cluster(3, SETTINGS) as cluster,
        cluster.connect() as bus,
    ):
        for topic in TOPICS:
            await bus.publish(topic, b"1")
        yield cluster, bus


async def shards_until(
    bus: Bus, holds: Callable[[dict[str, ShardReport]], bool]
) -> dict[str, ShardReport]:
    """The shards by name, once they are as a test expects."""
    while True:
        found = {f"{each.journal}/{each.shard}": each for each in (await bus.cluster()).shards}
        if holds(found):
            return found
        await asyncio.sleep(0.01)


def test_status_shows_nodes_and_the_owner_of_every_shard() -> None:
    async def scenario() -> None:
        async with cluster_with_topics() as (cluster, bus):
            await cluster.settled()
            for node in cluster.nodes:
                await node.node.round()  # what it measures
            status = await bus.cluster()
            assert [node.name for node in status.nodes] == ["node-1", "node-2", "node-3"]
            assert all(node.is_alive and not node.is_draining for node in status.nodes)
            assert {node.pid for node in status.nodes} == {os.getpid()}
            owned = {
                node.name: sum(shard.node == node.name for shard in status.shards)
                for node in status.nodes
            }
            assert owned == {node.name: node.shards for node in status.nodes}
            assert sum(owned.values()) == len(status.shards) > 3
            places = [(shard.journal, shard.shard) for shard in status.shards]
            assert places == sorted(places)
            # The same, page by page and through another node.
            async with cluster.nodes[2].connect() as other:
                other_status = await other.cluster()
            assert [(each.journal, each.shard) for each in other_status.shards] == places
            await cluster.kill("node-3")
            await shards_until(
                bus, lambda found: all(each.node in ("node-1", "node-2") for each in found.values())
            )
            assert [node.is_alive for node in (await bus.cluster()).nodes] == [True, True, False]

    asyncio.run(scenario())


def test_shard_moves_to_the_node_that_an_operator_names() -> None:
    async def scenario() -> None:
        async with cluster_with_topics() as (_, bus):
            (shard, before) = next(
                (name, each)
                for name, each in (await shards_until(bus, lambda found: len(found) > 3)).items()
                if each.node != "node-2"
            )
            await bus.move_shard(shard, "node-2")
            after = (await shards_until(bus, lambda found: found[shard].node == "node-2"))[shard]
            assert after.epoch > before.epoch
            assert after.moved_ns > before.moved_ns
            await bus.move_shard(shard, "node-2")  # it is there already
            assert (await bus.cluster()).shards
            for topic in TOPICS:
                assert [each.payload for each in (await bus.fetch(topic, 1)).messages] == [b"1"]

    asyncio.run(scenario())


def test_node_that_drains_gives_up_its_shards_until_it_may_take_some_again() -> None:
    async def scenario() -> None:
        async with cluster_with_topics() as (_, bus):
            await bus.drain_node("node-1")
            found = await shards_until(
                bus, lambda found: {each.node for each in found.values()} == {"node-2", "node-3"}
            )
            (node,) = [each for each in (await bus.cluster()).nodes if each.is_draining]
            assert (node.name, node.shards) == ("node-1", 0)
            await bus.drain_node("node-1", is_draining=False)
            shard = next(iter(found))
            await bus.move_shard(shard, "node-1")
            await shards_until(bus, lambda found: found[shard].node == "node-1")

    asyncio.run(scenario())


def test_balancing_moves_shards_although_they_have_just_moved() -> None:
    async def scenario() -> None:
        async with cluster_with_topics() as (cluster, bus):
            found = await shards_until(bus, lambda found: len(found) > 6)
            for shard in found:
                await bus.move_shard(shard, "node-1")
            await shards_until(bus, lambda found: {x.node for x in found.values()} == {"node-1"})
            for node in cluster.nodes:
                await node.node.round()
            # Shards without load go where hashing puts them, one for each node in a round.
            wishes = await bus.balance_cluster()
            assert wishes
            assert all(wish.reason and wish.node != "node-1" for wish in wishes)
            for wish in wishes:
                name = f"{wish.journal}/{wish.shard}"
                await shards_until(
                    bus,
                    lambda found: found[name].node == wish.node,  # noqa: B023 - used at once
                )

    asyncio.run(scenario())


@pytest.mark.parametrize("shard", ["main", "main/x", "/", "main/-1"])
def test_what_is_no_shard_is_refused_by_the_client(shard: str) -> None:
    async def scenario() -> None:
        async with open_broker() as broker, broker.connect() as bus:
            with pytest.raises(ClientFault, match='write its journal and number, as "main/3"'):
                await bus.move_shard(shard, "node-1")

    asyncio.run(scenario())


def test_what_does_not_exist_is_refused() -> None:
    async def scenario() -> None:
        async with cluster_with_topics() as (_, bus):
            with pytest.raises(ClientFault, match="there is no shard nothing/3"):
                await bus.move_shard("nothing/3", "node-1")
            found = await shards_until(bus, lambda found: len(found) > 3)
            with pytest.raises(ClientFault, match="node-9"):
                await bus.move_shard(next(iter(found)), "node-9")
            with pytest.raises(ClientFault, match="node-9"):
                await bus.drain_node("node-9")

    asyncio.run(scenario())


def test_broker_that_is_alone_has_no_cluster() -> None:
    async def scenario() -> None:
        async with open_broker() as broker, broker.connect() as bus:
            with pytest.raises(ClientFault, match="one process, and no cluster"):
                await bus.cluster()
            with pytest.raises(ClientFault, match="one process, and no cluster"):
                await bus.balance_cluster()

    asyncio.run(scenario())
