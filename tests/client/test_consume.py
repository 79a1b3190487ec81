"""Consumers: the work they get, its acknowledgement, and its fate when leases or connections end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runnel.client import Bus, Consumer, LateWork, Work, connect
from runnel.errors import (
    ClientFault,
    ConnectionLostError,
    LateAckError,
    MemberReplacedError,
    SubscriptionDiffersError,
    TimeoutExpiredError,
    UnknownSubscriptionError,
)
from runnel.formats import wire, work_heads
from runnel.formats.work_heads import (
    Ack,
    Attempt,
    Consume,
    DeliveryPart,
    Leave,
    Nack,
    Picked,
    Renew,
    WorkOptions,
)
from tests.client.fake_server import Peer, refusing, silent, stored_batch
from tests.client.running import FakeTimers, in_both_loops, until
from tests.client.work_server import OPTIONS, WorkServer, with_hole


@asynccontextmanager
async def consuming(
    *,
    mode: str = "shared",
    options: WorkOptions = OPTIONS,
    timers: FakeTimers | None = None,
    on_late: Callable[[LateWork], object] | None = None,
) -> AsyncIterator[tuple[WorkServer, Bus, Consumer]]:
    async with (
        WorkServer(mode=mode, options=options) as server,
        connect(server.url, timers=timers) as bus,
        bus.consume("s", "a", mode=mode, on_late=on_late) as consumer,
    ):
        yield server, bus, consumer


async def take(consumer: Consumer, count: int) -> list[Work]:
    return [await anext(consumer) for _ in range(count)]


# --- Asking ---


@in_both_loops
async def test_patterns_and_options_make_a_subscription_and_none_use_one_that_exists() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        async with bus.consume(
            "billing",
            "orders/*",
            mode="key_shared",
            start="latest",
            window_messages=10,
            lease_s=1.5,
            deliveries_max=0,
            backoff=3,
        ) as consumer:
            assert consumer.mode == "key_shared"
            assert consumer.accepted is not None
            assert consumer.accepted.options == OPTIONS
        async with bus.consume("billing"):
            pass
        async with bus.consume("news", "a", "b", mode="multicast", member="m"):
            pass
        first, second, third = server.asked(Consume)
        assert first.patterns == ["orders/*"]
        assert (first.mode, first.window_messages) == ("key_shared", 10)
        assert first.start is not None
        assert first.start.kind == "latest"
        assert first.options == WorkOptions(1500, None, 0, None, None, 3.0, None)
        assert (second.patterns, second.mode, second.options) == ([], "", None)
        assert (third.patterns, third.mode, third.member) == (["a", "b"], "multicast", "m")


@in_both_loops
async def test_what_cannot_be_meant_is_refused_before_anything_is_sent() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        with pytest.raises(ClientFault, match="mode 'exclusive' is unknown: shared, key_shared"):
            bus.consume("s", "a", mode="exclusive")
        with pytest.raises(ClientFault, match="window_messages is 0"):
            bus.consume("s", "a", window_messages=0)
        with pytest.raises(ClientFault, match="lease_s is -1"):
            bus.consume("s", "a", lease_s=-1)
        with pytest.raises(ClientFault, match=r"backoff is 0\.5"):
            bus.consume("s", "a", backoff=0.5)
        with pytest.raises(ClientFault, match="the subscription name is empty"):
            bus.consume("")
        with pytest.raises(ClientFault, match="5 is no name of a subscription"):
            bus.consume(5)  # type: ignore[arg-type]
        with pytest.raises(ClientFault, match="lone surrogate"):
            bus.consume("s\ud800", "a")
        with pytest.raises(ClientFault, match="5 is no pattern of topics"):
            bus.consume("s", 5)  # type: ignore[arg-type]
        with pytest.raises(ClientFault, match="lone surrogate"):
            bus.consume("s", "a\ud800")
        for member in (5, 0, b"m"):
            with pytest.raises(ClientFault, match=f"{member!r} is no name of a member"):
                bus.consume("s", "a", mode="multicast", member=member)  # type: ignore[arg-type]
        with pytest.raises(ClientFault, match=r"member name .* has the lone surrogate"):
            bus.consume("s", "a", mode="multicast", member="\ud800")
        for seconds in (1e300, 10**400):
            with pytest.raises(ClientFault, match=r"lease_s is 1.*: it must be seconds from 0 to"):
                bus.consume("s", "a", lease_s=seconds)
        with pytest.raises(ClientFault, match="the offset of 'a' is"):
            bus.consume("s", "a", start={"a": 2**70})
        assert not server.asked(Consume)


@in_both_loops
async def test_names_that_cannot_be_are_refused_by_all_verbs_before_anything_is_sent() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        wrong: Any
        for wrong, problem in (
            (5, "5 is no name of a subscription: it must be text"),
            (None, "None is no name of a subscription"),
            ("", "the subscription name is empty"),
            ("\ud800", "lone surrogate"),
        ):
            for verb in (
                bus.subscription(wrong),
                bus.make_subscription(wrong),
                bus.delete_subscription(wrong),
                bus.pause_subscription(wrong),
                bus.resume_subscription(wrong),
                bus.move_subscription(wrong, "earliest"),
                bus.remove_member(wrong, "m"),
                bus.dead_letter_page(wrong),
                bus.redrive(wrong, "all"),
                bus.drop_dead(wrong, [1]),
            ):
                with pytest.raises(ClientFault, match=problem):
                    await verb
        for wrong, problem in (
            (5, "5 is no name of a member: it must be text"),
            ("", "the member name is empty"),
        ):
            with pytest.raises(ClientFault, match=problem):
                await bus.remove_member("s", wrong)
            with pytest.raises(ClientFault, match=problem):
                await bus.move_subscription("s", "earliest", member=wrong)
        with pytest.raises(ClientFault, match="the offset of 'a' is"):
            await bus.move_subscription("s", {"a": 2**70})
        wrong = 5
        with pytest.raises(ClientFault, match="5 are no offsets"):
            await bus.redrive("s", wrong)
        assert [type(request) for request in server.requests] == [wire.Hello]


@in_both_loops
async def test_refusal_is_raised_where_the_consumer_is_entered() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        server.on(Consume, refusing("subscription_differs", retriable=False))
        with pytest.raises(SubscriptionDiffersError):
            await bus.consume("s", "a").open()
        server.on(Consume, refusing("unknown_subscription", retriable=False))
        with pytest.raises(UnknownSubscriptionError):
            async with bus.consume("s"):
                pass


@in_both_loops
async def test_a_broker_that_is_busy_is_asked_again() -> None:
    timers = FakeTimers()
    async with WorkServer() as server, connect(server.url, timers=timers) as bus:
        server.on(Consume, refusing("busy", retriable=True))
        consumer = bus.consume("s", "a")
        opening = asyncio.create_task(consumer.open())
        await until(lambda: server.asked(Consume))
        server.usual(Consume)
        await timers.advance_until(opening.done)
        await opening
        assert len(server.asked(Consume)) == 2
        await consumer.close()


# --- Handing out ---


@in_both_loops
async def test_messages_come_in_order_with_what_is_known_of_their_deliveries() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", keys=[b"k", None], attempts=[Attempt(1, 3, 77)])
        first, second = await take(consumer, 2)
        assert (first.topic, first.partition, first.offset) == ("a", 0, 1)
        assert (first.key, first.payload, dict(first.tags)) == (b"k", b"1", {})
        assert (first.failures, first.delivery_count, first.first_delivery_ns) == (3, 4, 77)
        assert (second.failures, second.delivery_count) == (0, 1)
        assert second.first_delivery_ns > 77
        assert second.message.offset == 2
        assert "delivery 4" in repr(first)


@in_both_loops
async def test_a_loop_that_was_broken_off_goes_on_and_batches_take_the_rest() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", b"3", b"4")
        server.lease(b"5", offset=5)
        async for work in consumer:
            assert work.offset == 1
            break
        assert (await anext(consumer)).offset == 2
        offsets = []
        async for batch in consumer.batches():
            offsets += [message.offset for message in batch]
            await batch.ack()
            if 5 in offsets:
                break
        assert offsets == [3, 4, 5]
        await consumer.flush()
        assert server.acked == [2, DeliveryPart(1, 3, 5)]


@in_both_loops
async def test_several_tasks_share_what_comes_and_none_comes_twice() -> None:
    async with consuming() as (server, _, consumer):
        taken: list[int] = []

        async def work() -> None:
            async for work in consumer:
                taken.append(work.offset)
                await asyncio.sleep(0)
                await work.ack()
                if len(taken) >= 100:
                    break

        tasks = [asyncio.create_task(work()) for _ in range(4)]
        for begin in range(1, 101, 10):
            server.lease(*[b"x"] * 10, offset=begin)
        await until(lambda: len(taken) >= 100)
        for task in tasks:
            task.cancel()
        assert sorted(taken) == list(range(1, 101))


@in_both_loops
async def test_a_batch_is_a_batch_with_its_lease() -> None:
    async with consuming() as (server, _, consumer):
        server.lease_batch(with_hole("a", [b"1", b"2"], [b"5"], gap=2), "a", 1, 6)
        batch = await anext(aiter(consumer.batches()))
        assert [message.offset for message in batch] == [1, 2, 5]
        assert (batch.topic, batch.partition, batch.delivery.id) == ("a", 0, 1)
        assert batch.to_arrow().num_rows == 3
        first, *_ = batch.works()
        await first.nack(reason="odd")
        await batch.ack(stored=True)
        assert server.nacked == [DeliveryPart(1, 1, 2)]
        assert server.acked == [DeliveryPart(1, 2, 3), DeliveryPart(1, 5, 6)]


# --- Acknowledging ---


@in_both_loops
async def test_acks_of_a_wake_up_leave_as_one_frame_whole_deliveries_by_their_number() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(*[b"x"] * 100)
        server.lease(*[b"x"] * 10, offset=101)
        works = await take(consumer, 106)
        for work in works:
            await work.ack()
        assert not server.asked(Ack)
        await until(lambda: server.asked(Ack))
        (ack,) = server.asked(Ack)
        assert (ack.id, ack.deliveries, ack.parts) == (0, [1], [DeliveryPart(2, 101, 107)])
        assert consumer.statistics.acked == 106
        assert consumer.statistics.leased == 4


@in_both_loops
async def test_acks_in_any_order_become_as_few_parts_as_can_be() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(*[b"x"] * 10)
        works = await take(consumer, 10)
        await consumer.ack(*(works[row] for row in (7, 2, 0, 1, 3, 8)))
        await consumer.flush()
        assert server.acked == [DeliveryPart(1, 1, 5), DeliveryPart(1, 8, 10)]


@in_both_loops
async def test_many_acks_of_one_wake_up_do_not_wait_for_its_end() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(*[b"x"] * 2500)
        for work in await take(consumer, 2500):
            await work.ack()
        await consumer.flush()
        assert server.acked == [
            DeliveryPart(1, 1, 1001),
            DeliveryPart(1, 1001, 2001),
            DeliveryPart(1, 2001, 2501),
        ]


@in_both_loops
async def test_no_frame_names_more_than_a_thousand_deliveries() -> None:
    async with consuming() as (server, _, consumer):
        for _ in range(2500):
            server.lease(b"x")
        works = await take(consumer, 2500)
        await consumer.ack(*works)
        await consumer.flush()
        assert [len(ack.deliveries) for ack in server.asked(Ack)] == [1000, 1000, 500]


@in_both_loops
async def test_acks_that_lie_scattered_are_reported_as_bits() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(*[b"x"] * 20)
        works = await take(consumer, 20)
        await consumer.ack(*works[1::2])
        await consumer.flush()
        (ack,) = server.asked(Ack)
        assert (ack.deliveries, ack.parts) == ([], [])
        assert ack.picked == [Picked(1, 2, b"\x55\x55\x05")]
        await consumer.ack(*works[::2])
        await consumer.flush()
        assert server.asked(Ack)[-1].picked == [Picked(1, 1, b"\x55\x55\x05")]
        assert consumer.statistics.leased == 0


@in_both_loops
async def test_what_was_settled_once_stays_so() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        first, second, third = await take(consumer, 3)
        await first.ack()
        await first.ack()
        await first.nack()
        await second.nack()
        await second.ack()
        await consumer.ack(first, second, third)
        await consumer.flush()
        assert server.nacked == [DeliveryPart(1, 2, 3)]
        assert server.acked == [DeliveryPart(1, 1, 2), DeliveryPart(1, 3, 4)]
        assert consumer.statistics.late == 0
        assert consumer.statistics.leased == 0


@in_both_loops
async def test_ack_up_to_takes_everything_leased_of_the_partition_up_to_there() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        server.lease(b"x", topic="b", offset=1)
        server.lease(b"4", b"5", b"6", offset=4)
        works = await take(consumer, 6)
        assert works[5].offset == 5
        await consumer.ack_up_to(works[5])
        await consumer.flush()
        assert server.acked == [1, DeliveryPart(3, 4, 6)]
        assert (await anext(consumer)).offset == 6


@in_both_loops
async def test_nack_tells_delay_and_reason_behind_the_acks_given_before() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", b"3", b"4")
        works = await take(consumer, 4)
        await works[0].ack()
        await works[1].nack(2.5, reason="x" * 5000)
        await consumer.nack(works[2], works[3])
        await until(lambda: len(server.asked(Nack)) == 2)
        told = [request for request in server.requests if isinstance(request, Ack | Nack)]
        assert [type(request) for request in told] == [Ack, Nack, Nack]
        nack, later = server.asked(Nack)
        assert (nack.parts, nack.delay_ms, len(nack.reason)) == (
            [DeliveryPart(1, 2, 3)],
            2500,
            1000,
        )
        assert (later.parts, later.delay_ms, later.reason) == (
            [DeliveryPart(1, 3, 4), DeliveryPart(1, 4, 5)],
            None,
            "",
        )
        assert consumer.statistics.nacked == 3


@in_both_loops
async def test_flush_waits_until_all_acks_are_stored_and_is_free_when_they_are() -> None:
    async with consuming() as (server, _, consumer):
        await consumer.flush()
        assert not server.asked(Ack)
        server.on(Ack, silent)
        server.lease(b"1")
        await (await anext(consumer)).ack()
        flushing = asyncio.create_task(consumer.flush())
        await until(lambda: any(ack.id for ack in server.asked(Ack)))
        assert not flushing.done()
        server.peer.say(work_heads.AckedHead(server.asked(Ack)[-1].id))
        await flushing
        server.usual(Ack)
        count = len(server.asked(Ack))
        await consumer.flush()
        assert len(server.asked(Ack)) == count


@in_both_loops
async def test_a_late_one_among_many_that_are_to_be_stored_is_told_in_whichever_frame() -> None:
    async with consuming() as (server, _, consumer):
        for _ in range(2500):
            server.lease(b"x")

        def react(peer: Peer, request: Ack, tail: memoryview) -> None:
            if not request.id and 1 in request.deliveries:
                server.say_late(DeliveryPart(1, 1, 2))
            server.react_usually(peer, request, tail)

        server.on(Ack, react)
        works = await take(consumer, 2500)
        with pytest.raises(LateAckError):
            await consumer.ack(*works[::2], stored=True)
        await consumer.ack(*works[1::2], stored=True)


@in_both_loops
async def test_ack_suspends_only_while_the_connection_is_full() -> None:
    async with consuming() as (server, bus, consumer):
        server.lease(b"1", b"2")
        first, second = await take(consumer, 2)
        connection = bus._router.home.connection
        assert connection is not None
        connection.pause_writing()
        acking = asyncio.create_task(first.ack())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not acking.done()
        connection.resume_writing()
        await acking
        await second.ack()


@in_both_loops
async def test_work_of_another_consumer_is_refused() -> None:
    async with consuming() as (server, bus, consumer), bus.consume("t", "a") as other:
        server.lease(b"1")
        work = await anext(consumer)
        with pytest.raises(ClientFault, match="another consumer"):
            await other.ack(work)
        with pytest.raises(ClientFault, match="another consumer"):
            await other.nack(work)


# --- Late ---


@in_both_loops
async def test_late_acks_are_counted_told_and_kept() -> None:
    told: list[LateWork] = []
    async with consuming(on_late=told.append) as (server, _, consumer):
        server.lease(*[b"x"] * 5)
        server.lease(b"6", offset=6)
        works = await take(consumer, 6)
        await consumer.ack(*works)
        await until(lambda: server.asked(Ack))
        server.say_late(DeliveryPart(1, 2, 4), DeliveryPart(2, 0, 0), DeliveryPart(99, 0, 0))
        await until(lambda: len(told) == 3)
        assert [(late.topic, late.begin, late.end) for late in told] == [
            ("a", 2, 4),
            ("a", 6, 7),
            ("", 0, 0),
        ]
        assert list(consumer.late) == told
        assert consumer.statistics.late == 3


@in_both_loops
async def test_a_whole_delivery_that_is_late_is_told_by_its_number() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2")
        first, second = await take(consumer, 2)
        server.late = [DeliveryPart(1, 0, 0)]
        with pytest.raises(LateAckError, match="1 of them: delivery 1: its lease had ended"):
            await first.ack(stored=True)
        server.late = [DeliveryPart(1, 2, 3)]
        with pytest.raises(LateAckError, match=r"1 of them: a\[0\]@2…2: its lease had ended"):
            await second.ack(stored=True)


@in_both_loops
async def test_what_cannot_be_told_is_refused_before_anything_is_acknowledged() -> None:
    wrong: Any
    async with consuming() as (server, bus, consumer):
        server.lease(b"1", b"2")
        first, second = await take(consumer, 2)
        for wrong, problem in (
            (None, "None is no work"),
            ([first], "is no work: give messages or batches"),
        ):
            for verb in (
                consumer.ack(first, wrong),
                consumer.ack(first, wrong, stored=True),
                consumer.ack_up_to(wrong),
                consumer.nack(first, wrong),
                consumer.extend(wrong, 5),
            ):
                with pytest.raises(ClientFault, match=problem):
                    await verb
        other = bus.consume("other")
        with pytest.raises(ClientFault, match="given by another consumer"):
            await other.nack(first)
        wrong = 5
        with pytest.raises(ClientFault, match="the reason is 5: it must be text"):
            await first.nack(reason=wrong)
        with pytest.raises(ClientFault, match=r"delay_s is 1e\+300"):
            await first.nack(1e300)
        with pytest.raises(ClientFault, match=r"seconds is 1e\+300"):
            await first.extend(1e300)
        assert consumer.statistics.leased == 2
        await first.nack(reason="x\ud800")
        await second.ack(stored=True)
        assert [nack.reason for nack in server.asked(Nack)] == ["x\\ud800"]
        assert server.nacked == [DeliveryPart(1, 1, 2)]
        assert server.acked == [DeliveryPart(1, 2, 3)]


@in_both_loops
async def test_ack_that_is_to_be_stored_raises_if_it_was_late_and_flush_does_not() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        first, second, third = await take(consumer, 3)
        server.late = [DeliveryPart(1, 1, 2)]
        with pytest.raises(LateAckError, match="too late in 's'"):
            await first.ack(stored=True)
        server.late = [DeliveryPart(1, 1, 2)]  # another's
        await second.ack(stored=True)
        await third.ack()
        server.late = [DeliveryPart(1, 3, 4)]
        await consumer.flush()
        assert consumer.statistics.late == 3


# --- Leases ---


@in_both_loops
async def test_what_is_outstanding_is_renewed_every_third_of_the_lease() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, consumer):
        server.lease(b"1", b"2")
        server.lease(b"3", offset=3)
        works = await take(consumer, 3)
        await timers.advance(10)
        await until(lambda: server.renewed == [(1, 2)])
        await consumer.ack(works[0], works[2])
        await timers.advance(10)
        await until(lambda: server.renewed == [(1, 2), (1,)])
        await works[1].ack()
        await consumer.flush()
        waiting = timers.waiting
        await timers.advance(30)
        assert len(server.renewed) == 2
        assert timers.waiting < waiting  # nothing leased: nothing to look after


@in_both_loops
async def test_work_that_takes_too_long_is_not_renewed_and_its_neighbours_are_let_go() -> None:
    timers = FakeTimers()
    options = WorkOptions(30_000, 60_000, 8, 1000, 300_000, 2.0, 3_600_000)
    async with consuming(timers=timers, options=options) as (server, _, consumer):
        server.lease(b"1", b"2")
        server.lease(b"3", offset=3)
        hung = await anext(consumer)
        await timers.advance(60)
        await until(lambda: len(server.renewed) == 6)
        assert set(server.renewed) == {(1, 2)}
        await timers.advance(60)
        assert len(server.renewed) == 6
        assert hung.is_late
        server.lease(b"9", offset=9)
        assert (await anext(consumer)).offset == 9


@in_both_loops
async def test_a_batch_that_takes_too_long_is_not_renewed() -> None:
    timers = FakeTimers()
    options = WorkOptions(30_000, 60_000, 8, 1000, 300_000, 2.0, 3_600_000)
    async with consuming(timers=timers, options=options) as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        first = await anext(consumer)
        await timers.advance(30)
        rest = await anext(aiter(consumer.batches()))
        await first.ack()
        assert [message.offset for message in rest] == [2, 3]
        await timers.advance(60)  # of which the batch has been in work for all, the first for none
        await until(lambda: len(server.renewed) == 9)
        await timers.advance(60)
        assert len(server.renewed) == 9


@in_both_loops
async def test_a_slow_reader_that_goes_on_keeps_what_waits() -> None:
    timers = FakeTimers()
    options = WorkOptions(30_000, 60_000, 8, 1000, 300_000, 2.0, 3_600_000)
    async with consuming(timers=timers, options=options) as (server, _, consumer):
        server.lease(*[b"x"] * 10)
        server.lease(b"y", offset=11)
        for offset in range(1, 12):
            work = await anext(consumer)
            assert work.offset == offset
            await timers.advance(40)
            await work.ack()
        assert consumer.statistics.late == 0


@in_both_loops
async def test_a_loop_that_was_blocked_beyond_the_lease_drops_what_waits() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, consumer):
        server.lease(b"1", b"2")
        first = await anext(consumer)
        timers._now_ns += 31_000_000_000  # as if the loop had not turned
        await timers.advance(0)
        server.lease(b"9", offset=9)
        assert (await anext(consumer)).offset == 9
        assert not server.renewed
        assert first.is_late
        await first.ack()  # the broker has the last word
        await consumer.flush()
        assert server.acked == [DeliveryPart(1, 1, 2)]


@in_both_loops
async def test_extend_leases_for_longer_and_is_not_cut_short_by_the_next_renewal() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, consumer):
        server.lease(b"1")
        work = await anext(consumer)
        await work.extend(600)
        await until(lambda: server.asked(Renew))
        assert server.asked(Renew) == [Renew(1, [1], 600_000)]
        await timers.advance(560)
        assert len(server.asked(Renew)) == 1
        await timers.advance(30)
        await until(lambda: len(server.asked(Renew)) > 1)


# --- Recalls ---


@in_both_loops
async def test_recalled_messages_that_wait_are_dropped_and_confirmed_at_once() -> None:
    async with consuming(mode="key_shared") as (server, _, consumer):
        server.lease(b"1", b"2", b"3", b"4")
        first = await anext(consumer)
        server.recall(DeliveryPart(1, 2, 4))
        await until(lambda: server.given_up == [DeliveryPart(1, 2, 4)])
        assert (await anext(consumer)).offset == 4
        await first.ack(stored=True)
        assert consumer.statistics.recalled == 2


@in_both_loops
async def test_a_recalled_message_in_work_is_confirmed_when_that_ends_and_its_ack_is_late() -> None:
    told: list[LateWork] = []
    async with consuming(mode="key_shared", on_late=told.append) as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        first, second, third = await take(consumer, 3)
        server.recall(DeliveryPart(1, 1, 4))
        await until(lambda: first.is_late)
        assert not server.given_up
        await first.ack()
        await until(lambda: server.given_up == [DeliveryPart(1, 1, 2)])
        await second.nack()
        await until(lambda: server.given_up == [DeliveryPart(1, 1, 2), DeliveryPart(1, 2, 3)])
        with pytest.raises(LateAckError, match="recalled"):
            await third.ack(stored=True)
        await until(lambda: server.given_up[2:] == [DeliveryPart(1, 3, 4)])
        assert not server.nacked
        assert not server.acked
        assert [late.begin for late in told] == [1, 3]


@in_both_loops
async def test_what_was_on_its_way_at_a_nack_waits_until_the_broker_has_heard_of_it() -> None:
    async with consuming(mode="key_shared") as (server, _, consumer):
        server.on(wire.Ping, silent)
        server.lease(b"1", keys=[b"k"])
        server.lease(b"x", topic="b", keys=[b"k"])
        first, other = await take(consumer, 2)
        await first.nack()
        server.lease(b"2", b"3", offset=2, keys=[b"k", b"l"])
        server.lease(b"y", topic="b", offset=2, keys=[b"k"])
        assert (await anext(consumer)).topic == "b"
        server.recall(DeliveryPart(3, 2, 3))
        await until(lambda: server.given_up == [DeliveryPart(3, 2, 3)])
        reading = asyncio.create_task(anext(consumer))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reading.done()
        (ping,) = server.asked(wire.Ping)
        server.peer.say(wire.Pong(ping.id, 0))
        assert (await reading).offset == 3
        await other.ack()


@in_both_loops
async def test_after_a_nack_later_messages_of_its_key_are_not_begun() -> None:
    async with consuming(mode="key_shared") as (server, _, consumer):
        keys = [b"k", b"other", b"k", b"k"]
        server.lease(b"1", b"2", b"3", b"4", keys=keys)
        server.lease(b"5", b"6", offset=5, keys=[b"k", b"other"])
        first = await anext(consumer)
        await first.nack()
        assert [work.offset for work in await take(consumer, 2)] == [2, 6]
        await until(lambda: server.given_up == [DeliveryPart(1, 3, 5), DeliveryPart(2, 5, 6)])
        told = [type(r) for r in server.requests if isinstance(r, Nack | work_heads.Recalled)]
        assert told == [Nack, work_heads.Recalled]
        server.recall(
            DeliveryPart(1, 3, 5), DeliveryPart(2, 5, 6)
        )  # crossing: nothing is said twice
        server.lease(b"1", offset=1, keys=[b"k"], attempts=[Attempt(1, 1, 5)])
        assert (await anext(consumer)).failures == 1
        assert len(server.given_up) == 2


# --- Losing the connection, and the consumer ---


@in_both_loops
async def test_after_a_lost_connection_it_consumes_again_and_old_acks_are_late() -> None:
    timers = FakeTimers()
    told: list[LateWork] = []
    async with consuming(timers=timers, on_late=told.append) as (server, _, consumer):
        server.lease(b"1", b"2", b"3")
        first, second = await take(consumer, 2)
        await first.ack()  # gathered, and not sent: the loop does not turn before the loss
        [part] = consumer._parts.values()
        connection = part.link.connection
        assert connection is not None
        connection.connection_lost(None)
        server.drop()
        await timers.advance_until(lambda: len(server.asked(Consume)) == 2)
        assert server.asked(Consume)[0].patterns == server.asked(Consume)[1].patterns
        assert [(late.begin, late.end) for late in told] == [(1, 2)]
        assert second.is_late
        await second.ack()
        await second.ack()
        await until(lambda: [(late.begin, late.end) for late in told] == [(1, 2), (2, 3)])
        with pytest.raises(LateAckError, match="connection was lost"):
            await consumer.ack(await self_lease(server, consumer, timers), stored=True)
        server.lease(b"9", offset=9)
        work = await anext(consumer)
        assert work.offset == 9  # what had waited is the broker's to deliver again
        await work.ack(stored=True)


async def self_lease(server: WorkServer, consumer: Consumer, timers: FakeTimers) -> Work:
    """A message whose connection is lost while it is worked on."""
    server.lease(b"8", offset=8)
    work = await anext(consumer)
    count = len(server.asked(Consume))
    server.drop()
    await timers.advance_until(lambda: len(server.asked(Consume)) == count + 1)
    return work


@in_both_loops
async def test_flush_says_that_acks_may_be_lost_with_the_connection() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, consumer):
        server.on(Ack, silent)
        server.lease(b"1")
        await (await anext(consumer)).ack()
        flushing = asyncio.create_task(consumer.flush())
        await until(lambda: server.asked(Ack))
        server.drop()
        with pytest.raises(ConnectionLostError):
            await flushing
        server.usual(Ack)
        await timers.advance_until(lambda: len(server.asked(Consume)) == 2)


@in_both_loops
async def test_without_a_broker_iteration_ends_after_the_deadline() -> None:
    timers = FakeTimers()
    async with WorkServer() as server, connect(server.url, timers=timers, deadline_s=3) as bus:
        consumer = bus.consume("s", "a")
        await consumer.open()
        reading = asyncio.create_task(anext(consumer))
        await server.stop()
        await timers.advance_until(reading.done)
        with pytest.raises(TimeoutExpiredError, match="consuming from 's'"):
            await reading


@in_both_loops
async def test_consumer_that_the_broker_ended_raises_why_and_its_acks_are_late() -> None:
    async with consuming() as (server, _, consumer):
        server.lease(b"1", b"2")
        first = await anext(consumer)
        server.end_consumer("member_replaced", retriable=False)
        await until(lambda: first.is_late)
        with pytest.raises(MemberReplacedError):
            await anext(consumer)
        await first.ack()
        assert [late.reason for late in consumer.late] == ["the broker had ended the consumer"]
        assert not server.asked(Ack)


@in_both_loops
async def test_consumer_that_was_ended_for_now_comes_back() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, consumer):
        server.end_consumer("closed", retriable=True)
        await timers.advance_until(lambda: len(server.asked(Consume)) == 2)
        server.lease(b"1")
        assert (await anext(consumer)).offset == 1


# --- Leaving ---


@in_both_loops
async def test_leaving_waits_until_acks_are_stored_then_says_so() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        async with bus.consume("s", "a") as consumer:
            server.lease(b"1", b"2", b"3")
            first, second = await take(consumer, 2)
            await first.ack()
        told = [r for r in server.requests if isinstance(r, Ack | Leave)]
        assert [type(r) for r in told] == [Ack, Leave]
        assert server.asked(Ack)[0].id
        await second.ack()
        assert [late.reason for late in consumer.late] == ["the consumer was closed before"]
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        assert not bus._consumers


@in_both_loops
async def test_leaving_with_an_error_sends_acks_and_waits_for_nothing() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        server.on(Ack, silent)
        server.on(Leave, silent)

        async def fail() -> None:
            async with bus.consume("s", "a") as consumer:
                server.lease(b"1")
                await (await anext(consumer)).ack()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await until(lambda: server.asked(Leave))
        assert server.acked == [1]


@in_both_loops
async def test_closing_the_bus_flushes_consumers_that_are_open() -> None:
    async with WorkServer() as server:
        bus = await connect(server.url)
        consumer = bus.consume("s", "a")
        server.on(Consume, consume_and_lease(server))
        await (await anext(consumer)).ack()
        await bus.close()
        assert server.acked == [1]
        assert server.asked(Leave)


def consume_and_lease(server: WorkServer) -> Callable[[Peer, Consume, memoryview], None]:
    def react(peer: Peer, request: Consume, tail: memoryview) -> None:
        server.react_usually(peer, request, tail)
        server.lease(b"1")

    return react


# --- Subscriptions and dead letters ---


@in_both_loops
async def test_verbs_say_what_they_are_told() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        server.on(work_heads.MakeSubscription, lambda p, r, _: p.say(wire.Done(r.id)))
        server.on(work_heads.MoveSubscription, lambda p, r, _: p.say(wire.Done(r.id)))
        server.on(work_heads.PauseSubscription, lambda p, r, _: p.say(wire.Done(r.id)))
        server.on(work_heads.RemoveMember, lambda p, r, _: p.say(wire.Done(r.id)))
        await bus.make_subscription("s", "a", "b/*", mode="multicast", absent_max_s=60)
        await bus.move_subscription("s", {("a", 1): 7}, member="m")
        await bus.pause_subscription("s")
        await bus.resume_subscription("s")
        await bus.remove_member("s", "m")
        (made,) = server.asked(work_heads.MakeSubscription)
        assert (made.patterns, made.mode) == (["a", "b/*"], "multicast")
        assert made.options == WorkOptions(absent_ms_max=60_000)
        (moved,) = server.asked(work_heads.MoveSubscription)
        assert (moved.start.kind, moved.member) == ("offsets", "m")
        assert moved.start.partitions == [wire.PartitionPlace("a", 1, 7)]
        paused = server.asked(work_heads.PauseSubscription)
        assert [request.is_paused for request in paused] == [True, False]
        with pytest.raises(ClientFault, match="at least one pattern"):
            await bus.make_subscription("s")
        with pytest.raises(ClientFault, match="give a map of topics"):
            await bus.move_subscription("s", 7)
        with pytest.raises(ClientFault, match="'some' are no offsets"):
            await bus.redrive("s", "some")  # type: ignore[arg-type]


@in_both_loops
async def test_dead_letters_come_page_by_page() -> None:
    async with WorkServer() as server, connect(server.url) as bus:

        def react(peer: Peer, request: work_heads.DeadLettersHead, tail: memoryview) -> None:
            offset = request.offset or 1
            page = stored_batch("!dead/s", offset, [b"x", b"y"])
            peer.say(work_heads.DeadList(request.id, 3 if offset == 1 else 0), page.pack())

        server.on(work_heads.DeadLettersHead, react)
        offsets = [letter.offset async for letter in bus.dead_letters("s")]
        assert offsets == [1, 2, 3, 4]


@in_both_loops
async def test_unknown_subscription_is_an_error() -> None:
    async with WorkServer() as server, connect(server.url) as bus:
        server.on(
            work_heads.ListSubscriptions,
            lambda peer, request, _: peer.say(work_heads.SubscriptionListHead(request.id, [])),
        )
        assert await bus.subscriptions() == []
        with pytest.raises(UnknownSubscriptionError, match="'s'"):
            await bus.subscription("s")


# --- What a broker might get wrong ---


@in_both_loops
async def test_work_that_does_not_fit_its_lease_ends_the_connection() -> None:
    timers = FakeTimers()
    async with consuming(timers=timers) as (server, _, _):
        server.lease_batch(with_hole("a", [b"1"], [b"5"], gap=3), "a", 1, 3)
        await timers.advance_until(lambda: len(server.asked(Consume)) == 2)
        server.peer.say(work_heads.WorkHead(1, [work_heads.Lease(9, "a", 0, 1, 2)]))
        await timers.advance_until(lambda: len(server.asked(Consume)) == 3)
