"""A cluster in one process: topics spread over the nodes, and shards that move and fall to others."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runnel.config import BrokerSettings, Keep, LogSettings, Settings, TopicRule
from runnel.errors import Unavailable
from runnel.log.log import ShardId
from runnel.testing import open_cluster
from runnel.testing.cluster import EmbeddedCluster

RULES = (
    TopicRule(match="m/*", keep=Keep.MEMORY, journal="memory"),
    TopicRule(match="n/*", keep=Keep.NONE),
)
SETTINGS = Settings(topics=RULES, log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0))
TOPICS = [f"t/{number}" for number in range(20)]


def scenario(run: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test with an event loop of its own."""

    @functools.wraps(run)
    def test(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(run(*args, **named), 60))

    return test


async def publish_all(cluster: EmbeddedCluster, payload: bytes) -> None:
    async with cluster.connect() as bus:
        for topic in TOPICS:
            await bus.publish(topic, payload)


async def read_all(cluster: EmbeddedCluster, node: str) -> dict[str, list[bytes]]:
    found = {}
    async with cluster.node(node).connect() as bus:
        for topic in TOPICS:
            fetched = await bus.fetch(topic)
            found[topic] = [message.payload for message in fetched.messages]
    return found


@scenario
async def test_topics_spread_over_the_nodes_and_are_read_through_any() -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        owners = {cluster.owner(cluster.shard_of(topic)) for topic in TOPICS}
        assert owners == set(cluster.nodes)
        for node in ("node-1", "node-2", "node-3"):
            assert await read_all(cluster, node) == {topic: [b"1"] for topic in TOPICS}


@scenario
async def test_moved_shard_keeps_its_messages_and_order() -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        for topic in TOPICS:
            shard = cluster.shard_of(topic)
            for node in cluster.nodes:
                await cluster.move(shard, node.name)
                assert cluster.owner(shard) is node
        await publish_all(cluster, b"2")
        assert await read_all(cluster, "node-2") == {topic: [b"1", b"2"] for topic in TOPICS}


@scenario
async def test_shards_of_a_killed_node_are_served_by_the_others() -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        await cluster.kill("node-1")
        await cluster.settled()
        assert await read_all(cluster, "node-3") == {topic: [b"1"] for topic in TOPICS}
        await publish_all(cluster, b"2")
        await cluster.start("node-1")
        assert await read_all(cluster, "node-1") == {topic: [b"1", b"2"] for topic in TOPICS}


@scenario
async def test_publisher_follows_moves() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.node("node-3").connect() as bus:
        shard = cluster.shard_of("t/1")
        async with bus.publisher("t/1", name="p") as publisher:
            for number in range(300):
                publisher.send(str(number).encode())
                await asyncio.sleep(0)
                if number % 50 == 25:
                    await cluster.move(shard, f"node-{1 + number // 50 % 3}")
            await publisher.flush()
        fetched = await bus.fetch("t/1", messages_max=1000)
        assert [int(message.payload) for message in fetched.messages] == list(range(300))


