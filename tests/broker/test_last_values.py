"""Subscriptions that begin with the last message of each topic, of very many topics."""

from __future__ import annotations

from runnel.config import Keep, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.broker.scenes import LAST, At, publish_batch, scene

TOPICS = [f"t/{number:04}" for number in range(3000)]
LIVE = TopicRule(match="live/*", keep=Keep.NONE, last_value=True)
OWN = TopicRule(match="t/*", journal="{topic}")


async def publish_together(at: At, topics: list[str], payload: bytes) -> None:
    messages = [Message(topic, payload) for topic in topics for _ in range(2)]
    await publish_batch(at.broker, Batch.from_messages(messages))


@scene()
async def test_last_values_of_one_batch_come_in_a_few_deliveries(at: At) -> None:
    await publish_together(at, TOPICS, b"x")
    reader, subscription = await at.subscribe("t/*", "t/1*", start=LAST)
    await at.settle(subscription)
    assert [(message.topic, message.offset) for message in reader.messages] == [
        (topic, 2) for topic in TOPICS
    ]
    assert len(reader.deliveries) < 5


@scene()
async def test_reader_without_room_is_sent_one_batch_for_each_bit_of_credit(at: At) -> None:
    for begin in range(0, 300, 100):
        await publish_together(at, TOPICS[begin : begin + 100], b"x" * 1000)
    reader, subscription = await at.subscribe("t/*", start=LAST, credit_bytes=0)
    for deliveries in range(1, 4):
        for _ in range(100):
            await at.publish("else", b"lets the loop turn")
        assert len(reader.deliveries) == deliveries - 1
        subscription.grant(1 - subscription.credit_bytes)
        await at.until(lambda: len(reader.deliveries) == deliveries)  # noqa: B023 - before the next
    subscription.grant(2**40)
    await at.settle(subscription)
    assert sorted(message.topic for message in reader.messages) == TOPICS[:300]


@scene()
async def test_topic_purged_or_deleted_before_there_is_room_is_not_sent(at: At) -> None:
    for topic in TOPICS[:4]:
        await at.publish(topic, b"x" * 100_000)
    reader, subscription = await at.subscribe("t/*", start=LAST, credit_bytes=1)
    await at.until(lambda: len(reader.deliveries) == 1)
    [first] = reader.messages
    others = [topic for topic in TOPICS[:4] if topic != first.topic]
    await at.broker.purge_topic(others[0])
    await at.broker.delete_topic(others[1])
    subscription.grant(2**40)
    await at.settle(subscription)
    assert [message.topic for message in reader.messages] == [first.topic, others[2]]


@scene()
async def test_what_comes_while_last_values_wait_for_room_follows_them(at: At) -> None:
    for begin in range(0, 200, 50):
        await publish_together(at, TOPICS[begin : begin + 50], b"old" * 100)
    reader, subscription = await at.subscribe("t/*", start=LAST, credit_bytes=1)
    await at.until(lambda: len(reader.deliveries) == 1)
    for topic in TOPICS[:200]:
        await at.publish(topic, b"new")
    subscription.grant(2**40)
    await at.settle(subscription)
    for topic in TOPICS[:200]:
        assert reader.offsets(topic) == [2, 3]


@scene(OWN)
async def test_last_values_of_many_journals_come_once_each(at: At) -> None:
    for topic in TOPICS[:200]:
        await at.publish(topic, b"1", b"2")
    reader, subscription = await at.subscribe("t/*", start=LAST)
    await at.settle(subscription)
    assert sorted(message.topic for message in reader.messages) == TOPICS[:200]
    assert {message.offset for message in reader.messages} == {2}


@scene(LIVE)
async def test_last_values_that_nobody_keeps_come_together_with_kept_ones(at: At) -> None:
    live = [f"live/{number:03}" for number in range(300)]
    await publish_together(at, live, b"x" * 1000)
    await at.publish("kept", b"1", b"2")
    reader, subscription = await at.subscribe("live/*", "kept", start=LAST, credit_bytes=1)
    for _ in range(100):
        subscription.grant(10_000)
        await at.publish("else", b"lets the loop turn")
    await at.settle(subscription)
    assert sorted(message.topic for message in reader.messages) == ["kept", *live]
    assert {message.offset for message in reader.messages} == {2}


@scene()
async def test_nothing_comes_after_a_reader_left_in_the_middle_of_its_last_values(at: At) -> None:
    for topic in TOPICS[:10]:
        await at.publish(topic, b"x" * 100_000)
    reader, subscription = await at.subscribe("t/*", start=LAST, credit_bytes=1)
    await at.until(lambda: len(reader.deliveries) == 1)
    subscription.close()
    subscription.grant(2**40)
    for _ in range(100):
        await at.publish("else", b"lets the loop turn")
    assert len(reader.deliveries) == 1
