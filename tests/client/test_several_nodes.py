"""Publishers, readers and requests where several nodes own the topics, while shards move and nodes are lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import pytest

from runnel.client import Bus, connect
from runnel.client.consumer import Subscription
from runnel.config import Keep, LogSettings, Settings, TopicRule
from runnel.errors import ConnectionLostError, TimeoutExpiredError
from runnel.formats.message import Message
from runnel.testing import open_cluster
from tests.client.running import in_both_loops, until
from tests.fakes.moving_shards import moving_shards

RULES = (
    TopicRule(match="m/*", keep=Keep.MEMORY, journal="memory"),
    TopicRule(match="n/*", keep=Keep.NONE),
    TopicRule(match="p/*", partitions=4),
)
SETTINGS = Settings(topics=RULES, log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0))
TOPICS = [f"t/{number}" for number in range(12)]


async def read(subscription: Subscription, got: dict[str, list[bytes]], count: int) -> None:
    """Read so many messages, by topic."""
    left = count
    async for message in subscription:
        got[message.topic].append(message.payload)
        left -= 1
        if not left:
            return


def expected(rounds: int, topics: Sequence[str] = TOPICS) -> dict[str, list[bytes]]:
    return {topic: [b"%d" % number for number in range(rounds)] for topic in topics}


PATTERNS = {"by name": TOPICS, "by pattern": ["t/*"]}


@pytest.mark.parametrize("how", PATTERNS)
@pytest.mark.parametrize("start", ["earliest", "latest"])
@in_both_loops
async def test_readers_get_everything_once_and_in_order_while_shards_move(
    start: str, how: str
) -> None:
    rounds = 40
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        for topic in TOPICS:
            await bus.publish(topic, b"before")
        got: dict[str, list[bytes]] = defaultdict(list)
        subscription = bus.subscribe(*PATTERNS[how], start=start)
        async with moving_shards(cluster) as moves, subscription:
            before = len(TOPICS) if start == "earliest" else 0
            reading = asyncio.ensure_future(read(subscription, got, rounds * len(TOPICS) + before))
            for number in range(rounds):
                for topic in TOPICS:
                    await bus.publish(topic, b"%d" % number)
            await reading
            await until(lambda: moves() > 5)
        first = [b"before"] if start == "earliest" else []
        assert got == {topic: first + each for topic, each in expected(rounds).items()}
        assert not subscription.gaps


@pytest.mark.parametrize("name", [None, "p"])
@in_both_loops
async def test_publishers_keep_their_order_while_shards_move(name: str | None) -> None:
    rounds = 150
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        async with moving_shards(cluster) as moves:
            async with bus.publisher(name=name, batch_messages_max=7) as publisher:
                for number in range(rounds):
                    for topic in TOPICS:
                        publisher.send(b"%d" % number, topic)
                    await publisher.ready()
                    await asyncio.sleep(0.002)
            await until(lambda: moves() > 5)
        for topic, payloads in expected(rounds).items():
            page = await bus.fetch(topic, 1)
            assert [message.payload for message in page.messages] == payloads


@in_both_loops
async def test_keys_of_a_topic_with_partitions_keep_their_order() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        by_key: dict[bytes | None, list[bytes]] = defaultdict(list)
        async with bus.subscribe("p/*") as subscription, moving_shards(cluster):
            async with bus.publisher("p/x", name="p") as publisher:
                for number in range(400):
                    publisher.send(b"%d" % number, key=b"%d" % (number % 9))
                    await publisher.ready()
                    await asyncio.sleep(0)
            messages: list[Message] = [await anext(subscription) for _ in range(400)]
        for message in messages:
            by_key[message.key].append(message.payload)
        assert by_key == {
            b"%d" % key: [b"%d" % number for number in range(key, 400, 9)] for key in range(9)
        }


@in_both_loops
async def test_lost_node_is_not_a_lost_subscription() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.node("node-2").connect() as bus:
        got: dict[str, list[bytes]] = defaultdict(list)
        async with bus.subscribe("t/*") as subscription:
            reading = asyncio.ensure_future(read(subscription, got, 60 * len(TOPICS)))
            async with bus.publisher(name="p") as publisher:
                for number in range(60):
                    for topic in TOPICS:
                        publisher.send(b"%d" % number, topic)
                    await publisher.flush()
                    if number == 20:
                        await cluster.kill("node-2")
                    if number == 40:
                        await cluster.start("node-2")
                        await cluster.kill("node-1")
            await reading
        assert got == expected(60)
        assert not subscription.gaps


@in_both_loops
async def test_any_address_of_a_list_is_home_and_replaced_when_it_is_lost() -> None:
    async with open_cluster(2, SETTINGS) as cluster:
        first, second = (node.url.removeprefix("runnel://") for node in cluster.nodes)
        await cluster.stop("node-1")
        async with connect(f"runnel://{first},{second}") as bus:
            assert bus.server.node == "node-2"
            await bus.publish("t/1", b"1")
            await cluster.start("node-1")
            await cluster.settled()
            await until_known(bus, 2)
            await cluster.kill("node-2")
            page = await bus.fetch("t/1", 1)
            assert [message.payload for message in page.messages] == [b"1"]
            assert bus.server.node == "node-1"


async def until_known(bus: Bus, count: int) -> None:
    while len(bus._router.nodes) != count:  # noqa: ASYNC110 - the broker says so
        await asyncio.sleep(0.001)


@in_both_loops
async def test_node_that_joins_is_read_too() -> None:
    async with open_cluster(3, SETTINGS) as cluster:
        await cluster.stop("node-3")
        async with cluster.connect() as bus, bus.subscribe("t/*") as subscription:
            await cluster.start("node-3")
            for topic in TOPICS:
                await bus.publish(topic, b"0")
                await cluster.move(cluster.shard_of(topic), "node-3")
                await bus.publish(topic, b"1")
            got: dict[str, list[bytes]] = defaultdict(list)
            await read(subscription, got, 2 * len(TOPICS))
            assert got == expected(2)


@in_both_loops
async def test_single_messages_outlive_the_node_they_went_to() -> None:
    """They may be unknown at the moment of the loss, and afterwards they go to the next owner."""
    async with open_cluster(3, SETTINGS) as cluster, cluster.node("node-1").connect() as bus:
        for topic in TOPICS:
            await bus.publish(topic, b"0")
        await cluster.kill("node-3")
        for topic in TOPICS:
            try:
                await bus.publish(topic, b"1")
            except ConnectionLostError:
                await bus.publish(topic, b"1")
        for topic in TOPICS:
            page = await bus.fetch(topic, 1)
            assert page.messages[0].payload == b"0"
            assert page.messages[-1].payload == b"1"


@in_both_loops
async def test_ephemeral_and_memory_topics_are_read_from_all_nodes() -> None:
    topics = [f"{kind}/{number}" for kind in "mn" for number in range(8)]
    async with (
        open_cluster(3, SETTINGS) as cluster,
        cluster.connect() as bus,
        bus.subscribe("*") as subscription,
    ):
        for number in range(5):
            for topic in topics:
                await bus.publish(topic, b"%d" % number)
        got: dict[str, list[bytes]] = defaultdict(list)
        await read(subscription, got, 5 * len(topics))
        assert got == expected(5, topics)


@in_both_loops
async def test_ephemeral_messages_keep_their_order_while_their_shards_move() -> None:
    """Some may be lost with a move. Those that come are in order."""
    topics = [f"n/{number}" for number in range(8)]
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        got: dict[str, list[bytes]] = defaultdict(list)
        async with moving_shards(cluster) as moves, bus.subscribe("n/*") as subscription:
            reading = asyncio.ensure_future(read(subscription, got, 10**9))
            number = 0
            while number < 60 or moves() < 6:
                for topic in topics:
                    await bus.publish(topic, b"%06d" % number)
                number += 1
        await reading
        for payloads in got.values():
            assert payloads == sorted(set(payloads))
        assert sum(map(len, got.values())) > number * len(topics) // 2


@in_both_loops
async def test_flush_at_level_none_does_not_wait_for_a_lost_node() -> None:
    async with (
        open_cluster(3, SETTINGS) as cluster,
        cluster.node("node-1").connect() as bus,
        bus.publisher(level="none") as publisher,
    ):
        for topic in TOPICS:
            publisher.send(b"0", topic)
        await publisher.flush()
        await cluster.kill("node-3")
        await publisher.flush()


@pytest.mark.parametrize("how", PATTERNS)
@in_both_loops
async def test_last_values_of_all_nodes_come_once(how: str) -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        for number in range(3):
            for topic in TOPICS:
                await bus.publish(topic, b"%d" % number)
        async with (
            moving_shards(cluster),
            bus.subscribe(*PATTERNS[how], start="last") as subscription,
        ):
            got: dict[str, list[bytes]] = defaultdict(list)
            await read(subscription, got, len(TOPICS))
            assert got == {topic: [b"2"] for topic in TOPICS}
            for topic in TOPICS:
                await bus.publish(topic, b"3")
            await read(subscription, got, len(TOPICS))
            assert got == {topic: [b"2", b"3"] for topic in TOPICS}


@in_both_loops
async def test_shard_that_nobody_serves_for_too_long_ends_the_subscription() -> None:
    async with open_cluster(2, SETTINGS) as cluster:
        url = ",".join(node.url.removeprefix("runnel://") for node in cluster.nodes)
        async with connect(f"runnel://{url}", deadline_s=0.3) as bus:
            await bus.publish("t/1", b"1")
            async with bus.subscribe("t/*") as subscription:
                for node in cluster.nodes:
                    await cluster.kill(node.name)
                with pytest.raises(TimeoutExpiredError, match="subscribing to t/\\*: not done"):
                    await anext(subscription)


@in_both_loops
async def test_slow_reader_holds_no_more_than_its_buffer() -> None:
    async with open_cluster(3, SETTINGS) as cluster, cluster.connect() as bus:
        payload = bytes(1000)
        buffer_bytes = 64 * 2**10
        async with bus.subscribe("t/*", buffer_bytes=buffer_bytes) as subscription:
            async with bus.publisher() as publisher:
                for _ in range(100):
                    for topic in TOPICS:
                        publisher.send(payload, topic)
                    await publisher.flush()
            assert subscription._parts is not None
            held_bytes = subscription._parts.shares.held_bytes
            assert held_bytes < buffer_bytes + 3 * 16 * 2**10  # one delivery more of each part
            got: dict[str, list[bytes]] = defaultdict(list)
            await read(subscription, got, 100 * len(TOPICS))
            assert {topic: len(each) for topic, each in got.items()} == dict.fromkeys(TOPICS, 100)
