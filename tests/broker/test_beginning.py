"""What happens at the very moment when a subscription begins: nothing may slip through."""

from __future__ import annotations

import asyncio

from runnel.broker.live.subscription import SubscribeRequest
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.config import Keep, LogSettings, Rotate, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Deliver, PartitionPlace, ShardPlace, Start, Subscribed
from runnel.log.log import ShardId
from tests.broker.scenes import EARLIEST, LAST, At, Reader, scene

OWN = TopicRule(match="*", journal="{topic}")
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))
# Looking anything up takes a while.
FORGETFUL = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0, index_cache_bytes_max=1)

OLD = [f"old/{number}" for number in range(10)]


async def begin_beside_publishing(at: At, start: Start, pattern: str, turns: int) -> None:
    """A topic is made and published to while the broker still looks up where to begin."""
    topic = f"n{turns}"
    reader = Reader()
    beginning = asyncio.ensure_future(
        at.broker.subscribe(
            SubscribeRequest(1, reader, [*OLD, f"{topic}{pattern}"], start, credit_bytes=0)
        )
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    await at.publish(topic, b"1", b"2")
    subscription = await beginning
    subscription.start()
    await at.publish(topic, b"3")
    subscription.grant(2**30)
    await at.settle(subscription)
    assert reader.offsets(topic) == [1, 2, 3]
    subscription.close()


@scene(SMALL, log=FORGETFUL, patterns=("", "*"))
async def test_topic_made_while_a_subscription_begins_is_read_from_its_first_message(
    at: At,
) -> None:
    for old in OLD:
        await at.publish(old, b"0")
    for turns in range(20):
        await begin_beside_publishing(at, EARLIEST, at.pattern, turns)
        await begin_beside_publishing(at, Start("resume"), at.pattern, 20 + turns)


@scene(OWN, patterns=("", "*"))
async def test_journal_made_while_a_subscription_begins_is_read_from_its_first_message(
    at: At,
) -> None:
    for turns in range(20):
        await at.publish(OLD[0], b"0")
        await begin_beside_publishing(at, EARLIEST, at.pattern, turns)
        start = Start("time", time_ns=at.clock.time_ns())
        await begin_beside_publishing(at, start, at.pattern, 20 + turns)


@scene(OWN, patterns=("credit", "room"))
async def test_journal_made_while_last_values_are_looked_up_is_neither_missed_nor_repeated(
    at: At,
) -> None:
    topics = [f"t{number:03}" for number in range(300)]
    for topic in topics[::2]:
        await at.publish(topic, b"old", b"last")
    credit_bytes = 1 if at.pattern == "credit" else 2**30
    reader, subscription = await at.subscribe("t*", start=LAST, credit_bytes=credit_bytes)
    for topic in topics[1::2]:
        await at.publish(topic, b"1", b"2")
        subscription.grant(100)
    subscription.grant(2**30)
    await at.settle(subscription)
    for topic in topics[::2]:
        assert reader.offsets(topic) == [2]
    for topic in topics[1::2]:
        assert reader.offsets(topic) == [1, 2]


@scene(TopicRule(match="*", journal="j", keep=Keep.MEMORY))
async def test_place_of_an_older_epoch_is_answered_with_a_gap_and_all_there_is(at: At) -> None:
    await at.publish("m", b"1", b"2")
    await at.publish("m", b"3")
    end = 3
    for entry in (1, end, 17):
        start = Start("resume", shards=[ShardPlace("j", 0, 99, entry)])
        _, unread = await at.subscribe("?", start=start, credit_bytes=0)
        unread.close()
        again = Start(
            "resume", shards=unread.shards
        )  # it was told where it begins, and got nothing
        for each in (start, again):
            reader, subscription = await at.subscribe("?", start=each)
            await at.settle(subscription)
            assert reader.payloads() == [b"1", b"2", b"3"]
            assert [gap.reason for gap in reader.gaps] == ["restart"]


@scene()
async def test_place_beyond_the_end_is_reported(at: At) -> None:
    await at.publish("a", b"1")
    start = Start("resume", shards=[ShardPlace("main", 0, 0, 17)])
    reader, subscription = await at.subscribe("?", start=start)
    await at.publish("a", b"2")
    await at.settle(subscription)
    assert reader.payloads() == [b"2"]
    assert [gap.reason for gap in reader.gaps] == ["restart"]


@scene(TopicRule(match="*", journal="j", keep=Keep.MEMORY))
async def test_topic_that_memory_lost_is_told_before_it_is_made_again(at: At) -> None:
    by_topic = Start("resume", [PartitionPlace("m", 0, 9, 17)])
    by_shard = Start("resume", shards=[ShardPlace("j", 0, 17, 9), ShardPlace("live", 0, 17, 9)])
    for topic, pattern, start in (("n", "?", by_shard), ("m", "m", by_topic)):
        cut_off, before = await at.subscribe(pattern, start=start)
        before.close()
        # Its place stays as it was, so it is told again if the connection is lost before anything comes.
        assert not before.partitions
        assert ShardId("j") not in {ShardId(each.journal, each.shard) for each in before.shards}
        reader, subscription = await at.subscribe(pattern, start=start)
        for each in (cut_off, reader):
            assert [gap.reason for gap in each.gaps] == ["restart"]
        await at.publish(topic, b"1")
        await at.settle(subscription)
        assert reader.offsets(topic) == [1]
        assert [gap.reason for gap in reader.gaps] == ["restart"]


@scene(TopicRule(match="*", journal="j", keep=Keep.MEMORY))
async def test_gap_of_purged_messages_counts_those_that_left_the_log_already(at: At) -> None:
    reader, subscription = await at.subscribe("?", credit_bytes=0)
    for topics in ("mn", "m", "mn"):  # purging removes the second batch, the others are shared
        await at.broker.publish(
            Batch.from_messages([Message(t, b"x") for t in topics for _ in "ab"])
        )
    await at.broker.purge_topic("m")
    subscription.grant(2**20)
    await at.settle(subscription)
    assert reader.offsets("n") == [1, 2, 3, 4]
    [gap] = reader.gaps
    assert (gap.topic, gap.first_offset, gap.next_offset, gap.missed) == ("m", 1, 7, 6)


@scene(TopicRule(match="*", journal="j"))
async def test_gap_is_not_told_again_to_a_reader_that_comes_back_behind_it(at: At) -> None:
    position = SubscriptionPosition(["m*"], Start("latest"))
    _, subscription = await at.subscribe("m*")
    position.begin(Subscribed(1, 1, subscription.partitions, subscription.shards))
    subscription.close()
    await at.broker.publish(Batch.from_messages([Message("m", b"1"), Message("n", b"1")]))
    await at.broker.purge_topic("m")

    reader, subscription = await at.subscribe("m*", start=position.next_start())
    await at.settle(subscription)
    assert [(gap.topic, gap.missed) for gap in reader.gaps] == [("m", 1)]
    [told] = reader.deliveries
    assert not told.buffers
    position.delivered(Deliver(1, told.shard.journal, 0, told.epoch, told.next_entry), ())
    subscription.close()

    reader, subscription = await at.subscribe("m*", start=position.next_start())
    await at.publish("m", b"2")
    await at.settle(subscription)
    assert (reader.gaps, reader.offsets("m")) == ([], [2])


@scene(patterns=("[ab]", "literal"))
async def test_last_values_that_had_not_come_are_sent_after_a_loss(at: At) -> None:
    patterns = ("a", "b") if at.pattern == "literal" else (at.pattern,)
    for topic in ("a", "b"):
        await at.publish(topic, b"old", b"last")
    _, cut_off = await at.subscribe(*patterns, start=LAST, credit_bytes=0)
    cut_off.close()
    await at.publish("b", b"since")
    start = Start("resume_last", cut_off.partitions, 0, cut_off.shards)
    reader, subscription = await at.subscribe(*patterns, start=start)
    await at.publish("a", b"next")
    await at.settle(subscription)
    # Of b the last value is no longer the last: it goes on with what came since.
    assert sorted(reader.payloads()) == [b"last", b"next", b"since"]
    assert [delivery.messages for delivery in reader.deliveries].count(0) == 1
