"""Links to several nodes: which is home, where requests go, what a lost node changes. The nodes are made of frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from runnel.client import Bus, connect
from runnel.errors import ClientFault, MovedError, TimeoutExpiredError, Unavailable
from runnel.formats import wire
from tests.client.fake_server import FakeServer, Peer, stored_batch
from tests.client.running import in_both_loops, until


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[FakeServer, FakeServer]]:
    async with FakeServer(node="node-1") as first, FakeServer(node="node-2") as second:
        for server in (first, second):
            server.nodes = [
                wire.NodeState("node-1", first.address),
                wire.NodeState("node-2", second.address),
            ]
        yield first, second


def url_of(*servers: FakeServer) -> str:
    return "runnel://" + ",".join(server.address for server in servers)


def owned_by(server: FakeServer, topic: str, *, epoch: int = 1) -> wire.Route:
    return wire.Route(topic, "disk", [wire.Owner("main", 0, epoch, server.address)])


async def known_nodes(bus: Bus) -> None:
    await until(lambda: bus.nodes)


# --- Home ---


@in_both_loops
async def test_first_address_that_answers_is_home() -> None:
    async with FakeServer() as gone:
        dead = gone.address
    async with FakeServer() as server, connect(f"runnel://{dead},{server.address}") as bus:
        assert await bus.ping() >= 0
        assert bus.is_connected


@in_both_loops
async def test_when_no_address_answers_the_error_names_each() -> None:
    async with FakeServer() as first, FakeServer() as second:
        addresses = (first.address, second.address)
    with pytest.raises(Unavailable) as caught:
        await connect(f"runnel://{addresses[0]},{addresses[1]}")
    assert all(address in str(caught.value) for address in addresses)


@in_both_loops
async def test_lost_home_is_replaced_by_the_next_address() -> None:
    async with FakeServer() as first, FakeServer() as second, connect(url_of(first, second)) as bus:
        await bus.ping()
        await first.stop()
        await bus.ping()
        assert len(first.asked(wire.Ping)) == len(second.asked(wire.Ping)) == 1


@in_both_loops
async def test_lost_home_is_replaced_by_a_node_that_it_named() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        await first.stop()
        await bus.ping()
        assert second.asked(wire.Ping)
        assert bus.server.node == "node-2"


@in_both_loops
async def test_node_list_that_comes_unasked_replaces_the_former() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        here = wire.NodeState("node-1", first.address)
        first.peer.say(wire.NodeList(0, 3, [here]))
        await until(lambda: len(bus.nodes) == 1)
        first.peer.say(wire.NodeList(0, 2, second.nodes))  # of an earlier moment
        await bus.ping()
        assert list(bus.nodes) == [here]


def test_addresses_of_a_url_have_a_limit() -> None:
    with pytest.raises(ClientFault, match="101 addresses"):
        connect("runnel://" + ",".join(f"h{number}" for number in range(101)))


@pytest.mark.parametrize(
    "url", ["runnel://a,,b", "runnel://,a", "runnel://a,b:x", "runnel://u@a,b"]
)
def test_incomplete_lists_of_addresses_are_refused(url: str) -> None:
    with pytest.raises(ClientFault):
        connect(url)


# --- Routes ---


@in_both_loops
async def test_owner_is_asked_and_addresses_may_lack_a_host() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        port = second.address.rpartition(":")[2]
        first.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1, f":{port}")])
        await bus.publish("a", b"1")
        assert second.stored == {("a", 0): [b"1"]}
        assert not first.stored


@in_both_loops
async def test_empty_address_is_the_node_that_answered() -> None:
    async with two_nodes() as (first, _), connect(first.url) as bus:
        await known_nodes(bus)
        first.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1)])
        assert (await bus.routes("a"))["a"].owners[0].address == first.address


@in_both_loops
async def test_lost_node_makes_its_routes_unknown_and_another_is_asked() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        first.routes["a"] = owned_by(second, "a")
        await bus.publish("a", b"1")
        first.routes["a"] = owned_by(first, "a", epoch=2)
        await second.stop()
        await until(lambda: "a" not in bus._router.routes)
        await bus.publish("a", b"2")
        assert first.stored == {("a", 0): [b"2"]}


@in_both_loops
async def test_owner_that_stays_away_is_asked_for_until_the_deadline() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        first.routes["a"] = owned_by(second, "a")
        first.on(wire.Send, moved_to(second))
        await second.stop()
        # The last thing heard before the deadline is the loss, or that another node still names it.
        with pytest.raises((TimeoutExpiredError, MovedError)):
            await bus.publish("a", b"1", deadline_s=0.1)
        assert first.asked(wire.Send)


# --- Publishers ---


def moved_to(server: FakeServer) -> Callable[[Peer, wire.Publish | wire.Send, memoryview], None]:
    def refuse(peer: Peer, request: wire.Publish | wire.Send, tail: memoryview) -> None:
        route = owned_by(server, "a", epoch=2)
        error = wire.Error(request.id, "moved", "elsewhere", retriable=True, routes=[route])
        peer.say(error)

    return refuse


@pytest.mark.parametrize("name", [None, "p"])
@in_both_loops
async def test_batches_in_flight_are_sent_again_in_their_order_after_a_move(
    name: str | None,
) -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        await known_nodes(bus)
        first.routes["a"] = owned_by(first, "a")
        async with bus.publisher("a", name=name, batch_messages_max=1) as publisher:
            if name is not None:
                second.producers[name] = (1, 3, [])  # the numbers travel with the shard
            for number in range(3):
                publisher.send(b"%d" % number)
            await publisher.flush()
            held: list[wire.Publish] = []
            first.on(wire.Publish, lambda _peer, request, _tail: held.append(request))
            for number in range(3, 9):
                publisher.send(b"%d" % number)
                await asyncio.sleep(0)
            flushing = asyncio.ensure_future(publisher.flush())
            await until(lambda: len(held) == 6)
            first.routes["a"] = second.routes["a"] = owned_by(second, "a", epoch=2)
            for request in held:
                moved_to(second)(first.peer, request, memoryview(b""))
            await flushing
        assert first.stored["a", 0] == [b"0", b"1", b"2"]
        assert second.stored["a", 0] == [b"%d" % number for number in range(3, 9)]


@in_both_loops
async def test_named_publisher_repeats_at_the_next_owner_what_a_lost_node_did_not_answer() -> None:
    async with two_nodes() as (first, second), connect(second.url) as bus:
        await known_nodes(bus)
        second.routes["a"] = owned_by(first, "a")
        async with bus.publisher("a", name="p", batch_messages_max=1) as publisher:
            first.producers["p"] = (second.producers["p"][0], 0, [])  # all nodes know the term
            publisher.send(b"0")
            await publisher.flush()
            first.hold_answers = True
            publisher.send(b"1")
            publisher.send(b"2")
            await until(lambda: len(first.batches) == 3)
            second.routes["a"] = owned_by(second, "a", epoch=2)
            term, _, _ = second.producers["p"]
            second.producers["p"] = (term, 1, [])
            await first.stop()
            await publisher.flush()
        assert second.stored["a", 0] == [b"1", b"2"]


# --- Live subscriptions, when the broker changes its form ---


def claim(*shards: tuple[int, int]) -> Callable[[Peer, wire.Subscribe, memoryview], None]:
    """Answer a subscribe as a node that serves these shards of journal main, each with its epoch."""

    def subscribed(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
        peer.say(wire.Subscribed(request.id, request.subscription))
        terms = [wire.ShardTerm("main", shard, epoch) for shard, epoch in shards]
        peer.say(wire.ShardsCame(request.subscription, terms))

    return subscribed


def begin_at(entry: int) -> Callable[[Peer, wire.ShardsFrom, memoryview], None]:
    """Answer `shards_from` with the place that was given, or with this one."""

    def begun(peer: Peer, request: wire.ShardsFrom, tail: memoryview) -> None:
        given = {(each.journal, each.shard): each.entry for each in request.start.shards}
        places = [
            wire.ShardPlace(
                term.journal, term.shard, term.epoch, given.get((term.journal, term.shard), entry)
            )
            for term in request.shards
        ]
        peer.say(wire.Subscribed(request.id, request.subscription, (), places))

    return begun


@in_both_loops
async def test_subscription_goes_on_when_a_broker_becomes_several_and_one_again() -> None:
    async with FakeServer() as server, connect(server.url) as bus:

        def alone(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
            shards = [wire.ShardPlace("main", 0, 1, 5)]
            peer.say(wire.Subscribed(request.id, request.subscription, (), shards))

        server.on(wire.Subscribe, alone)
        async with bus.subscribe("*") as subscription:
            server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=6)
            assert (await anext(subscription)).payload == b"1"
            server.node = "node-1"
            server.nodes = [wire.NodeState("node-1", server.address)]
            server.on(wire.Subscribe, claim((0, 2)))
            server.on(wire.ShardsFrom, begin_at(1))
            server.drop()
            await until(lambda: server.asked(wire.ShardsFrom))
            (asked,) = server.asked(wire.ShardsFrom)
            assert list(asked.start.shards) == [wire.ShardPlace("main", 0, 1, 6)]
            await until(lambda: subscription._is_attached)
            server.peer.deliver(1, [stored_batch("a", 2, [b"2"])], next_entry=7)
            assert (await anext(subscription)).payload == b"2"
            server.node = ""
            server.on(wire.Subscribe, alone)
            asked_before = len(server.asked(wire.Subscribe))
            server.drop()
            await until(lambda: len(server.asked(wire.Subscribe)) > asked_before)
            (again,) = server.asked(wire.Subscribe)[asked_before:]
            assert again.start.kind == "resume"
            assert list(again.start.shards) == [wire.ShardPlace("main", 0, 1, 7)]


@in_both_loops
async def test_late_delivery_of_a_former_owner_is_dropped_and_its_credit_returned() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:
        first.on(wire.Subscribe, claim((0, 1)))
        second.on(wire.Subscribe, claim())
        for server in (first, second):
            server.on(wire.ShardsFrom, begin_at(5))
        async with bus.subscribe("*", buffer_bytes=4000) as subscription:
            reader = next(peer for peer in first.peers if peer.has_subscribed)
            batch = stored_batch("a", 1, [b"1"])
            reader.deliver(1, [batch], next_entry=6)
            assert (await anext(subscription)).payload == b"1"
            new_owner = next(peer for peer in second.peers if peer.has_subscribed)
            new_owner.say(wire.ShardsCame(1, [wire.ShardTerm("main", 0, 2)]))
            await until(lambda: second.asked(wire.ShardsFrom))
            assert second.asked(wire.ShardsFrom)[0].start.shards[0].entry == 6
            for number in range(10):
                late = stored_batch("a", 2 + number, [bytes(300)])
                reader.deliver(1, [late], next_entry=7 + number)
            await until(lambda: first.asked(wire.Credit))
            new_owner.deliver(1, [stored_batch("a", 2, [b"2"])], next_entry=7)
            assert (await anext(subscription)).payload == b"2"


@in_both_loops
async def test_subscription_begins_only_when_every_shard_is_read() -> None:
    async with two_nodes() as (first, second), connect(first.url) as bus:

        def names_another(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
            elsewhere = [wire.Owner("main", 3, 1, second.address)]
            peer.say(wire.Subscribed(request.id, request.subscription, elsewhere=elsewhere))
            peer.say(wire.ShardsCame(request.subscription, ()))

        first.on(wire.Subscribe, names_another)
        second.on(wire.Subscribe, claim())
        second.on(wire.ShardsFrom, begin_at(1))
        subscription = bus.subscribe("*")
        opening = asyncio.ensure_future(subscription.open())
        await until(lambda: first.asked(wire.Subscribe) and second.asked(wire.Subscribe))
        await bus.ping()
        assert not opening.done()
        owner = next(peer for peer in second.peers if peer.has_subscribed)
        owner.say(wire.ShardsCame(1, [wire.ShardTerm("main", 3, 1)]))
        await opening
        await subscription.close()
        assert first.asked(wire.Unsubscribe)
        assert second.asked(wire.Unsubscribe)