@scenario
async def test_drained_node_serves_nothing_and_others_everything() -> None:
    async with open_cluster(2, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        assert cluster.nodes[0].shards()
        await cluster.drain("node-1")
        assert not cluster.nodes[0].shards()
        await cluster.settled()
        await publish_all(cluster, b"2")
        assert not cluster.nodes[0].shards()
        assert await read_all(cluster, "node-1") == {topic: [b"1", b"2"] for topic in TOPICS}


@pytest.mark.parametrize("topic", ["m/1", "n/1"])
@scenario
async def test_topics_that_are_not_on_disk_have_owners_too(topic: str) -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        shard = cluster.shard_of(topic)
        async with cluster.connect() as bus:
            first = await bus.publish(topic, b"1")
            owner = cluster.owner(shard)
            assert owner is not None
            other = next(node for node in cluster.nodes if node is not owner)
            await cluster.move(shard, other.name)
            again = await bus.publish(topic, b"2")
        assert again.epoch > first.epoch or topic == "n/1"  # nobody reads it, so it does not exist


@scenario
async def test_ephemeral_messages_reach_readers_at_the_owner() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        shard = cluster.shard_of("n/1")
        assert shard.journal == "live"
        await bus.publish("n/1", b"0")
        owner = cluster.owner(shard)
        assert owner is not None
        async with owner.connect() as reader, reader.subscribe("n/1") as subscription:
            epochs = []
            for number in range(2):
                published = await bus.publish("n/1", b"%d" % number)
                message = await anext(aiter(subscription))
                assert message.payload == b"%d" % number
                epochs.append(published.epoch)
                if number == 0:
                    other = next(node for node in cluster.nodes if node is not owner)
                    await cluster.move(shard, other.name)
                    await cluster.move(shard, owner.name)
            assert epochs[1] > epochs[0]


@scenario
async def test_routes_of_all_nodes_name_the_owner() -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        await asyncio.sleep(0)
        for topic in TOPICS:
            owner = cluster.owner(cluster.shard_of(topic))
            assert owner is not None
            routes = [node.broker.routes([topic])[0].owners[0] for node in cluster.nodes]
            assert {route.address for route in routes} == {owner.url.removeprefix("runnel://")}
            assert len({route.epoch for route in routes}) == 1
            assert ShardId(routes[0].journal, routes[0].shard) == cluster.shard_of(topic)


# --- What a node says about itself ---


@scenario
async def test_each_node_publishes_its_own_reports_and_a_reader_gets_all() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        nodes = set()
        async with bus.subscribe("!system/metrics/broker") as subscription:
            async for message in subscription:
                nodes.add(json.loads(message.payload)["node"])
                if len(nodes) == 3:
                    break


@scenario
async def test_moves_are_events_with_their_reason() -> None:
    async with open_cluster(2, SETTINGS) as cluster, cluster.connect() as bus:
        await publish_all(cluster, b"1")
        shard = cluster.nodes[0].shards()[0]
        events: dict[str, dict[str, Any]] = {}
        async with bus.subscribe("!system/events") as subscription:
            await cluster.move(shard, "node-2")
            async for message in subscription:
                event = json.loads(message.payload)
                if event["subject"] == str(shard):
                    events[event["kind"]] = event
                if {"shard_given_up", "shard_taken"} <= events.keys():
                    break
        assert events["shard_given_up"]["node"] == "node-1"
        assert events["shard_given_up"]["reason"] == "node-2 should have it: a test"
        assert events["shard_taken"]["node"] == "node-2"
        assert events["shard_taken"]["epoch"] > 1


@scenario
async def test_reports_that_are_kept_go_to_a_partition_of_their_node() -> None:
    rule = TopicRule(match="!system/events", journal="reports", partitions=32)
    settings = Settings(topics=(rule,), log=SETTINGS.log)
    async with open_cluster(2, settings) as cluster:
        await publish_all(cluster, b"1")
        await cluster.settled()
        shard = cluster.nodes[0].shards()[0]
        await cluster.move(shard, "node-2")
        await cluster.move(shard, "node-1")
        found = set()
        async with cluster.connect() as bus:
            for partition in range(32):
                page = await bus.fetch("!system/events", partition=partition)
                found |= {json.loads(message.payload)["node"] for message in page.messages}
        assert found == {"node-1", "node-2"}


@scenario
async def test_loads_are_measured_and_shards_follow_them() -> None:
    fast = BrokerSettings(metrics_interval_ns=50_000_000)
    settings = Settings(topics=RULES, log=SETTINGS.log, broker=fast)
    async with open_cluster(2, settings) as cluster:
        await publish_all(cluster, b"x" * 10_000)
        state = cluster.observer
        await cluster.until(lambda: all(node.node.load()[1] for node in cluster.nodes))
        for node in cluster.nodes:
            await node.node.round()
        loads = {load.node: load.bytes_per_s for load in await state.loads()}
        for node in cluster.nodes:
            assert loads[node.name].keys() <= set(map(str, node.shards()))
            assert sum(loads[node.name].values()) > 0


@scenario
async def test_journal_that_changes_its_keep_goes_on_serving_what_it_has_on_disk() -> None:
    disk = Settings(topics=(TopicRule(match="x", journal="x"),), log=SETTINGS.log)
    memory = Settings(
        topics=(TopicRule(match="x", keep=Keep.MEMORY, journal="x"),), log=SETTINGS.log
    )
    async with open_cluster(2, disk) as cluster:
        async with cluster.connect() as bus:
            await bus.publish("x", b"1")
        for node in cluster.nodes:
            await node.stop()
        cluster.settings = memory
        for node in cluster.nodes:
            await node.start()
        async with cluster.connect() as bus:
            page = await bus.fetch("x")
            assert [message.payload for message in page.messages] == [b"1"]


@scenario
async def test_node_does_not_drain_when_nobody_could_take_its_shards() -> None:
    async with open_cluster(2, SETTINGS) as cluster:
        await publish_all(cluster, b"1")
        await cluster.drain("node-1")
        with pytest.raises(Unavailable, match="no other node"):
            await cluster.drain("node-2")
        assert await read_all(cluster, "node-1") == {topic: [b"1"] for topic in TOPICS}
