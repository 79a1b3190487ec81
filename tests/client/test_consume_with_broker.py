"""Consumers and a real broker in this process: all of acknowledged work, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import pytest

from runnel.client import BlockingWork, Bus, Consumer, Work
from runnel.errors import LateAckError
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
