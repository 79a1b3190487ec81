"""Publishing: the fields of a message, the receipt, and batches."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import Keep, TopicRule
from runnel.errors import ClientFault, LimitExceededError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, take_payloads, until, verb

LIVE = TopicRule(match="live/*", keep=Keep.NONE)
SPREAD = TopicRule(match="p/*", partitions=4)


@verb()
async def test_message_comes_back_as_it_was_published(stage: Stage) -> None:
    uid = bytes(range(20))
    receipt = await stage.bus.publish(
        "sensors/a",
        b"21.5",
        key=b"a",
        partition_key=b"room",
        tags={"unit": "C", "ä": "ö"},
        event_time_ns=17,
        uid=uid,
    )
    assert (receipt.topic, receipt.partition, receipt.offset) == ("sensors/a", 0, 1)
    assert receipt.receivers is None
    [message] = (await stage.bus.fetch("sensors/a")).messages
    assert message.topic == "sensors/a"
    assert (message.payload, message.key, message.partition_key) == (b"21.5", b"a", b"room")
    assert message.tags == {"unit": "C", "ä": "ö"}
    assert (message.event_time_ns, message.uid, message.size) == (17, uid, 4)
    assert (message.partition, message.offset) == (0, 1)
    assert message.receive_time_ns == receipt.receive_time_ns == stage.clock.time_ns()
    assert message.transmit_time_ns > 0


@verb()
async def test_absent_and_empty_are_told_apart(stage: Stage) -> None:
    await stage.bus.publish("a", b"")
    await stage.bus.publish("a", b"x", key=b"")
    bare, keyed = (await stage.bus.fetch("a")).messages
    assert (bare.payload, bare.key, dict(bare.tags), bare.uid) == (b"", None, {}, None)
    assert keyed.key == b""


@verb()
async def test_offsets_count_up_within_each_topic(stage: Stage) -> None:
    receipts = [await stage.bus.publish(topic, b"x") for topic in ("a", "b", "a", "a", "b")]
    assert [receipt.offset for receipt in receipts] == [1, 1, 2, 3, 2]


@verb()
async def test_publishes_that_are_not_awaited_one_by_one_keep_their_order(stage: Stage) -> None:
    receipts = await asyncio.gather(
        *(stage.bus.publish("a", b"%d" % number) for number in range(200))
    )
    assert [receipt.offset for receipt in receipts] == list(range(1, 201))
    assert await stage.payloads("a") == [b"%d" % number for number in range(200)]


@verb(TopicRule(match="m/*", keep=Keep.MEMORY), LIVE, needs=[Ability.STORED])
async def test_level_without_asking_is_stored_on_disk_and_received_elsewhere(stage: Stage) -> None:
    levels = [(await stage.bus.publish(topic, b"x")).level for topic in ("d", "m/a", "live/a")]
    assert levels == ["stored", "received", "received"]


@verb()
async def test_level_none_is_not_answered_and_arrives(stage: Stage) -> None:
    for level in ("none", "received", "stored"):
        receipt = await stage.bus.publish("a", level.encode(), level=level)
        assert receipt.level == level or not stage.listener.is_on_disk
        assert bool(receipt.offset) == (level != "none")
    assert await stage.payloads("a") == [b"none", b"received", b"stored"]


@verb(SPREAD)
async def test_key_decides_the_partition_and_partition_key_before_it(stage: Stage) -> None:
    by_key = {(await stage.bus.publish("p/a", b"x", key=b"k")).partition for _ in range(5)}
    apart = [
        (await stage.bus.publish("p/a", b"x", key=b"%d" % n, partition_key=b"k")).partition
        for n in range(5)
    ]
    assert by_key == set(apart)
    spread = {(await stage.bus.publish("p/a", b"x", key=b"%d" % n)).partition for n in range(40)}
    assert spread == {0, 1, 2, 3}


@verb(SPREAD)
async def test_publish_and_publisher_choose_the_same_partition_for_a_key(stage: Stage) -> None:
    async with stage.bus.publisher("p/a") as publisher:
        sent = [publisher.submit(b"x", key=b"%d" % number) for number in range(20)]
    single = [await stage.bus.publish("p/a", b"y", key=b"%d" % number) for number in range(20)]
    assert [(await receipt).partition for receipt in sent] == [r.partition for r in single]


@verb(SPREAD)
async def test_partition_can_be_named(stage: Stage) -> None:
    for partition in (3, 0, 3):
        await stage.bus.publish("p/a", b"%d" % partition, partition=partition)
    assert await stage.payloads("p/a", 3) == [b"3", b"3"]
    assert await stage.payloads("p/a", 0) == [b"0"]


@verb(SPREAD)
async def test_messages_without_a_key_spread_over_all_partitions(stage: Stage) -> None:
    receipts = [await stage.bus.publish("p/a", b"x") for _ in range(8)]
    assert {receipt.partition for receipt in receipts} == {0, 1, 2, 3}


# --- Publishers ---


@verb()
async def test_publisher_flushes_at_its_end_and_keeps_order(stage: Stage) -> None:
    async with stage.bus.publisher("a", batch_messages_max=7) as publisher:
        for number in range(100):
            publisher.send(b"%d" % number)
    assert await stage.payloads("a") == [b"%d" % number for number in range(100)]
    assert publisher.buffered_bytes == 0


@verb()
async def test_publisher_speaks_for_many_topics(stage: Stage) -> None:
    async with stage.bus.publisher() as publisher:
        for number in range(60):
            publisher.send(b"%d" % number, f"s/{number % 3}", tags={"n": str(number)})
    for topic in range(3):
        page = await stage.bus.fetch(f"s/{topic}")
        assert [message.payload for message in page.messages] == [
            b"%d" % number for number in range(topic, 60, 3)
        ]
        assert page.messages[1].tags == {"n": str(topic + 3)}


@verb()
async def test_publisher_tells_where_each_message_is_stored(stage: Stage) -> None:
    async with stage.bus.publisher("a") as publisher:
        futures = [publisher.submit(b"x") for _ in range(5)]
        futures.append(publisher.submit(b"y", "b"))
        await publisher.flush()
        receipts = [future.result() for future in futures]
    assert [receipt.offset for receipt in receipts] == [1, 2, 3, 4, 5, 1]
    assert [receipt.topic for receipt in receipts] == ["a"] * 5 + ["b"]


@verb()
async def test_publisher_sends_by_itself_and_needs_no_time_to_pass(stage: Stage) -> None:
    async with stage.bus.publisher("a", linger_ms=3_600_000, batch_messages_max=3) as publisher:
        for number in range(7):
            publisher.send(b"%d" % number)
        expected = [b"%d" % number for number in range(7)]
        await until(lambda: stage.bus.topics("a"), bool)
        await until(lambda: stage.payloads("a"), lambda payloads: payloads == expected)


@verb()
async def test_publisher_makes_whoever_is_quicker_wait_for_room(stage: Stage) -> None:
    async with stage.bus.publisher("a", buffer_bytes_max=10_000) as publisher:
        for number in range(200):
            await publisher.ready()
            publisher.send(b"%d" % number + bytes(500))
            assert publisher.buffered_bytes < 30_000
    payloads = await stage.payloads("a")
    assert [int(payload.rstrip(b"\0")) for payload in payloads] == list(range(200))


@verb()
async def test_refused_message_fails_by_itself_and_the_flush_tells(stage: Stage) -> None:
    async with stage.bus.publisher("a") as publisher:
        publisher.send(b"before")
        publisher.send(bytes(2**20 + 1))
        publisher.send(b"after")
        with pytest.raises(LimitExceededError, match="1048577"):
            await publisher.flush()
    assert await stage.payloads("a") == [b"before", b"after"]


@verb(needs=[Ability.BATCHES])
async def test_compressed_batches_are_read_like_others(stage: Stage) -> None:
    for codec in ("lz4", "zstd"):
        async with stage.bus.publisher("a", compression=codec) as publisher:
            for _ in range(50):
                publisher.send(codec.encode() * 100)
                publisher.send(b"x", "b")
    assert await stage.payloads("a") == [b"lz4" * 100] * 50 + [b"zstd" * 100] * 50
    async with stage.bus.subscribe("b", start="earliest") as subscription:
        assert await take_payloads(subscription, 100) == [b"x"] * 100


# --- Batches ---


@verb(needs=[Ability.BATCHES, Ability.ALONE])
async def test_batch_is_answered_run_by_run(stage: Stage) -> None:
    await stage.publish("b", b"0")
    runs = [Message("a", b"1"), Message("a", b"2"), Message("b", b"3"), Message("a", b"4")]
    receipt = await stage.bus.publish_batch(Batch.from_messages(runs))
    assert list(receipt.base_offsets) == [1, 2, 3]
    assert receipt.entry > 0
    assert not receipt.is_repeated
    assert await stage.payloads("a") == [b"1", b"2", b"4"]
    assert await stage.payloads("b") == [b"0", b"3"]


@verb(LIVE, needs=[Ability.BATCHES])
async def test_batch_with_one_refused_run_is_refused_whole_and_names_it(stage: Stage) -> None:
    mixed = [Message("a", b"1"), Message("live/x", b"2")]
    with pytest.raises(ClientFault, match=r"run 1.*live/x"):
        await stage.bus.publish_batch(Batch.from_messages(mixed))
    assert not sum(topic.messages for topic in await stage.bus.topics())


# --- Ephemeral topics ---


@verb(LIVE)
async def test_receipt_counts_receivers_of_topics_that_are_not_kept(stage: Stage) -> None:
    assert (await stage.bus.publish("live/a", b"nobody")).receivers == 0
    other = await stage.connect()
    async with stage.bus.subscribe("live/*") as one, other.subscribe("live/a", "b") as two:
        receipt = await stage.bus.publish("live/a", b"both")
        assert (receipt.receivers, receipt.offset) == (2, 1)
        assert await take_payloads(one, 1) == await take_payloads(two, 1) == [b"both"]
    assert (await stage.bus.publish("live/a", b"nobody again")).receivers == 0


@verb(LIVE)
async def test_topic_that_is_not_kept_begins_anew_with_its_readers(stage: Stage) -> None:
    async with stage.bus.subscribe("live/a"):
        first = await stage.bus.publish("live/a", b"1")
        await stage.bus.publish("live/a", b"2")
        assert [topic.name for topic in await stage.bus.topics()] == ["live/a"]
    assert await stage.bus.topics() == []
    async with stage.bus.subscribe("live/a"):
        again = await stage.bus.publish("live/a", b"3")
    assert (first.offset, again.offset) == (1, 1)
    assert again.epoch > first.epoch
