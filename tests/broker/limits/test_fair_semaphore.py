"""Who is fed when, if many are behind."""

from __future__ import annotations

import asyncio

import pytest

from runnel.broker.limits.fair_semaphore import FairSemaphore
from runnel.broker.live.subscription import SubscribeRequest
from tests.broker.scenes import EARLIEST, At, Reader, scene


async def work(semaphore: FairSemaphore, connection_id: int, name: str, done: list[str]) -> None:
    async with semaphore.of(connection_id):
        done.append(name)
        await asyncio.sleep(0)


def test_no_more_than_allowed_hold_a_turn_and_all_get_one() -> None:
    async def run() -> None:
        semaphore = FairSemaphore(3)
        held = most = 0

        async def hold() -> None:
            nonlocal held, most
            async with semaphore.of(1):
                held += 1
                most = max(most, held)
                await asyncio.sleep(0)
                held -= 1

        await asyncio.gather(*(hold() for _ in range(100)))
        assert (held, most) == (0, 3)

    asyncio.run(run())


def test_connections_take_turns_however_many_wait_in_each() -> None:
    async def run() -> None:
        semaphore = FairSemaphore(1)
        done: list[str] = []
        crowd = [work(semaphore, 1, f"crowd {number}", done) for number in range(50)]
        single = [work(semaphore, 2, f"single {number}", done) for number in range(2)]
        await asyncio.gather(*crowd, *single)
        assert done[:5] == ["crowd 0", "crowd 1", "single 0", "crowd 2", "single 1"]
        assert done[5:] == [f"crowd {number}" for number in range(3, 50)]

    asyncio.run(run())


def test_turn_of_one_who_gave_up_goes_to_the_next() -> None:
    async def run() -> None:
        semaphore = FairSemaphore(1)
        done: list[str] = []
        async with semaphore.of(1):
            waiting = [
                asyncio.ensure_future(work(semaphore, 1, f"{number}", done)) for number in range(4)
            ]
            await asyncio.sleep(0)
            waiting[0].cancel()  # while it waits
        waiting[1].cancel()  # it has been given its turn, and does not know yet
        await asyncio.gather(*waiting, return_exceptions=True)
        assert done == ["2", "3"]
        await work(semaphore, 1, "later", done)
        assert done[-1] == "later"

    asyncio.run(run())


def test_turn_is_passed_on_by_one_who_failed() -> None:
    async def run() -> None:
        semaphore = FairSemaphore(1)
        with pytest.raises(ValueError, match="no"):
            async with semaphore.of(1):
                raise ValueError("no")
        done: list[str] = []
        await work(semaphore, 1, "next", done)
        assert done == ["next"]

    asyncio.run(run())


@scene(patterns=("t", "*"))
async def test_reader_catches_up_beside_a_crowd_of_another_connection(at: At) -> None:
    for _ in range(20):
        await at.publish("t", *(b"x" * 1000 for _ in range(100)))
    crowd = Reader(connection_id=1)
    deaf = [
        await at.broker.subscribe(
            SubscribeRequest(number, crowd, [at.pattern], EARLIEST, credit_bytes=2**40)
        )
        for number in range(1, 200)
    ]
    reader = Reader(connection_id=2)
    mine = await at.broker.subscribe(
        SubscribeRequest(1, reader, [at.pattern], EARLIEST, credit_bytes=2**40)
    )
    for subscription in (*deaf, mine):
        subscription.start()
    await at.until(lambda: not mine.is_behind)
    assert reader.offsets("t") == list(range(1, 2001))
    assert sum(subscription.is_behind for subscription in deaf) > 100
    for subscription in deaf:
        await at.settle(subscription)
    assert len(crowd.offsets("t")) == 199 * 2000


@scene()
async def test_reader_paused_before_its_turn_is_sent_nothing(at: At) -> None:
    await at.publish("t", *(b"x" * 1000 for _ in range(100)))
    readers = [Reader(connection_id=1) for _ in range(50)]
    subscriptions = [
        await at.broker.subscribe(
            SubscribeRequest(number, reader, ["t"], EARLIEST, credit_bytes=2**40)
        )
        for number, reader in enumerate(readers, 1)
    ]
    for subscription in subscriptions:
        subscription.start()
    await asyncio.sleep(0)
    for subscription in subscriptions:
        subscription.pause()
    before = sum(len(reader.deliveries) for reader in readers)
    for _ in range(200):
        await asyncio.sleep(0)
    # Those whose turn it was have been sent the page that was being read.
    assert sum(len(reader.deliveries) for reader in readers) - before <= 4
    for subscription in subscriptions:
        subscription.resume()
    for subscription, reader in zip(subscriptions, readers, strict=True):
        await at.settle(subscription)
        assert reader.offsets("t") == list(range(1, 101))
