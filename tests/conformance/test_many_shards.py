"""A journal with several shards: every verb finds all of them, and order holds within a partition."""

from __future__ import annotations

import msgspec

from runnel.config import Settings, TopicRule
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from runnel.topics.partitions import shard_of_partition
from tests.conformance.listeners import Ability
from tests.conformance.stage import LOG, PATIENT, Stage, nothing_more, take, take_work, until, verb

SHARDS = 4
SETTINGS = Settings(
    topics=(TopicRule(match="s/*", partitions=4, journal="spread", last_value=True),),
    log=msgspec.structs.replace(LOG, journal_shards=SHARDS),
    native=PATIENT,
)
TOPICS = ("s/a", "s/b")
KEYS = [(topic, partition) for topic in TOPICS for partition in range(4)]
ROUNDS = 5

Place = tuple[str, int]


def shard_of(place: Place) -> int:
    return shard_of_partition(*place, SHARDS)


def text(place: Place, number: int) -> bytes:
    return b"%b %d %d" % (place[0].encode(), place[1], number)


async def publish_rounds(stage: Stage, *numbers: int) -> None:
    for number in numbers:
        for topic, partition in KEYS:
            payload = text((topic, partition), number)
            await stage.bus.publish(topic, payload, partition=partition)


def by_partition(messages: list[Message]) -> dict[Place, list[bytes]]:
    found: dict[Place, list[bytes]] = {}
    for message in messages:
        found.setdefault((message.topic, message.partition), []).append(message.payload)
    return found


def rounds(*numbers: int) -> dict[Place, list[bytes]]:
    return {place: [text(place, number) for number in numbers] for place in KEYS}


def test_the_topics_lie_in_all_shards() -> None:
    assert {shard_of(place) for place in KEYS} == set(range(SHARDS))
    assert len({shard_of((TOPICS[0], partition)) for partition in range(4)}) > 1


@verb(settings=SETTINGS)
async def test_every_partition_can_be_fetched_and_keeps_its_order(stage: Stage) -> None:
    await publish_rounds(stage, *range(ROUNDS))
    for topic, partition in KEYS:
        expected = [text((topic, partition), number) for number in range(ROUNDS)]
        assert await stage.payloads(topic, partition) == expected
    state = await stage.bus.topic("s/a")
    assert [each.owner.shard for each in state.partitions] == [
        shard_of(("s/a", partition)) for partition in range(4)
    ]


@verb(settings=SETTINGS)
async def test_publisher_of_several_topics_and_partitions_sends_to_all_shards(stage: Stage) -> None:
    async with stage.bus.publisher("s/a") as publisher:
        sent = []
        for number in range(100):
            sent.append(publisher.submit(b"%d" % number, TOPICS[number % 2], key=b"%d" % number))
            if number % 7 == 0:
                await publisher.ready()
    receipts = [await each for each in sent]
    assert {shard_of((each.topic, each.partition)) for each in receipts} == set(range(SHARDS))
    for number, receipt in enumerate(receipts):
        page = await stage.bus.fetch(
            receipt.topic, receipt.offset, partition=receipt.partition, messages_max=1
        )
        assert [message.payload for message in page.messages] == [b"%d" % number]


@verb(settings=SETTINGS)
async def test_reader_by_pattern_gets_the_history_of_all_shards_and_then_what_comes(
    stage: Stage,
) -> None:
    await publish_rounds(stage, 0, 1, 2)
    async with stage.bus.subscribe("s/*", start="earliest") as subscription:
        assert by_partition(await take(subscription, 3 * len(KEYS))) == rounds(0, 1, 2)
        await publish_rounds(stage, 3)
        assert by_partition(await take(subscription, len(KEYS))) == rounds(3)
        await nothing_more(stage, subscription)


@verb(settings=SETTINGS)
async def test_reader_of_topics_gets_all_partitions(stage: Stage) -> None:
    await publish_rounds(stage, 0, 1, 2)
    async with stage.bus.subscribe(*TOPICS, start="earliest") as subscription:
        assert by_partition(await take(subscription, 3 * len(KEYS))) == rounds(0, 1, 2)
        await publish_rounds(stage, 3)
        assert by_partition(await take(subscription, len(KEYS))) == rounds(3)
        await nothing_more(stage, subscription)


@verb(settings=SETTINGS)
async def test_reader_gets_the_last_value_of_every_partition(stage: Stage) -> None:
    await publish_rounds(stage, 0, 1)
    for patterns in (("s/*",), TOPICS):
        async with stage.bus.subscribe(*patterns, start="last") as subscription:
            assert by_partition(await take(subscription, len(KEYS))) == rounds(1)
            await nothing_more(stage, subscription)


@verb(settings=SETTINGS)
async def test_latest_begins_behind_the_end_of_every_shard(stage: Stage) -> None:
    await stage.publish("s/a", b"before")
    async with stage.bus.subscribe("s/*") as subscription:
        await publish_rounds(stage, 0)
        assert by_partition(await take(subscription, len(KEYS))) == rounds(0)
        await nothing_more(stage, subscription)


@verb(settings=SETTINGS)
async def test_time_is_found_in_every_shard(stage: Stage) -> None:
    await publish_rounds(stage, 0)
    stage.advance(10)
    begin_ns = stage.clock.time_ns()
    await publish_rounds(stage, 1)
    for patterns in (("s/*",), TOPICS):
        async with stage.bus.subscribe(*patterns, start=("time", begin_ns)) as subscription:
            assert by_partition(await take(subscription, len(KEYS))) == rounds(1)
            await nothing_more(stage, subscription)


