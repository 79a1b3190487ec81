"""Topics that are not kept: made and removed by their readers, and what a slow reader misses of them."""

from __future__ import annotations

import asyncio

import pytest

from runnel.broker.broker import Level
from runnel.broker.fetcher import FetchRequest
from runnel.broker.live.subscription import SubscribeRequest
from runnel.broker.topics import TopicListRequest
from runnel.config import BrokerSettings, Keep, TopicRule
from runnel.errors import ClientFault, SlowReaderError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from tests.broker.scenes import LAST, LIVE, At, Reader, scene

STATE = TopicRule(match="state/*", keep=Keep.NONE, last_value=True)
SMALL_QUEUE = BrokerSettings(live_queue_bytes_max=2000)


async def names(at: At, pattern: str = "*") -> list[str]:
    topics, _ = await at.broker.topics.list(TopicListRequest(pattern))
    return [topic.name for topic in topics]


@scene(LIVE)
async def test_publishing_to_nobody_reports_no_receivers_and_makes_no_topic(at: At) -> None:
    published = await at.broker.publish(Batch.from_messages([Message("live/a", b"x")]))
    assert published.receivers == 0
    assert published.level is Level.RECEIVED
    assert await names(at) == []


@scene(LIVE)
async def test_receivers_are_counted_once_each(at: At) -> None:
    await at.subscribe("live/*")
    await at.subscribe("live/a")
    await at.subscribe("elsewhere")
    both = Batch.from_messages([Message("live/a", b"x"), Message("live/b", b"y")])
    published = await at.broker.publish(both)
    assert published.receivers == 2
    assert list(published.base_offsets) == [1, 1]


@scene(LIVE)
async def test_topic_vanishes_with_its_last_reader_and_begins_anew_in_a_new_epoch(at: At) -> None:
    reader, first = await at.subscribe("live/*")
    other, second = await at.subscribe("live/a")
    await at.publish("live/a", b"1", b"2")
    before = await at.broker.publish(Batch.from_messages([Message("live/a", b"3")]))
    first.close()
    await asyncio.sleep(0)
    assert await names(at) == ["live/a"]
    second.close()
    await asyncio.sleep(0)
    assert await names(at) == []
    again, _ = await at.subscribe("live/a")
    after = await at.broker.publish(Batch.from_messages([Message("live/a", b"1")]))
    assert list(after.base_offsets) == [1]
    assert after.epoch > before.epoch
    assert reader.offsets("live/a") == other.offsets("live/a") == [1, 2, 3]
    assert again.offsets("live/a") == [1]


@scene(LIVE)
async def test_reader_sees_runs_of_its_topics_alone_compressed_or_not(at: At) -> None:
    reader, _ = await at.subscribe("live/a", "live/c")
    everything, _ = await at.subscribe("live/*")
    for codec in (Codec.NONE, Codec.LZ4):
        mixed = [Message(f"live/{name}", name.encode() * 300) for name in "abcab"]
        await asyncio.gather(
            at.broker.publish(Batch.from_messages(mixed, codec=codec)),
            at.broker.publish(Batch.from_messages([Message("live/a", b"plain")])),
        )
    assert [payload[:1] for payload in reader.payloads()] == [b"a", b"c", b"a", b"p"] * 2
    assert len(everything.messages) == 12
    assert everything.offsets("live/a") == [1, 2, 3, 4, 5, 6]


@scene(LIVE, settings=SMALL_QUEUE)
async def test_slow_reader_misses_the_oldest_and_is_told_how_many_of_which_topic(at: At) -> None:
    reader, subscription = await at.subscribe("live/*")
    subscription.pause()
    for number in range(100):
        await at.publish(f"live/{'ab'[number % 2]}", b"%d" % number)
    assert not reader.messages
    assert subscription.queued_bytes <= 2000
    subscription.resume()
    kept = [int(payload) for payload in reader.payloads()]
    assert kept == list(range(kept[0], 100))
    missed: dict[str, int] = {}
    for gap in reader.gaps:
        assert gap.reason == "overflow"
        missed[gap.topic] = missed.get(gap.topic, 0) + gap.missed
    assert sum(missed.values()) == kept[0]
    assert set(missed) == {"live/a", "live/b"}
    await at.publish("live/a", b"live again")
    assert reader.payloads()[-1] == b"live again"


@scene(LIVE, settings=SMALL_QUEUE)
async def test_reader_may_ask_for_the_newest_of_each_topic_only(at: At) -> None:
    reader, subscription = await at.subscribe("live/*", overflow="newest_per_topic")
    subscription.pause()
    for number in range(100):
        await at.publish(f"live/{number % 5}", b"%d" % number)
    subscription.resume()
    last = {message.topic: int(message.payload) for message in reader.messages}
    assert last == {f"live/{number % 5}": number for number in range(95, 100)}
    for number in range(5):
        offsets = reader.offsets(f"live/{number}")
        assert offsets == sorted(offsets)
    assert sum(gap.missed for gap in reader.gaps) == 100 - len(reader.messages)


@scene(LIVE, settings=SMALL_QUEUE)
async def test_reader_may_ask_to_be_ended_rather_than_miss_anything(at: At) -> None:
    reader, subscription = await at.subscribe("live/*", overflow="disconnect")
    subscription.pause()
    for number in range(100):
        await at.publish("live/a", b"%d" % number)
    assert isinstance(reader.error, SlowReaderError)
    assert subscription.is_closed


@scene(STATE)
async def test_last_values_of_topics_not_kept_stay_in_memory(at: At) -> None:
    for number in range(3):
        await at.publish("state/a", b"a%d" % number)
    await at.publish("state/b", b"b", b"x" * 20_000, b"end")
    assert await names(at) == ["state/a", "state/b"]
    reader, subscription = await at.subscribe("state/*", start=LAST)
    await at.publish("state/a", b"new")
    await at.settle(subscription)
    assert reader.payloads()[:2] == [b"a2", b"end"] or b"a2" not in reader.payloads()
    assert reader.payloads()[-1] == b"new"
    assert reader.offsets("state/a")[-1] == 4


@scene(LIVE)
async def test_kept_and_not_kept_topics_do_not_share_a_batch(at: At) -> None:
    mixed = Batch.from_messages([Message("live/a", b"x"), Message("kept", b"y")])
    with pytest.raises(ClientFault, match="run 1"):
        await at.broker.publish(mixed)


@scene(LIVE)
async def test_there_is_nothing_to_fetch_of_a_topic_that_is_not_kept(at: At) -> None:
    with pytest.raises(ClientFault, match="subscribe"):
        await at.broker.fetch(FetchRequest("live/a", offset=1))
    with pytest.raises(UnknownTopicError):
        await at.broker.delete_topic("live/a")


@scene(LIVE)
async def test_queue_of_a_slow_reader_keeps_nothing_alive_but_its_own_bytes(at: At) -> None:
    reader = Reader()
    subscription = await at.broker.subscribe(
        SubscribeRequest(1, reader, ["live/a"], LAST, credit_bytes=1)
    )
    subscription.start()
    subscription.pause()
    arrived = memoryview(bytearray(Batch.from_messages([Message("live/a", b"x")]).pack()))
    await at.broker.publish(Batch.unpack(arrived))
    arrived.release()  # would fail if a view of it were still held
    subscription.resume()
    await at.until(lambda: reader.payloads() == [b"x"])
