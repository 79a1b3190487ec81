"""A subscription passes from stored to live messages under load without a gap and without a repeat."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from runnel.client.consumer import StartAt, Subscription
from runnel.config import Rotate, TopicRule
from tests.conformance.stage import Stage, verb

# Segments rotate every few batches, so that readers cross many of them.
ROTATING = TopicRule(match="*", journal="main", partitions=2, rotate=Rotate(bytes_max=5000))

MESSAGES = 2000
TOPICS = 12
END = b"the end"

Seen = dict[tuple[str, int], list[int]]


async def publish_all(stage: Stage, published: asyncio.Event) -> None:
    """Publish to ever more topics until all are busy. The last message of all is a mark."""
    bus = await stage.connect()
    async with bus.publisher(batch_messages_max=40) as publisher:
        for number in range(MESSAGES):
            topic = number % (1 + number * TOPICS // MESSAGES)
            publisher.send(b"%d" % number, f"t/{topic}", key=b"%d" % (number % 7))
            if number % 20 == 0:
                await publisher.ready()
                await bus.ping()
            if number == MESSAGES // 3:
                await publisher.flush()
                published.set()
    # All topics share a shard, so this message comes last.
    await bus.publish("t/0", END, partition=0)


async def read_until_end(subscription: Subscription) -> Seen:
    """The offsets of each partition, in order of arrival."""
    seen: Seen = defaultdict(list)
    async for message in subscription:
        seen[message.topic, message.partition].append(message.offset)
        if message.payload == END:
            break
    return seen


async def everything(stage: Stage) -> Seen:
    """The offsets that a complete subscription has to see."""
    return {
        (topic.name, number): list(range(1, state.next_offset))
        for topic in await stage.bus.topics("t/*")
        for number, state in enumerate((await stage.bus.topic(topic.name)).partitions)
        if state.next_offset > 1
    }


async def read_under_load(stage: Stage, *patterns: str, start: StartAt) -> tuple[Seen, Seen]:
    """The messages that a reader got which began in the middle, and those that were stored by the end."""
    published = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(publish_all(stage, published))
        await published.wait()
        async with stage.bus.subscribe(*patterns, start=start) as subscription:
            seen = await read_until_end(subscription)
    assert not subscription.gaps
    return seen, await everything(stage)


@verb(ROTATING)
async def test_pattern_from_the_earliest_while_topics_appear(stage: Stage) -> None:
    seen, all_there_is = await read_under_load(stage, "t/*", start="earliest")
    assert seen == all_there_is


@verb(ROTATING)
async def test_named_topics_from_the_earliest_while_they_appear(stage: Stage) -> None:
    names = [f"t/{number}" for number in range(TOPICS)]
    published = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(publish_all(stage, published))
        await published.wait()
        async with stage.bus.subscribe(*names, start="earliest") as subscription:
            seen: Seen = defaultdict(list)
            count = MESSAGES + 1  # partitions are read in turns, so the mark need not be the last
            async for message in subscription:
                seen[message.topic, message.partition].append(message.offset)
                count -= 1
                if not count:
                    break
        await publishing
    assert seen == await everything(stage)


@verb(ROTATING)
async def test_latest_and_last_begin_somewhere_and_miss_nothing_from_there(stage: Stage) -> None:
    for start in ("latest", "last"):
        seen, all_there_is = await read_under_load(stage, "t/*", start=start)
        for key, offsets in all_there_is.items():
            if key in seen:
                first = seen[key][0]
                assert seen[key] == list(range(first, offsets[-1] + 1)), (start, key)
        for topic in await stage.bus.topics("t/*"):
            await stage.bus.delete_topic(topic.name)


@verb(ROTATING)
async def test_time_under_load(stage: Stage) -> None:
    seen, all_there_is = await read_under_load(stage, "t/*", start=("time", 0))
    assert seen == all_there_is


@verb(ROTATING)
async def test_many_readers_that_begin_at_different_moments_see_the_same(stage: Stage) -> None:
    published = asyncio.Event()
    found: list[Seen] = []

    async def read(pause: int) -> None:
        await published.wait()
        bus = await stage.connect()
        for _ in range(pause):
            await bus.ping()
        async with bus.subscribe("t/*", start="earliest") as subscription:
            found.append(await read_until_end(subscription))

    async with asyncio.TaskGroup() as group:
        group.create_task(publish_all(stage, published))
        for pause in (0, 3, 10, 30):
            group.create_task(read(pause))
    all_there_is = await everything(stage)
    assert found == [all_there_is] * 4
