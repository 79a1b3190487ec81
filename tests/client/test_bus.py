"""The verbs of the bus, one by one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable

import msgspec
import pytest

from runnel.client import Receipt, connect
from runnel.errors import (
    ClientFault,
    ConnectionLostError,
    LimitExceededError,
    MalformedError,
    OffsetGoneError,
    UnknownTopicError,
)
from runnel.formats import wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, CursorState, TopicState
from runnel.topics.partitions import partition_of_key
from tests.client.fake_server import RECEIVE_TIME_NS, FakeServer, Peer, silent, stored_batch
from tests.client.running import FakeTimers, in_both_loops, until

# --- Publishing ---


@in_both_loops
async def test_a_single_message_and_its_receipt() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers) as bus:
        receipt = await bus.publish(
            "a", b"1", key=b"k", tags={"unit": "C"}, uid=b"u" * 20, level="stored"
        )
        assert receipt == Receipt("a", 0, 1, 1, RECEIVE_TIME_NS, "stored")
        (sent,) = server.asked(wire.Send)
        now_ns = timers.time_ns()
        assert (sent.key, sent.tags, sent.uid) == (b"k", {"unit": "C"}, b"u" * 20)
        assert (sent.event_time_ns, sent.transmit_time_ns) == (now_ns, now_ns)


@in_both_loops
async def test_the_client_chooses_the_partition_of_a_single_message() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1)] * 4)
        by_key = await bus.publish("a", b"1", key=b"k")
        assert by_key.partition == partition_of_key(b"k", 4)
        by_partition_key = await bus.publish("a", b"1", key=b"k", partition_key=b"p")
        assert by_partition_key.partition == partition_of_key(b"p", 4)
        assert (await bus.publish("a", b"1", partition=3)).partition == 3
        keyless = {(await bus.publish("a", b"1")).partition for _ in range(4)}
        assert keyless == {0, 1, 2, 3}
        with pytest.raises(UnknownTopicError, match="0 to 3"):
            await bus.publish("a", b"1", partition=4)


@in_both_loops
async def test_routes_of_topics_are_asked_for_once() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        route = server.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1)] * 4)
        found = await bus.routes("a", "b", "a")
        assert list(found) == ["a", "b"]
        assert found["a"] == route
        assert await bus.routes("b") == {"b": found["b"]}
        assert [list(asked.topics) for asked in server.asked(wire.Routes)] == [["a", "b"]]


@in_both_loops
async def test_many_single_messages_at_once_keep_their_order() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        await asyncio.gather(*(bus.publish("a", b"%d" % number) for number in range(100)))
        assert server.stored["a", 0] == [b"%d" % number for number in range(100)]


@in_both_loops
async def test_level_none_does_not_wait_for_an_answer() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        receipt = await bus.publish("a", b"1", level="none")
        assert (receipt.offset, receipt.level) == (0, "none")
        await bus.ping()
        assert server.stored == {("a", 0): [b"1"]}


@in_both_loops
async def test_a_message_whose_answer_was_lost_may_have_been_stored_or_not() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Send, silent)
        publishing = asyncio.ensure_future(bus.publish("a", b"1"))
        await until(lambda: server.asked(wire.Send))
        server.drop()
        with pytest.raises(ConnectionLostError, match=r"publishing to a: .*done or not"):
            await publishing


@in_both_loops
async def test_a_single_message_follows_its_topic_to_another_node() -> None:
    async with FakeServer() as first, FakeServer() as second, connect(first.url) as bus:
        routes = [wire.Route("a", "disk", [wire.Owner("main", 0, 2, second.address)])]

        def moved(peer: Peer, request: wire.Send, tail: memoryview) -> None:
            peer.say(wire.Error(request.id, "moved", "to node 2", retriable=True, routes=routes))

        first.on(wire.Send, moved)
        for payload in (b"1", b"2"):
            await bus.publish("a", payload)
        assert second.stored == {("a", 0): [b"1", b"2"]}
        assert len(first.asked(wire.Send)) == 1


@in_both_loops
async def test_a_route_that_names_its_owner_is_followed_at_once() -> None:
    async with FakeServer() as first, FakeServer() as second, connect(first.url) as bus:
        first.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 2, second.address)])
        await bus.publish("a", b"1")
        async with bus.publisher("a") as publisher:
            publisher.send(b"2")
        assert second.stored == {("a", 0): [b"1", b"2"]}


@in_both_loops
async def test_a_batch_made_elsewhere() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        batch = Batch.from_messages([Message("a", b"1"), Message("b", b"2")])
        receipt = await bus.publish_batch(batch)
        assert list(receipt.base_offsets) == [1, 1]
        assert server.stored == {("a", 0): [b"1"], ("b", 0): [b"2"]}


@pytest.mark.parametrize(
    "options", [{"payload": "text"}, {"key": "k"}, {"tags": {"a": 1}}, {"uid": b"u"}]
)
def test_a_message_that_is_no_message_is_refused_at_once(options: dict[str, object]) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with FakeServer() as server, connect(server.url) as bus:
            with pytest.raises(MalformedError, match=next(iter(options))):
                await bus.publish("a", **({"payload": b""} | options))  # type: ignore[arg-type]

    scenario()


# --- Reading ---


@in_both_loops
async def test_a_page() -> None:
    async with FakeServer() as server, connect(server.url) as bus:

        def fetched(peer: Peer, request: wire.Fetch, tail: memoryview) -> None:
            head = wire.Fetched(request.id, 9, 1, 20)
            batches = [stored_batch("a", 5, [b"5", b"6"]), stored_batch("a", 7, [b"7", b"8"])]
            peer.say(head, b"".join(batch.pack() for batch in batches))

        server.on(wire.Fetch, fetched)
        page = await bus.fetch("a", 5, messages_max=4, bytes_max=1000, wait_s=1.5)
        assert [message.offset for message in page.messages] == [5, 6, 7, 8]
        assert (len(page), len(page.batches)) == (4, 2)
        assert (page.next_offset, page.first_offset, page.end_offset) == (9, 1, 20)
        (asked,) = server.asked(wire.Fetch)
        assert (asked.offset, asked.messages_max, asked.bytes_max, asked.wait_ms) == (
            5,
            4,
            1000,
            1500,
        )


@in_both_loops
async def test_a_fetch_begins_at_the_first_message_unless_told_otherwise() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Fetch, lambda peer, r, _: peer.say(wire.Fetched(r.id, 1, 1, 1)))
        await bus.fetch("a")
        await bus.fetch("a", time=5)
        assert [(f.offset, f.time_ns) for f in server.asked(wire.Fetch)] == [
            (None, None),
            (None, 5),
        ]
        with pytest.raises(ClientFault, match="not both"):
            await bus.fetch("a", 1, time=5)


@in_both_loops
async def test_errors_come_back_as_what_they_were() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        details: dict[str, str | int] = {
            "topic": "a",
            "partition": 0,
            "offset": 1,
            "first_offset": 5,
        }
        server.on(
            wire.Fetch,
            lambda peer, r, _: peer.say(
                wire.Error(r.id, "offset_gone", "gone", retriable=False, details=details)
            ),
        )
        with pytest.raises(OffsetGoneError) as caught:
            await bus.fetch("a")
        assert (caught.value.first_offset, caught.value.gap) == (5, 4)


# --- Topics, cursors, statistics ---


@in_both_loops
async def test_topics_are_listed_page_by_page() -> None:
    names = [f"t{number:04}" for number in range(2500)]

    def listed(peer: Peer, request: wire.Topics, tail: memoryview) -> None:
        rest = [name for name in names if name > request.after][: request.limit]
        states = [TopicState(name, "disk", "main", 1, 0, 0) for name in rest]
        peer.say(wire.TopicList(request.id, states, is_complete=rest[-1] == names[-1]))

    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Topics, listed)
        assert [topic.name for topic in await bus.topics("t*")] == names
        assert len(server.asked(wire.Topics)) == 3


@in_both_loops
async def test_describing_deleting_and_purging_topics() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        state = TopicState("a", "disk", "main", 1, 5, 0)
        server.on(
            wire.DescribeTopic,
            lambda peer, r, _: peer.say(wire.TopicList(r.id, [state], is_complete=True)),
        )
        assert (await bus.topic("a")).messages == 5
        await bus.delete_topic("a")
        await bus.purge_topic("b")
        assert server.asked(wire.DeleteTopic)[0].name == "a"
        assert server.asked(wire.PurgeTopic)[0].name == "b"


@in_both_loops
async def test_cursors_and_subscriptions_are_asked_for_in_pages() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        names = [f"n{number}" for number in range(5)]

        def page_of(request: wire.Cursors | work_heads.ListSubscriptions) -> tuple[list[str], bool]:
            rest = [name for name in names if name > request.after]
            return rest[:2], len(rest) <= 2

        def cursors(peer: Peer, request: wire.Cursors, tail: memoryview) -> None:
            some, is_complete = page_of(request)
            states = [CursorState(name, [], 1) for name in some]
            peer.say(wire.CursorListHead(request.id, states, is_complete))

        def subscriptions(
            peer: Peer, request: work_heads.ListSubscriptions, tail: memoryview
        ) -> None:
            some, is_complete = page_of(request)
            states = [
                work_heads.SubscriptionState(
                    name, "shared", ["*"], False, 1, work_heads.WorkOptions(), [], 0, 0
                )
                for name in some
            ]
            peer.say(work_heads.SubscriptionListHead(request.id, states, is_complete))

        server.on(wire.Cursors, cursors)
        server.on(work_heads.ListSubscriptions, subscriptions)
        assert [each.name for each in await bus.cursors()] == names
        assert [each.name for each in await bus.subscriptions()] == names
        assert [each.after for each in server.asked(wire.Cursors)] == ["", "n1", "n3"]
        assert {each.limit for each in server.asked(work_heads.ListSubscriptions)} == {1000}


@in_both_loops
async def test_argument_of_a_wrong_type_is_refused_at_once() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        wrong: list[tuple[Awaitable[object], str]] = [
            (bus.shards(["x"]), r"\['x'\] is no pattern of topics"),  # type: ignore[arg-type]
            (bus.topics(["x"]), r"\['x'\] is no pattern of topics"),  # type: ignore[arg-type]
            (bus.fetch_shard("main", 0, 1, patterns=[3]), "3 is no pattern of topics"),  # type: ignore[list-item]
            (bus.topic(["x"]), "describing .*wrong type.*Expected `str`, got `array`"),  # type: ignore[arg-type]
            (bus.cursor(7), "asking for cursor 7: .*wrong type"),  # type: ignore[arg-type]
            (bus.remove_cursor(object()), "wrong type"),  # type: ignore[arg-type]
            (bus.set_cursor("c", ["a"]), "setting cursor c: .*wrong type"),  # type: ignore[list-item]
        ]
        for asking, reason in wrong:
            with pytest.raises(ClientFault, match=reason):
                await asyncio.wait_for(asking, 5)
        assert server.asked(wire.Shards) == []


@in_both_loops
async def test_cursors() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        state = CursorState("c", [CursorPlace("a", 0, 5)], 1)

        def listed(peer: Peer, request: wire.Cursors, tail: memoryview) -> None:
            found = [state] if request.name in (None, "c") else []
            peer.say(wire.CursorListHead(request.id, found))

        server.on(wire.Cursors, listed)
        assert [cursor.name for cursor in await bus.cursors()] == ["c"]
        found = await bus.cursor("c")
        assert found is not None
        assert found.places[0].offset == 5
        assert await bus.cursor("d") is None
        await bus.set_cursor("c", {"a": 5, ("b", 2): 7})
        await bus.set_cursor("c", [CursorPlace(journal="main", entry=3)])
        await bus.remove_cursor("c")
        first, second = server.asked(wire.SetCursor)
        assert [(p.topic, p.partition, p.offset) for p in first.places] == [
            ("a", 0, 5),
            ("b", 2, 7),
        ]
        assert second.places[0].journal == "main"
        assert server.asked(wire.RemoveCursor)[0].name == "c"


@in_both_loops
async def test_statistics_are_a_document() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        document = msgspec.json.encode({"node": "node-1"})
        server.on(
            wire.Statistics, lambda peer, r, _: peer.say(wire.StatisticsReport(r.id), document)
        )
        assert await bus.statistics() == {"node": "node-1"}


# --- The end ---


@in_both_loops
async def test_a_forgotten_bus_warns_and_lets_go_of_its_connection() -> None:
    async with FakeServer() as server:
        bus = await connect(server.url)
        assert server.peers
        with pytest.warns(ResourceWarning, match="never closed"):  # noqa: PT031
            del bus
            gc.collect()
        await until(lambda: not server.peers)


@in_both_loops
async def test_closing_twice_is_closing_once() -> None:
    async with FakeServer() as server:
        bus = await connect(server.url)
        await bus.close()
        await bus.close()


@in_both_loops
async def test_request_that_no_frame_can_carry_is_refused_and_costs_no_connection() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        for level in ("stored", "none"):
            with pytest.raises(LimitExceededError, match=r"native\.frame_bytes_max") as refused:
                await bus.publish("a", bytes(2**24), level=level)
            assert not refused.value.retriable
        await bus.ping()
        assert len(server.peers) == 1
