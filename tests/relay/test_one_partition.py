"""Verbs about one partition through a node that does not own it: publishing, fetching, waiting, while shards move."""

from __future__ import annotations

import asyncio

import pytest

from runnel.errors import ClientFault, OffsetAheadError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.testing.cluster import EmbeddedCluster
from tests.relay.stage import Basic, other_than_owner, scenario


@scenario
async def test_what_is_published_anywhere_is_fetched_everywhere(cluster: EmbeddedCluster) -> None:
    for at, node in enumerate(cluster.nodes):
        async with Basic(node) as bus:
            for topic in ("a", "b", "c", "d"):
                receipt = await bus.publish(topic, b"%d" % at)
                assert receipt.offset == at + 1
                assert receipt.level == "stored"
    for node in cluster.nodes:
        async with Basic(node) as bus:
            for topic in ("a", "b", "c", "d"):
                page = await bus.fetch(topic, 1)
                assert [each.payload for each in page.messages] == [b"0", b"1", b"2"]
                assert page.end_offset == 4


@scenario
async def test_order_of_one_connection_holds_while_its_shard_moves(
    cluster: EmbeddedCluster,
) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        await bus.publish("a", b"first")
        shard = cluster.shard_of("a")
        sent = 0
        is_over = False

        async def publish() -> None:
            nonlocal sent
            async with bus.publisher("a", linger_ms=0) as publisher:
                while not is_over:
                    publisher.send(b"%d" % sent)
                    sent += 1
                    await asyncio.sleep(0.001)

        publishing = asyncio.ensure_future(publish())
        for turn in range(12):
            await cluster.move(shard, cluster.nodes[turn % 3].name)
            await asyncio.sleep(0.01)
        is_over = True
        await publishing
    async with Basic(cluster.nodes[1]) as bus:
        found: list[bytes] = []
        offset = 2
        while len(found) < sent:
            page = await bus.fetch("a", offset)
            assert page.messages
            found += [each.payload for each in page.messages]
            offset = page.next_offset
    numbers = [int(each) for each in found]
    assert sorted(set(numbers)) == list(range(sent))
    firsts = list(dict.fromkeys(numbers))
    assert firsts == sorted(firsts)


@scenario
async def test_named_publisher_stores_each_batch_once_while_its_shard_moves(
    cluster: EmbeddedCluster,
) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        await bus.publish("a", b"first")
        shard = cluster.shard_of("a")
        sent = 0

        async def move() -> None:
            for turn in range(9):
                await cluster.move(shard, cluster.nodes[turn % 3].name)
                await asyncio.sleep(0.01)

        mover = asyncio.ensure_future(move())
        async with bus.publisher("a", name="p", linger_ms=0) as publisher:
            while not mover.done():
                publisher.send(b"%d" % sent)
                sent += 1
                await asyncio.sleep(0.001)
        await mover
        page_from, found = 2, list[int]()
        while len(found) < sent:
            page = await bus.fetch("a", page_from)
            assert page.messages
            found += [int(each.payload) for each in page.messages]
            page_from = page.next_offset
    assert found == list(range(sent))


@scenario
async def test_fetch_waits_at_the_owner_and_ends_with_a_message_from_elsewhere(
    cluster: EmbeddedCluster,
) -> None:
    async with Basic(cluster.nodes[0]) as first, Basic(cluster.nodes[1]) as second:
        await first.publish("a", b"1")
        node = await other_than_owner(cluster, "a")
        async with Basic(node) as reader:
            waiting = asyncio.ensure_future(reader.fetch("a", 2, wait_s=20))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await cluster.move(cluster.shard_of("a"), node.name)
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await second.publish("a", b"2")
            page = await waiting
            assert [each.payload for each in page.messages] == [b"2"]


@scenario
async def test_errors_come_as_the_owner_says_them(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        await bus.publish("a", b"1")
    node = await other_than_owner(cluster, "a")
    async with Basic(node) as bus:
        with pytest.raises(OffsetAheadError) as caught:
            await bus.fetch("a", 7)
        assert (caught.value.offset, caught.value.next_offset) == (7, 2)
        with pytest.raises(UnknownTopicError):
            await bus.fetch("nothing", 1)
        with pytest.raises(ClientFault):
            await bus.publish("!system/x", b"")
        await bus.publish("p/1", b"x", partition=3)
        with pytest.raises(ClientFault, match="partitions"):
            await bus.fetch("p/1", 1)


@scenario
async def test_topics_that_are_not_on_disk_are_published_to_at_their_owners(
    cluster: EmbeddedCluster,
) -> None:
    for topic in ("m/1", "m/2", "m/3", "m/4"):
        for at, node in enumerate(cluster.nodes):
            async with Basic(node) as bus:
                receipt = await bus.publish(topic, b"%d" % at)
                assert (receipt.offset, receipt.level) == (at + 1, "received")
        for node in cluster.nodes:
            async with Basic(node) as bus:
                page = await bus.fetch(topic, 1)
                assert [each.payload for each in page.messages] == [b"0", b"1", b"2"]
    for topic in ("n/1", "n/2", "n/3"):
        for at, node in enumerate(cluster.nodes):
            async with Basic(node) as bus:
                receipt = await bus.publish(topic, b"%d" % at)
                assert (receipt.level, receipt.receivers) == ("received", 0)


@scenario
async def test_batches_pass_as_they_are(cluster: EmbeddedCluster) -> None:
    batch = Batch.from_messages([Message("p/1", b"%d" % at, partition=5) for at in range(100)])
    for node in cluster.nodes:
        async with Basic(node) as bus:
            receipt = await bus.publish_batch(batch)
            assert len(receipt.base_offsets) == 1
    async with Basic(cluster.nodes[0]) as bus:
        page = await bus.fetch("p/1", 1, partition=5)
        assert len(page) == 300


@scenario
async def test_publishing_goes_on_when_the_owner_dies(cluster: EmbeddedCluster) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        await bus.publish("a", b"0")
        shard = cluster.shard_of("a")
        await cluster.move(shard, "node-2")
        await bus.publish("a", b"1")
        await cluster.kill("node-2")
        await bus.publish("a", b"2")
        page = await bus.fetch("a", 1)
        assert [each.payload for each in page.messages] == [b"0", b"1", b"2"]
