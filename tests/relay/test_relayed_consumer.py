"""A relayed consumer as protocols use it: what it passes on, what it calls late, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from runnel.broker.consumer_groups import OpenConsumer, WorkDelivery
from runnel.client import Bus
from runnel.errors import ClientFault, RunnelError
from runnel.formats.message import Message
from runnel.formats.work_heads import Consume, DeliveryPart, Lease, Picked
from runnel.group_rules.effects import OFFSET_MAX
from runnel.security.authenticator import AuthenticatedClient
from runnel.testing.cluster import EmbeddedCluster, EmbeddedNode
from tests.relay.stage import scenario

NAMES = [f"t/{number:02}" for number in range(9)]


class Caller:
    """A `WorkSink` that keeps what it is told."""

    connection_id = 1
    peer = "a test"

    def __init__(self) -> None:
        self.deliveries: list[WorkDelivery] = []
        self.recalls: list[DeliveryPart] = []
        self.lates: list[DeliveryPart] = []
        self.expired: list[int] = []
        self.error: RunnelError | None = None

    @property
    def leases(self) -> list[Lease]:
        return [delivery.lease for delivery in self.deliveries]

    @property
    def messages(self) -> list[Message]:
        return [message for delivery in self.deliveries for message in delivery.each()]

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        assert consumer == 7
        self.deliveries += deliveries

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self.recalls += parts

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self.lates += parts

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        self.expired += deliveries

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self.error = error


async def consume(
    node: EmbeddedNode, mode: str = "shared", window: int = 256, window_bytes: int = 2**23
) -> tuple[Caller, OpenConsumer]:
    caller = Caller()
    access = node.broker.make_access(AuthenticatedClient(None, None), "a test")
    request = Consume(3, 7, "work", ("t/*",), mode, window, window_bytes)
    consumer = await access.consume(7, caller, request)
    consumer.start()
    return caller, consumer


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - other nodes act meanwhile
        await asyncio.sleep(0.005)


async def backlog(bus: Bus) -> int:
    return sum(member.backlog for member in (await bus.subscription("work")).members)


async def publish(cluster: EmbeddedCluster, names: Sequence[str], *payloads: bytes) -> None:
    async with cluster.connect() as bus:
        for name in names:
            for payload in payloads:
                await bus.publish(name, payload, key=payload[:1])


@scenario
async def test_blocks_of_all_nodes_come_under_numbers_of_their_own(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES, b"1", b"2")
    caller, consumer = await consume(cluster.nodes[0])
    assert (consumer.definition.name, consumer.definition.patterns) == ("work", ("t/*",))
    assert consumer.definition.options.to_wire().lease_ms == 30_000
    await until(lambda: len(caller.messages) == 18)
    numbers = [lease.delivery for lease in caller.leases]
    assert numbers == sorted(set(numbers))
    owners = {cluster.owner(cluster.shard_of(lease.topic)) for lease in caller.leases}
    assert len(owners) == 3
    assert consumer.leased == (18, sum(delivery.size for delivery in caller.deliveries))
    assert consumer.ack(numbers, ()) == []
    assert await consumer.wait_stored() == []
    assert consumer.leased == (0, 0)
    consumer.close(is_clean=True)
    async with cluster.connect() as bus:
        assert await backlog(bus) == 0


@scenario
async def test_what_the_consumer_does_not_have_is_late(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES[:1], *(b"%d" % number for number in range(9)))
    caller, consumer = await consume(cluster.nodes[0])
    await until(lambda: len(caller.messages) == 9)
    lease = caller.leases[-1]
    number, begin, end = lease.delivery, lease.begin, lease.end
    whole = DeliveryPart(999, 0, OFFSET_MAX)
    assert consumer.ack([999], ()) == [whole]
    assert consumer.missing([DeliveryPart(999, 4, 5)]) == [DeliveryPart(999, 4, 5)]
    assert consumer.nack([DeliveryPart(999, 4, 5)], delay_ns=None, reason="") == [
        DeliveryPart(999, 4, 5)
    ]
    assert consumer.ack((), [DeliveryPart(number, begin, end + 2)]) == [
        DeliveryPart(number, end, end + 2)
    ]
    assert consumer.ack((), [DeliveryPart(number, begin, end)]) == [
        DeliveryPart(number, begin, end)
    ]
    assert consumer.ack((), (), [Picked(number, begin, b"\x01")]) == [
        DeliveryPart(number, begin, begin + 1)
    ]
    consumer.close(is_clean=True)
    assert consumer.ack([1], ()) == [DeliveryPart(1, 0, OFFSET_MAX)]


@scenario
async def test_later_messages_of_a_failed_key_are_recalled_before_nack_returns(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES[:1], b"a1", b"b1", b"a2", b"b2", b"a3")
    caller, consumer = await consume(cluster.nodes[0], "key_shared")
    await until(lambda: len(caller.messages) == 5)
    offsets = {message.payload: message.offset for message in caller.messages}
    number_of = {
        offset: lease.delivery
        for lease in caller.leases
        for offset in range(lease.begin, lease.end)
    }
    failed = offsets[b"a1"]
    part = DeliveryPart(number_of[failed], failed, failed + 1)
    assert consumer.nack([part], delay_ns=0, reason="no") == []
    assert [part.begin for part in caller.recalls] == [offsets[b"a2"], offsets[b"a3"]]
    told = list(caller.recalls)
    for recalled in told:
        assert consumer.missing([recalled]) == []
        assert consumer.ack((), [recalled]) == [recalled]  # too late; it confirms the recall
    await until(lambda: len(caller.messages) == 8)
    assert [message.payload for message in caller.messages[5:]] == [b"a1", b"a2", b"a3"]
    assert caller.recalls == told
    assert caller.deliveries[-1].lease.attempts or caller.deliveries[-3].lease.attempts
    consumer.close(is_clean=True)


@scenario
async def test_caller_that_does_not_read_is_leased_little(cluster: EmbeddedCluster) -> None:
    caller, consumer = await consume(cluster.nodes[0], window=10_000, window_bytes=2**30)
    consumer.pause()
    await publish(cluster, NAMES, *(b"%03d" % number + bytes(10_000) for number in range(100)))
    async with cluster.connect() as bus:

        async def leased() -> int:
            members = (await bus.subscription("work")).members
            return sum(member.in_flight for member in members)

        before = -1
        while (now := await leased()) != before:  # until nothing more is leased
            before = now
            await asyncio.sleep(0.1)
        assert 100 <= now < 700
        assert caller.deliveries == []
        consumer.resume()
        await until(lambda: len(caller.messages) == 900)
        assert len({(m.topic, m.payload) for m in caller.messages}) == 900
    consumer.close(is_clean=True)


@scenario
async def test_window_of_nothing_delivers_nothing_and_may_grow(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    caller, consumer = await consume(cluster.nodes[1], window=0, window_bytes=0)
    consumer.resize(3, 2**20)
    await until(lambda: len(caller.messages) == 3)
    consumer.resize(0, 0)
    assert consumer.ack([lease.delivery for lease in caller.leases], ()) == []
    assert await consumer.wait_stored() == []
    assert len(caller.messages) == 3
    consumer.resize(9, 2**20)
    await until(lambda: len(caller.messages) == 9)
    consumer.close(is_clean=True)


@scenario
async def test_acks_are_stored_though_the_consumer_closes_while_shards_move(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES, b"1")
    for turn in range(4):
        caller, consumer = await consume(cluster.nodes[0])
        await until(lambda caller=caller: len(caller.messages) == 9)  # type: ignore[misc]
        shards = sorted({cluster.shard_of(name) for name in NAMES})
        moves = [
            asyncio.ensure_future(cluster.move(shard, cluster.nodes[(turn + at) % 3].name))
            for at, shard in enumerate(shards)
        ]
        for _ in range(turn):
            await asyncio.sleep(0.01)
        assert consumer.ack([lease.delivery for lease in caller.leases], ()) == []
        waiting = asyncio.ensure_future(consumer.wait_stored())
        consumer.close(is_clean=True)
        assert await waiting == []
        await asyncio.gather(*moves)
        async with cluster.connect() as bus:
            assert await backlog(bus) == 0
        await publish(cluster, NAMES, b"1")


@scenario
async def test_given_back_work_comes_again_uncounted(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    caller, consumer = await consume(cluster.nodes[0])
    await until(lambda: len(caller.messages) == 9)
    lease = caller.leases[0]
    consumer.give_back([DeliveryPart(lease.delivery, lease.begin, lease.end)])
    await until(lambda: len(caller.messages) == 10)
    again = caller.leases[-1]
    assert (again.topic, again.begin) == (lease.topic, lease.begin)
    assert all(attempt.failures == 0 for attempt in again.attempts)
    consumer.ack_up_to(again.topic, again.partition, again.begin)
    assert await consumer.wait_stored() == []
    assert consumer.leased[0] == 8
    consumer.close(is_clean=True)


@scenario
async def test_lease_that_is_over_is_forgotten_and_frees_the_window(
    cluster: EmbeddedCluster,
) -> None:
    await publish(cluster, NAMES, b"1")
    async with cluster.connect() as bus:
        await bus.make_subscription(
            "work", "t/*", start="earliest", lease_s=1, retry_delay_s=0, deliveries_max=0
        )
    caller, consumer = await consume(cluster.nodes[0], window=9)
    await until(lambda: len(caller.messages) == 9)
    first = [lease.delivery for lease in caller.leases]
    consumer.renew(first[-1:], lease_ns=60_000_000_000)
    await until(lambda: set(caller.expired) >= set(first[:-1]))
    assert first[-1] not in caller.expired
    assert consumer.ack(first, ()) == [DeliveryPart(each, 0, OFFSET_MAX) for each in first[:-1]]
    await until(lambda: len(caller.messages) >= 17)
    again = [attempt for lease in caller.leases[9:17] for attempt in lease.attempts]
    assert len(again) == 8
    assert min(attempt.failures for attempt in again) == 1
    consumer.close(is_clean=True)


@scenario
async def test_leases_of_a_killed_node_are_over(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    caller, consumer = await consume(cluster.nodes[0])
    await until(lambda: len(caller.messages) == 9)
    dead = cluster.nodes[2]
    lost = [
        lease.delivery
        for lease in caller.leases
        if cluster.owner(cluster.shard_of(lease.topic)) is dead
    ]
    assert lost
    await cluster.kill(dead.name)
    await until(lambda: len(caller.messages) == 9 + len(lost))
    assert sorted(caller.expired) == lost
    assert consumer.ack(lost, ()) == [DeliveryPart(each, 0, OFFSET_MAX) for each in lost]
    assert caller.error is None
    consumer.close(is_clean=True)


@scenario
async def test_node_that_closes_ends_the_consumer(cluster: EmbeddedCluster) -> None:
    await publish(cluster, NAMES, b"1")
    caller, _ = await consume(cluster.nodes[1])
    await until(lambda: len(caller.messages) == 9)
    await cluster.stop("node-2")
    assert caller.error is not None
    async with cluster.connect() as bus, bus.consume("work") as consumer:
        works = [await anext(consumer) for _ in range(9)]
        assert {work.topic for work in works} == set(NAMES)


@scenario
async def test_polling_consumers_are_refused_while_several_nodes_live(
    cluster: EmbeddedCluster,
) -> None:
    access = cluster.nodes[0].broker.make_access(AuthenticatedClient(None, None), "a test")
    with pytest.raises(ClientFault, match="gRPC or the native protocol"):
        await access.consume_polling(7, Caller(), Consume(3, 7, "work", ("t/*",), "shared"))
    with pytest.raises(ClientFault):
        await access.consume(7, Caller(), Consume(3, 7, "work", ("t/[",), "shared"))
