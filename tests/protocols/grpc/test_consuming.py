"""Acknowledged work over gRPC: leases, and how each of them ends."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc.aio
from grpc import StatusCode

from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import (
    LOOPS,
    NewLoop,
    Scene,
    Worker,
    client,
    failure,
    opened,
    payloads_of,
    publish,
    rest_of,
    run,
)

SOON = pb.WorkOptions(retry_delay_ms=0)


async def state(scene: Scene, name: str = "s") -> pb.Subscription:
    request = pb.ListSubscriptionsRequest(name=name)
    (found,) = (await scene.stub.ListSubscriptions(request)).subscriptions
    subscription: pb.Subscription = found
    return subscription


async def until_backlog(scene: Scene, count: int) -> None:
    while sum(member.backlog for member in (await state(scene)).members) != count:
        pass


@LOOPS
def test_work_is_leased_acknowledged_and_gone(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            worker = Worker(scene.stub)
            consuming = await worker.open("s", "t/*", options=pb.WorkOptions(lease_ms=5000))
            assert (consuming.subscription, consuming.mode) == ("s", pb.MODE_SHARED)
            assert consuming.options.lease_ms == 5000
            assert consuming.options.deliveries_max > 0
            await publish(scene, "t/a", b"1", b"2", b"3")
            leases = await worker.take(3)
            assert payloads_of(leases) == [b"1", b"2", b"3"]
            ids = [lease.delivery for lease in leases]
            await worker.say(ack=pb.Ack(id=7, deliveries=ids))
            acked = (await worker.event("acked")).acked
            assert (acked.id, list(acked.late)) == (7, [])
            assert (await state(scene)).members[0].backlog == 0

    run(scenario(), new_loop)


def test_parts_single_messages_and_everything_up_to_an_offset_are_acknowledged() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t/a", *(b"%d" % number for number in range(1, 11)))
            worker = Worker(scene.stub)
            start = pb.Start(kind=pb.Start.KIND_EARLIEST)
            await worker.open("s", "t/*", start=start)
            (lease,) = await worker.take(10)
            part = pb.Part(delivery=lease.delivery, begin=3, end=5)
            picked = pb.Picked(delivery=lease.delivery, offsets=[9, 7, 8])
            await worker.say(ack=pb.Ack(id=1, parts=[part], picked=[picked]))
            assert not (await worker.event("acked")).acked.late
            assert (await state(scene)).members[0].backlog == 5
            await worker.say(ack_up_to=pb.AckUpTo(id=2, topic="t/a", partition=0, offset=2))
            await worker.event("acked")
            assert (await state(scene)).partitions[0].floor == 5

    run(scenario())


def test_blocks_are_leased_untouched() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            worker = Worker(scene.stub)
            await worker.open("s", "t", format=pb.FORMAT_BLOCKS)
            await publish(scene, "t", b"1", b"2")
            (lease,) = (await worker.event("work")).work.leases
            assert not lease.messages
            assert [each.payload for each in Batch.unpack(lease.block)] == [b"1", b"2"]

    run(scenario())


def test_leaving_gives_back_what_is_leased_and_it_does_not_count() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for say_leave in (True, False):
                leaving, staying = Worker(scene.stub), Worker(scene.stub)
                await leaving.open("s", "t", options=SOON)
                await publish(scene, "t", b"1")
                (lease,) = await leaving.take(1)
                await leaving.say(ack=pb.Ack(id=5))
                if say_leave:
                    await leaving.say(leave=pb.Leave())
                else:
                    await leaving.call.done_writing()
                (acked,) = await rest_of(leaving.call)
                assert acked.acked.id == 5
                assert await leaving.call.code() is StatusCode.OK
                await staying.open("s", "t")
                (again,) = await staying.take(1)
                assert not any(each.failures for each in again.attempts)
                await staying.say(ack=pb.Ack(id=1, deliveries=[again.delivery]))
                await staying.event("acked")
                await staying.call.done_writing()
                assert await rest_of(staying.call) == []
                assert lease.begin == again.begin

    run(scenario())


def test_what_a_vanished_consumer_had_comes_again_and_counts() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            worker, other = Worker(scene.stub), Worker(scene.stub)
            await worker.open("s", "t", options=SOON)
            await publish(scene, "t", b"1")
            await worker.take(1)
            await other.open("s", "t")
            worker.call.cancel()
            (again,) = await other.take(1)
            assert [each.failures for each in again.attempts] == [1]
            async with client(scene) as gone:  # with its connection
                third = Worker(gone)
                await third.open("s", "t")
                await other.say(nack=pb.Nack(deliveries=[again.delivery]))
            (last,) = await other.take(1)
            assert last.attempts[0].failures >= 2

    run(scenario())


def test_a_consumer_that_does_not_read_is_leased_no_more_than_fits() -> None:
    async def scenario() -> None:
        async with opened() as scene, client(scene) as slow:
            worker = Worker(slow)
            window = pb.Window(messages=10_000, bytes=2**40)
            await worker.open("s", "t", window=window)
            for number in range(40):
                await publish(scene, "t", bytes([number]) * 1_000_000)
            (row,) = [read() for read in scene.listener.server.rows().values()]
            assert row.queued_bytes < 4 * 2**20
            assert len(payloads_of(await worker.take(40))) == 40

    run(scenario())


def test_without_a_mode_a_subscription_is_as_it_is_or_shared() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await scene.stub.MakeSubscription(
                pb.MakeSubscriptionRequest(name="s", patterns=["t"], mode=pb.MODE_KEY_SHARED)
            )
            for name, mode in (("s", pb.MODE_KEY_SHARED), ("new", pb.MODE_SHARED)):
                consuming = await Worker(scene.stub).open(name, "t", mode=pb.MODE_UNSPECIFIED)
                assert consuming.mode == mode

    run(scenario())


def test_what_makes_no_sense_ends_the_call_with_a_reason() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await scene.stub.MakeSubscription(
                pb.MakeSubscriptionRequest(name="s", patterns=["t"], mode=pb.MODE_SHARED)
            )
            opening = pb.ConsumeRequest(open=pb.ConsumeOpen(subscription="s"))
            huge = pb.ConsumeRequest(
                ack=pb.Ack(picked=[pb.Picked(delivery=1, offsets=range(100_001))])
            )
            cases = (
                ([pb.ConsumeRequest(ack=pb.Ack())], "bad_request", "first request"),
                ([pb.ConsumeRequest()], "bad_request", "first request"),
                ([opening, opening], "bad_request", "already"),
                ([opening, pb.ConsumeRequest()], "bad_request", "says nothing"),
                ([opening, huge], "limit_exceeded", "100,001"),
                (
                    [opening, pb.ConsumeRequest(ack=pb.Ack(deliveries=[2**64 - 1]))],
                    "bad_request",
                    "deliveries",
                ),
                (
                    [pb.ConsumeRequest(open=pb.ConsumeOpen(subscription="x"))],
                    "unknown_subscription",
                    "x",
                ),
                (
                    [
                        pb.ConsumeRequest(
                            open=pb.ConsumeOpen(subscription="s", mode=pb.MODE_MULTICAST)
                        )
                    ],
                    "subscription_differs",
                    "s",
                ),
                (
                    [
                        pb.ConsumeRequest(
                            open=pb.ConsumeOpen(subscription="s", mode=cast(pb.Mode, 17))
                        )
                    ],
                    "bad_request",
                    "mode 17",
                ),
            )
            for requests, code, text in cases:
                call = scene.stub.Consume()
                for request in requests:
                    await call.write(request)
                failed = await failure(rest_of(call))
                assert (failed.code, text in failed.text) == (code, True), failed
            assert (await state(scene)).members[0].consumers == 0

    run(scenario())


def test_what_was_acknowledged_without_an_id_is_stored_all_the_same() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            worker = Worker(scene.stub)
            await worker.open("s", "t")
            await publish(scene, "t", b"1", b"2")
            (lease,) = await worker.take(2)
            await worker.say(ack=pb.Ack(deliveries=[lease.delivery]))
            await asyncio.wait_for(until_backlog(scene, 0), 10)
            assert worker.call.done() is False
            await worker.call.done_writing()
            assert await worker.call.read() is grpc.aio.EOF

    run(scenario())
