"""A shard goes and comes back under every kind of client: the programs notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runnel.client import Bus
from runnel.client.consumer import Consumer, Subscription
from runnel.config import Keep, LogSettings, Settings, TopicRule
from runnel.embedded import Broker
from runnel.errors import MovedError, TimeoutExpiredError
from runnel.log.log import ShardId
from tests.client.running import in_both_loops
from tests.fakes.losing_log import LosingDiskLog, losing_logs

MAIN = ShardId("main")
RULES = (
    TopicRule(match="b*", journal="other"),
    TopicRule(match="live/*", keep=Keep.NONE),
    TopicRule(match="*", journal="main"),
)
ROUNDS, MESSAGES = 3, 20


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Bus, LosingDiskLog]]:
    where = directory / type(asyncio.get_running_loop()).__module__
    settings = Settings(
        data=str(where), topics=RULES, log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0)
    )
    with losing_logs():
        async with Broker.open(settings) as broker, broker.connect(deadline_s=15) as bus:
            log = broker._core._stores.main
            assert isinstance(log, LosingDiskLog)
            yield bus, log


async def turn(count: int = 50) -> None:
    """Let what is under way meet the loss."""
    for _ in range(count):
        await asyncio.sleep(0)


Lose = Callable[[LosingDiskLog], Awaitable[None]]


async def release(log: LosingDiskLog) -> None:
    await log.release(MAIN)


async def drop(log: LosingDiskLog) -> None:
    await log.drop(MAIN)


both_ways = pytest.mark.parametrize("lose", [release, drop])


async def read(subscription: Subscription, payloads: list[bytes]) -> None:
    async for message in subscription:
        payloads.append(message.payload)  # noqa: PERF401 - the test looks at it meanwhile


async def work(consumer: Consumer, payloads: list[bytes]) -> None:
    async for each in consumer:
        payloads.append(each.payload)
        await each.ack()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is the broker's doing
        await asyncio.sleep(0)


@both_ways
@in_both_loops
async def test_publishers_and_readers_continue(lose: Lose, tmp_path: Path) -> None:
    """Every message is stored once, and each reader gets it once, in order."""
    async with opened(tmp_path) as (bus, log):
        await bus.publish("a", b"first")
        by_name, by_pattern = [], []  # type: list[bytes], list[bytes]
        async with (
            bus.subscribe("a", start="earliest") as named,
            bus.subscribe("?", start="earliest") as matching,
            bus.publisher("a", name="p", batch_messages_max=3) as publisher,
        ):
            tasks = [
                asyncio.ensure_future(read(named, by_name)),
                asyncio.ensure_future(read(matching, by_pattern)),
            ]
            expected = [b"first"]
            for part in range(ROUNDS):
                for number in range(MESSAGES):
                    expected.append(b"%d/%d" % (part, number))
                    publisher.send(expected[-1])
                    if number == MESSAGES // 2:
                        await turn(part * 3)
                        await lose(log)
                flushing = asyncio.ensure_future(publisher.flush())
                await turn()
                assert not flushing.done()
                await log.acquire(MAIN)
                await flushing
            await until(lambda: len(by_name) >= len(expected) <= len(by_pattern))
            await turn()
            assert by_name == by_pattern == expected
            assert not named.gaps
            assert not matching.gaps
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@both_ways
@pytest.mark.parametrize("mode", ["shared", "key_shared", "multicast"])
@in_both_loops
async def test_consumers_stay_and_get_the_rest(lose: Lose, mode: str, tmp_path: Path) -> None:
    member = "m" if mode == "multicast" else None
    async with opened(tmp_path) as (bus, log):
        done: list[bytes] = []
        async with bus.consume("s", "*", mode=mode, member=member, start="earliest") as consumer:
            working = asyncio.ensure_future(work(consumer, done))
            for part in range(ROUNDS):
                expected = [b"%d/%d" % (part, number) for number in range(MESSAGES)]
                for payload in expected[:10]:
                    await bus.publish("a", payload, key=b"k")
                await until(lambda: done[-1:] == expected[9:10])  # noqa: B023 - called at once
                await consumer.flush()
                await lose(log)
                publishing = asyncio.ensure_future(publish_all(bus, expected[10:]))
                await bus.publish("b", b"meanwhile", key=b"k")
                await until(lambda: b"meanwhile" in done)
                done.remove(b"meanwhile")
                await log.acquire(MAIN)
                await publishing
                await until(lambda: len(done) == MESSAGES)
                assert done == expected  # each once: all that was acknowledged was stored
                await consumer.flush()
                done.clear()
            assert not consumer.late
            assert not working.done()
            (state,) = await bus.subscriptions()
            assert [each.backlog for each in state.members] == [0]
            working.cancel()
            await asyncio.wait({working})


async def publish_all(bus: Bus, payloads: list[bytes]) -> None:
    for payload in payloads:
        await bus.publish("a", payload, key=b"k")


@both_ways
@in_both_loops
async def test_waiting_fetch_and_other_requests_are_answered_afterwards(
    lose: Lose, tmp_path: Path
) -> None:
    async with opened(tmp_path) as (bus, log):
        await bus.publish("a", b"1")
        fetching = asyncio.ensure_future(bus.fetch("a", 2, wait_s=10))
        await turn()
        await lose(log)
        asked: list[asyncio.Future[object]] = [
            asyncio.ensure_future(each)
            for each in (
                bus.publish("a", b"2"),
                bus.make_subscription("s", "a"),
                bus.shards("*"),
                bus.topic("a"),
            )
        ]
        await turn()
        assert not fetching.done()
        assert not any(each.done() for each in asked)
        await log.acquire(MAIN)
        await asyncio.gather(*asked)
        page = await fetching
        assert [message.payload for message in page.messages] == [b"2"]


@both_ways
@in_both_loops
async def test_deadline_ends_the_patience(lose: Lose, tmp_path: Path) -> None:
    async with opened(tmp_path) as (bus, log):
        await bus.publish("a", b"1")
        await lose(log)
        with pytest.raises((MovedError, TimeoutExpiredError)):
            await bus.publish("a", b"2", deadline_s=0.05)
        await log.acquire(MAIN)
        await bus.publish("a", b"3")
        page = await bus.fetch("a", 1)
        assert [message.payload for message in page.messages] == [b"1", b"3"]