@verb(settings=SETTINGS, needs=[Ability.SHARDS])
async def test_pipeline_reads_all_shards_entry_by_entry(stage: Stage) -> None:
    await publish_rounds(stage, *range(ROUNDS))
    found = await stage.bus.shards("s/*")
    assert [(each.journal, each.shard) for each in found] == [
        ("spread", shard) for shard in range(SHARDS)
    ]
    messages: list[Message] = []
    for shard in found:
        entry = shard.first_entry
        while entry < shard.next_entry:
            page = await stage.bus.fetch_shard(
                shard.journal, shard.shard, entry, patterns=["s/*"], bytes_max=200
            )
            some = [message for batch in page.batches for message in batch]
            assert {shard_of((each.topic, each.partition)) for each in some} <= {shard.shard}
            messages += some
            entry = page.next_entry
    assert by_partition(messages) == rounds(*range(ROUNDS))


@verb(settings=SETTINGS, needs=[Ability.STORED, Ability.SHARDS])
async def test_shard_without_messages_is_there_after_a_restart(stage: Stage) -> None:
    await stage.bus.publish("s/a", b"x", partition=0)
    used = shard_of(("s/a", 0))
    await stage.restart()
    found = {each.shard: each.next_entry for each in await stage.bus.shards("s/a")}
    assert found[used] == 2
    for shard, next_entry in found.items():
        page = await stage.bus.fetch_shard("spread", shard, next_entry)
        assert not page.batches
    places = [
        CursorPlace(journal="spread", shard=shard, entry=1, patterns=("s/*",)) for shard in found
    ]
    await stage.bus.set_cursor("c", places)
    cursor = await stage.bus.cursor("c")
    assert cursor is not None
    assert sum(place.lag for place in cursor.places) == 1


@verb(settings=SETTINGS)
async def test_cursor_stands_in_several_shards_with_the_lag_of_each(stage: Stage) -> None:
    await publish_rounds(stage, 0, 1, 2)
    await stage.bus.set_cursor("by partition", dict.fromkeys(KEYS, 2))
    places = [
        CursorPlace(journal="spread", shard=shard, entry=1, patterns=("s/a",))
        for shard in range(SHARDS)
    ]
    await stage.bus.set_cursor("by shard", places)
    by_partition_cursor = await stage.bus.cursor("by partition")
    by_shard = await stage.bus.cursor("by shard")
    assert by_partition_cursor is not None
    assert by_shard is not None
    assert [place.lag for place in by_partition_cursor.places] == [2] * len(KEYS)
    assert {place.shard: place.lag for place in by_shard.places} == {
        shard: 3 * [shard_of(("s/a", partition)) for partition in range(4)].count(shard)
        for shard in range(SHARDS)
    }


@verb(settings=SETTINGS, needs=[Ability.STORED])
async def test_acknowledgements_in_all_shards_survive_a_restart(stage: Stage) -> None:
    await stage.bus.make_subscription("work", "s/*", start="earliest")
    await publish_rounds(stage, 0, 1)
    async with stage.bus.consume("work") as consumer:
        for work in await take_work(consumer, 2 * len(KEYS)):
            if work.payload.endswith(b" 0"):
                await work.ack()
    await stage.restart()
    async with stage.bus.consume("work") as consumer:
        left = await take_work(consumer, len(KEYS))
        found = by_partition([each.message for each in left])
        assert found == rounds(1)
        for work in left:
            await work.ack()
        await nothing_more(stage, consumer)


@verb(settings=SETTINGS)
async def test_dead_letters_of_several_shards_are_collected(stage: Stage) -> None:
    async with stage.bus.consume("work", "s/*", deliveries_max=1) as consumer:
        await publish_rounds(stage, 0)
        for work in await take_work(consumer, len(KEYS)):
            await work.nack(reason="no")

        async def letters() -> list[Message]:
            return [letter async for letter in stage.bus.dead_letters("work")]

        found = await until(letters, lambda some: len(some) >= len(KEYS))
    assert sorted(each.payload for each in found) == sorted(text(place, 0) for place in KEYS)


@verb(settings=SETTINGS, needs=[Ability.NAMED, Ability.STORED])
async def test_named_publisher_stores_everything_once_over_a_restart(stage: Stage) -> None:
    for life in range(2):
        async with stage.bus.publisher("s/a", name="p", batch_messages_max=3) as publisher:
            for number in range(40):
                publisher.send(b"%d" % (40 * life + number), TOPICS[number % 2], key=b"%d" % number)
        await stage.restart()
    messages: list[Message] = []
    async with stage.bus.subscribe("s/*", start="earliest") as subscription:
        messages = await take(subscription, 80)
        await nothing_more(stage, subscription)
    assert sorted(int(message.payload) for message in messages) == list(range(80))
    assert all(
        payloads == sorted(payloads, key=int) for payloads in by_partition(messages).values()
    )


@verb(settings=SETTINGS)
async def test_purged_and_deleted_topics_are_gone_from_all_shards(stage: Stage) -> None:
    await publish_rounds(stage, 0)
    await stage.bus.purge_topic("s/a")
    await stage.bus.delete_topic("s/b")
    async with stage.bus.subscribe("s/*", start="earliest") as subscription:
        await publish_rounds(stage, 1)
        assert by_partition(await take(subscription, len(KEYS))) == rounds(1)
        await nothing_more(stage, subscription)
