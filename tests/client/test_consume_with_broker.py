"""Consumers and a real broker in this process: the whole way of acknowledged work, by a clock in the test's hand."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import pytest

from runnel.client import BlockingWork, Bus, Consumer, Work
from runnel.errors import LateAckError, SubscriptionDiffersError, UnknownSubscriptionError
from runnel.formats.message import Message
from runnel.testing import BrokerThread, VirtualClock, open_broker
from tests.client.running import in_both_loops, until

SECOND = 1_000_000_000


async def publish(bus: Bus, topic: str, count: int, *, keys: int = 0) -> None:
    async with bus.publisher(topic) as publisher:
        for number in range(1, count + 1):
            key = b"%d" % (number % keys) if keys else None
            publisher.send(b"%d" % number, key=key)


async def take(consumer: Consumer, count: int) -> list[Work]:
    return [await anext(consumer) for _ in range(count)]


async def advance_until(clock: VirtualClock, condition: Callable[[], object]) -> None:
    """Let time pass, a little at a time, until something has come about."""
    while not condition():
        clock.advance(SECOND // 10)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize("mode", ["shared", "key_shared", "multicast"])
def test_everything_is_processed_once_and_nothing_is_left(mode: str) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with open_broker() as broker, broker.connect() as bus:
            await publish(bus, "orders/eu", 3000, keys=7)
            member = "m" if mode == "multicast" else None
            async with bus.consume(
                "s", "orders/*", mode=mode, member=member, start="earliest"
            ) as consumer:
                received = []
                async for work in consumer:
                    received.append(work.offset)
                    await work.ack()
                    if len(received) == 3000:
                        break
            assert received == list(range(1, 3001))
            assert consumer.statistics.late == 0
            state = await bus.subscription("s")
            assert [(place.floor, place.in_flight) for place in state.partitions] == [(3001, 0)]

    scenario()


@in_both_loops
async def test_batches_are_acked_whole_and_two_consumers_share_the_work() -> None:
    async with open_broker() as broker, broker.connect() as bus, broker.connect() as other:
        async with bus.consume("s", "a") as one, other.consume("s", "a") as two:
            received: list[int] = []

            async def read(consumer: Consumer) -> None:
                async for batch in consumer.batches():
                    received.extend(message.offset for message in batch)
                    await batch.ack()

            tasks = [asyncio.create_task(read(consumer)) for consumer in (one, two)]
            await publish(bus, "a", 5000)
            await until(lambda: len(received) == 5000)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await one.flush()
            await two.flush()
        assert sorted(received) == list(range(1, 5001))
        assert (await bus.subscription("s")).members[0].backlog == 0


@in_both_loops
async def test_a_failed_message_comes_again_and_its_dead_letter_can_be_sent_back() -> None:
    clock = VirtualClock()
    async with (
        open_broker(clock=clock) as broker,
        broker.connect() as bus,
        bus.consume("s", "a", deliveries_max=2, retry_delay_s=5) as consumer,
    ):
        await bus.publish("a", b"poison")
        (work,) = await take(consumer, 1)
        assert work.delivery_count == 1
        await work.nack(reason="first")
        again = asyncio.create_task(anext(consumer))
        await advance_until(clock, again.done)
        work = await again
        assert (work.payload, work.delivery_count) == (b"poison", 2)
        await work.nack(reason="second")
        letters: list[Message] = []
        while not letters:
            letters = [letter async for letter in bus.dead_letters("s")]
        assert letters[0].payload == b"poison"
        assert "second" in letters[0].tags.values()
        assert await bus.redrive("s", [letters[0].offset]) == 1
        work = await anext(consumer)
        assert (work.payload, work.failures) == (b"poison", 0)
        await work.ack(stored=True)
        assert await bus.drop_dead("s", "all") == 0


@in_both_loops
async def test_leases_are_kept_for_long_work_and_lost_by_work_that_hangs() -> None:
    clock = VirtualClock()
    async with (
        open_broker(clock=clock) as broker,
        broker.connect() as bus,
        bus.consume("s", "a", lease_s=3, processing_max_s=60) as consumer,
    ):
        await bus.publish("a", b"1")
        slow = await anext(consumer)
        began_ns = clock.monotonic_ns()
        await advance_until(clock, lambda: clock.monotonic_ns() > began_ns + 50 * SECOND)
        await slow.ack(stored=True)
        await bus.publish("a", b"2")
        hung = await anext(consumer)
        again = asyncio.create_task(anext(consumer))
        await advance_until(clock, again.done)
        work = await again
        assert (work.offset, work.failures) == (hung.offset, 1)
        with pytest.raises(LateAckError):
            await hung.ack(stored=True)
        await work.ack(stored=True)


@in_both_loops
async def test_work_of_a_lost_connection_comes_again_over_the_next() -> None:
    async with open_broker() as broker, broker.connect() as bus, bus.consume("s", "a") as consumer:
        await publish(bus, "a", 10)
        works = await take(consumer, 3)
        await consumer.ack(works[0], stored=True)
        connection = bus._router.home.connection
        assert connection is not None
        connection.abort("for the test")
        await until(lambda: works[1].is_late)
        again = await take(consumer, 9)
        assert sorted(work.offset for work in again) == list(range(2, 11))
        await works[1].ack()
        assert [late.begin for late in consumer.late] == [2]
        await consumer.ack(*again, stored=True)


@in_both_loops
async def test_keys_stay_in_order_through_failures_with_many_at_a_time() -> None:
    clock = VirtualClock()
    async with open_broker(clock=clock) as broker, broker.connect() as bus:
        await publish(bus, "a", 500, keys=5)
        done: defaultdict[bytes | None, list[int]] = defaultdict(list)
        running: set[bytes | None] = set()
        failed: set[int] = set()

        async def function(work: Work) -> None:
            assert work.key not in running
            running.add(work.key)
            try:
                await asyncio.sleep(0)
                if work.offset % 50 == 0 and work.offset not in failed:
                    failed.add(work.offset)
                    raise ValueError("the first time")
                done[work.key].append(work.offset)
            finally:
                running.discard(work.key)

        stop = asyncio.Event()
        async with bus.consume("s", "a", mode="key_shared", start="earliest") as consumer:
            processing = asyncio.create_task(consumer.process(function, stop=stop))
            await advance_until(clock, lambda: sum(map(len, done.values())) >= 500)
            stop.set()
            await processing
        assert sorted(failed) == list(range(50, 501, 50))
        for key, offsets in done.items():
            assert offsets == sorted(offsets), key
        assert sum(map(len, done.values())) == 500
        assert (await bus.subscription("s")).members[0].backlog == 0


@in_both_loops
async def test_what_was_not_finished_goes_back_uncounted_when_the_consumer_leaves() -> None:
    async with open_broker() as broker, broker.connect() as bus:
        async with bus.consume("s", "a") as consumer:
            await publish(bus, "a", 3)
            await (await anext(consumer)).ack()
            await anext(consumer)
        async with bus.consume("s") as consumer:
            works = await take(consumer, 2)
            assert [(work.offset, work.failures) for work in works] == [(2, 0), (3, 0)]


@in_both_loops
async def test_subscriptions_are_made_listed_moved_paused_and_deleted() -> None:
    async with open_broker() as broker, broker.connect() as bus:
        await publish(bus, "a", 5)
        await bus.make_subscription("s", "a", mode="shared", start="earliest", lease_s=10)
        with pytest.raises(SubscriptionDiffersError):
            await bus.consume("s", "a", mode="key_shared").open()
        (listed,) = await bus.subscriptions()
        assert (listed.name, listed.options.lease_ms) == ("s", 10_000)
        await bus.move_subscription("s", {"a": 4})
        await bus.pause_subscription("s")
        assert (await bus.subscription("s")).is_paused
        async with bus.consume("s") as consumer:
            await bus.resume_subscription("s")
            assert [work.offset for work in await take(consumer, 2)] == [4, 5]
            await bus.delete_subscription("s")
            with pytest.raises(UnknownSubscriptionError):
                await anext(consumer)
        with pytest.raises(UnknownSubscriptionError):
            await bus.subscription("s")


@in_both_loops
async def test_each_member_of_a_multicast_gets_everything_until_it_is_removed() -> None:
    async with open_broker() as broker, broker.connect() as bus:
        async with (
            bus.consume("s", "a", mode="multicast", member="x") as x,
            bus.consume("s", "a", mode="multicast", member="y") as y,
        ):
            await publish(bus, "a", 3)
            for consumer in (x, y):
                assert [work.offset for work in await take(consumer, 3)] == [1, 2, 3]
        await bus.remove_member("s", "x")
        assert [member.name for member in (await bus.subscription("s")).members] == ["y"]


def test_the_blocking_client_consumes_and_processes_in_threads() -> None:
    broker = BrokerThread()
    broker.start()
    try:
        with broker.connect_blocking() as bus:
            with bus.publisher("a") as publisher:
                for number in range(100):
                    publisher.send(b"%d" % number, key=b"k")
            with bus.consume("s", "a", mode="key_shared", start="earliest") as consumer:
                for work in consumer:
                    work.ack()
                    if work.offset == 50:
                        break
                done: list[int] = []

                def function(work: BlockingWork) -> None:
                    done.append(work.offset)
                    if work.offset == 100:
                        consumer.stop()

                consumer.process(function, concurrency=4)
            assert done == list(range(51, 101))
            assert bus.subscription("s").members[0].backlog == 0
    finally:
        broker.stop()
