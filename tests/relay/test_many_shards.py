"""Verbs about many shards: at any node they answer for all of them, for basic clients and for those that merge."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from runnel.client import Bus
from runnel.client.connection import Deadline
from runnel.errors import ClientFault, Unavailable, UnknownTopicError
from runnel.formats import wire
from runnel.formats.wire import CursorPlace
from runnel.testing.cluster import EmbeddedCluster, EmbeddedNode
from tests.relay.stage import Basic, scenario

NAMES = [f"t/{number:02}" for number in range(20)]


def clients(node: EmbeddedNode) -> tuple[AbstractAsyncContextManager[Bus], ...]:
    """One that knows nothing of nodes, and one that merges what it reads."""
    return Basic(node), node.connect()


async def fill(cluster: EmbeddedCluster) -> None:
    async with cluster.connect() as bus:
        for name in NAMES:
            for payload in (b"1", b"2", b"3"):
                await bus.publish(name, payload)
        for partition in range(8):
            await bus.publish("p/1", b"x", partition=partition)
        await bus.publish("m/1", b"kept in memory")


@scenario
async def test_topics_are_listed_with_all_their_messages(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    for node in cluster.nodes:
        for client in clients(node):
            async with client as bus:
                topics = await bus.topics("t/*")
                assert [(each.name, each.messages) for each in topics] == [(n, 3) for n in NAMES]
                counts = {each.name: each.messages for each in await bus.topics("?/1")}
                assert counts == {"m/1": 1, "p/1": 8}


@scenario
async def test_ephemeral_topic_is_known_at_every_node(cluster: EmbeddedCluster) -> None:
    owner = cluster.owner(cluster.shard_of("n/1")) or cluster.nodes[0]
    async with owner.connect() as reader, reader.subscribe("n/1"):
        for node in cluster.nodes:
            async with Basic(node) as bus:
                assert (await bus.publish("n/1", b"x")).receivers == 1
                topic = await bus.topic("n/1")
                assert (topic.keep, topic.subscribers) == ("none", 1)
                [listed] = await bus.topics("n/*")
                assert listed.messages == topic.messages


@scenario
async def test_pages_of_topics_leave_nothing_out_and_repeat_nothing(
    cluster: EmbeddedCluster,
) -> None:
    await fill(cluster)
    async with Basic(cluster.nodes[0]) as bus:
        home = bus._router.home
        names: list[str] = []
        after, is_complete = "", False
        while not is_complete:
            answer, _ = await home.ask(
                wire.TopicList,
                lambda number, after=after: wire.Topics(number, "*", after, 3),  # type: ignore[misc]
                deadline=Deadline(bus._timers, 10),
                what="a page",
            )
            assert 1 <= len(answer.topics) <= 3
            names += [each.name for each in answer.topics]
            after, is_complete = names[-1], answer.is_complete
        assert names == sorted([*NAMES, "p/1", "m/1"])


@scenario
async def test_topic_is_described_with_every_partition(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    for node in cluster.nodes:
        for client in clients(node):
            async with client as bus:
                topic = await bus.topic("p/1")
                assert topic.messages == 8
                assert [(p.first_offset, p.next_offset) for p in topic.partitions] == [(1, 2)] * 8
                assert {p.owner.epoch > 0 for p in topic.partitions} == {True}
                assert (await bus.topic("m/1")).messages == 1
                with pytest.raises(UnknownTopicError):
                    await bus.topic("nothing")


@scenario
async def test_partition_that_nobody_has_used_is_described_as_empty(
    cluster: EmbeddedCluster,
) -> None:
    async with Basic(cluster.nodes[0]) as bus:
        await bus.publish("p/2", b"x", partition=2)
        topic = await bus.topic("p/2")
    offsets = [(p.first_offset, p.next_offset) for p in topic.partitions]
    assert offsets == [(1, 1), (1, 1), (1, 2), *[(1, 1)] * 5]


@scenario
async def test_purge_and_deletion_reach_every_partition(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    async with Basic(cluster.nodes[0]) as bus, Basic(cluster.nodes[2]) as other:
        await bus.purge_topic("p/1")
        for partition in range(8):
            page = await other.fetch("p/1", partition=partition)
            assert (page.messages, page.first_offset) == ([], 2)
        await bus.purge_topic("m/1")
        assert (await other.fetch("m/1")).messages == []
        for name in ("p/1", "m/1"):
            await bus.delete_topic(name)
        names = {each.name for each in await bus.topics("*")}
        assert names == set(NAMES)
        with pytest.raises(UnknownTopicError):
            await bus.delete_topic("p/1")
        receipt = await bus.publish("p/1", b"again", partition=5)
        assert receipt.offset == 2


@scenario
async def test_shards_are_listed_and_fetched_wherever_they_are(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    for node in cluster.nodes:
        async with Basic(node) as bus:
            shards = await bus.shards("t/*")
            owners = {f"{each.journal}/{each.shard}" for each in shards}
            assert owners == {str(cluster.shard_of(name)) for name in NAMES}
            found: dict[str, list[bytes]] = {}
            for shard in shards:
                entry = shard.first_entry
                while entry < shard.next_entry:
                    page = await bus.fetch_shard(
                        shard.journal, shard.shard, entry, patterns=["t/*"]
                    )
                    for batch in page.batches:
                        for message in batch:
                            found.setdefault(message.topic, []).append(message.payload)
                    entry = page.next_entry
            assert found == {name: [b"1", b"2", b"3"] for name in NAMES}


@scenario
async def test_cursor_over_several_owners_has_the_lag_of_all(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    places = dict.fromkeys(NAMES, 2)
    for at, node in enumerate(cluster.nodes):
        async with Basic(node) as bus:
            name = f"c{at}"
            await bus.set_cursor(name, places)  # type: ignore[arg-type]
            await bus.set_cursor(f"one{at}", {"t/00": 3})
            with pytest.raises(ClientFault, match="between 1 and 4"):
                await bus.set_cursor("wrong", {"t/00": 1, "t/01": 5, "t/02": 1})
            with pytest.raises(ClientFault, match="between 1 and 4"):
                await bus.set_cursor("wrong", {"t/01": 5})
    for node in cluster.nodes:
        for client in clients(node):
            async with client as bus:
                for at in range(3):
                    cursor = await bus.cursor(f"c{at}")
                    assert cursor is not None
                    assert {p.topic: p.lag for p in cursor.places} == dict.fromkeys(NAMES, 2)
                listed = {each.name: each for each in await bus.cursors()}
                assert set(listed) == {"c0", "c1", "c2", "one0", "one1", "one2"}
                assert [place.lag for place in listed["one1"].places] == [1]
                assert await bus.cursor("nothing") is None
    async with Basic(cluster.nodes[1]) as bus:
        await bus.remove_cursor("c0")
        assert await bus.cursor("c0") is None


@scenario
async def test_cursor_in_shards_is_set_for_all_owners(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    async with Basic(cluster.nodes[0]) as bus:
        shards = await bus.shards("t/*")
        places = [
            CursorPlace(journal=s.journal, shard=s.shard, epoch=s.epoch, entry=1, patterns=("t/*",))
            for s in shards
        ]
        await bus.set_cursor("pipeline", places)
        cursor = await bus.cursor("pipeline")
        assert cursor is not None
        assert sum(place.lag for place in cursor.places) == 60
        beyond = [*places[1:], CursorPlace(journal="main", shard=shards[0].shard, entry=99)]
        with pytest.raises(ClientFault, match="99"):
            await bus.set_cursor("beyond", beyond)


@scenario
async def test_answers_stay_whole_while_shards_move(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    shards = sorted({cluster.shard_of(name) for name in NAMES})
    is_over = False

    async def move() -> None:
        turn = 0
        while not is_over:
            for shard in shards:
                turn += 1
                await cluster.move(shard, cluster.nodes[turn % 3].name)
                await asyncio.sleep(0.05)

    moving = asyncio.ensure_future(move())
    async with Basic(cluster.nodes[0]) as bus:
        for _ in range(15):
            topics = await bus.topics("t/*")
            assert [(each.name, each.messages) for each in topics] == [(n, 3) for n in NAMES]
    is_over = True
    await moving


@scenario
async def test_node_that_dies_is_no_silent_half_answer(cluster: EmbeddedCluster) -> None:
    await fill(cluster)
    async with Basic(cluster.nodes[0]) as bus:
        listing = asyncio.ensure_future(bus.topics("t/*"))
        await asyncio.sleep(0)
        await cluster.kill("node-2")
        try:
            topics = await listing
        except Unavailable:
            topics = await bus.topics("t/*")
        assert [(each.name, each.messages) for each in topics] == [(n, 3) for n in NAMES]
