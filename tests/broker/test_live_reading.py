"""Live subscriptions of kept topics: where they begin, and that nothing is missed or repeated when they do."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import Keep, LogSettings, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, InvalidNameError, LimitExceededError, OffsetAheadError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.formats.wire import PartitionPlace, ShardPlace, Start
from tests.broker.scenes import EARLIEST, LAST, LATEST, PLENTY, At, scene

SPREAD = TopicRule(match="p/*", partitions=3, journal="p")
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))


@scene()
async def test_latest_begins_with_what_comes_next(at: At) -> None:
    await at.publish("a", b"1", b"2")
    reader, subscription = await at.subscribe("a")
    await at.publish("a", b"3")
    await at.settle(subscription)
    assert reader.payloads() == [b"3"]
    assert reader.offsets("a") == [3]


@scene(patterns=("a", "?"))
async def test_earliest_hands_over_from_stored_to_live(at: At) -> None:
    for number in range(50):
        await at.publish("a", b"%d" % number)
    reader, subscription = await at.subscribe(at.pattern, start=EARLIEST)
    publishing = [asyncio.ensure_future(at.publish("a", b"%d" % n)) for n in range(50, 150)]
    await asyncio.gather(*publishing)
    await at.settle(subscription)
    assert reader.offsets("a") == list(range(1, 151))
    assert reader.payloads() == [b"%d" % number for number in range(150)]


@scene()
async def test_last_gives_the_last_of_every_matching_topic_then_live(at: At) -> None:
    for topic in ("s/a", "s/b", "other"):
        await at.publish(topic, b"old", b"last of " + topic.encode())
    reader, subscription = await at.subscribe("s/*", start=LAST)
    await at.publish("s/a", b"new")
    await at.settle(subscription)
    assert sorted(reader.payloads()[:2]) == [b"last of s/a", b"last of s/b"]
    assert reader.payloads()[2:] == [b"new"]


@scene(patterns=("a", "a*"))
async def test_last_neither_misses_nor_repeats_what_comes_while_it_looks(at: At) -> None:
    await at.publish("a", b"1", b"2", b"3")
    reader, subscription = await at.subscribe(at.pattern, start=LAST, is_started=False)
    await at.publish("a", b"4")
    await at.publish("a", b"5", b"6")
    subscription.start()
    await at.publish("a", b"7")
    await at.settle(subscription)
    assert reader.offsets("a") == [3, 4, 5, 6, 7]


@scene()
async def test_start_at_an_offset_inside_a_batch(at: At) -> None:
    await at.publish("a", b"1", b"2", b"3")
    await at.publish("a", b"4")
    start = Start("offsets", [PartitionPlace("a", 0, 2)])
    reader, subscription = await at.subscribe("a", start=start)
    await at.publish("a", b"5")
    await at.settle(subscription)
    assert reader.offsets("a") == [2, 3, 4, 5]


@scene(SPREAD)
async def test_start_at_offsets_of_several_partitions(at: At) -> None:
    for partition in range(3):
        await at.publish("p/x", b"a", b"b", b"c", partition=partition)
    places = [PartitionPlace("p/x", 0, 2), PartitionPlace("p/x", 2, 4)]
    reader, subscription = await at.subscribe("p/x", start=Start("offsets", places))
    for partition in range(3):
        await at.publish("p/x", b"d", partition=partition)
    await at.settle(subscription)
    assert reader.offsets("p/x", 0) == [2, 3, 4]
    assert reader.offsets("p/x", 1) == [4]  # not named: from the latest on
    assert reader.offsets("p/x", 2) == [4]


@scene(patterns=("a", "[a]"))
async def test_start_at_a_time(at: At) -> None:
    for number in range(10):
        await at.publish("a", b"%d" % number)
        at.clock.advance(1_000_000_000)
    time_ns = at.clock.time_ns() - 4_000_000_000
    reader, subscription = await at.subscribe(at.pattern, start=Start("time", time_ns=time_ns))
    await at.publish("a", b"10")
    await at.settle(subscription)
    assert reader.payloads() == [b"6", b"7", b"8", b"9", b"10"]


@scene()
async def test_topic_made_later_is_read_from_its_first_message_whatever_the_start(at: At) -> None:
    await at.publish("a/1", b"before")
    latest, first = await at.subscribe("a/*", start=LATEST)
    last, second = await at.subscribe("a/2", start=LAST)
    await at.publish("a/2", b"x", b"y")
    for subscription in (first, second):
        await at.settle(subscription)
    assert latest.payloads() == [b"x", b"y"]
    assert last.payloads() == [b"x", b"y"]


@scene(SMALL)
async def test_history_of_several_topics_comes_in_the_order_in_which_it_was_stored(at: At) -> None:
    for number in range(30):
        await at.publish("abc"[number % 3], b"%d" % number)
    reader, subscription = await at.subscribe("*", start=EARLIEST)
    await at.settle(subscription)
    assert reader.payloads() == [b"%d" % number for number in range(30)]


@scene()
async def test_only_wanted_runs_of_a_shared_batch_are_delivered(at: At) -> None:
    mixed = [Message(topic, topic.encode()) for topic in ("a/1", "b/1", "a/2", "c", "a/1")]
    live, subscription = await at.subscribe("a/*")
    both, another = await at.subscribe("a/1", "c")
    await at.broker.publish(Batch.from_messages(mixed))
    stored, third = await at.subscribe("a/*", start=EARLIEST)
    for each in (subscription, another, third):
        await at.settle(each)
    assert live.payloads() == stored.payloads() == [b"a/1", b"a/2", b"a/1"]
    assert both.payloads() == [b"a/1", b"c", b"a/1"]
    assert live.offsets("a/1") == [1, 2]


@scene()
async def test_runs_are_cut_out_of_compressed_batches(at: At) -> None:
    mixed = [Message(topic, b"z" * 500) for topic in ("a", "b", "a", "c")]
    reader, subscription = await at.subscribe("a")
    await at.broker.publish(Batch.from_messages(mixed, codec=Codec.ZSTD))
    await at.publish("a", b"after")
    await at.settle(subscription)
    assert [len(payload) for payload in reader.payloads()] == [500, 500, 5]
    assert reader.offsets("a") == [1, 2, 3]


@scene(patterns=("a", "a*"))
async def test_slow_reader_of_a_kept_topic_falls_back_to_the_log_and_misses_nothing(at: At) -> None:
    slow, subscription = await at.subscribe(at.pattern, credit_bytes=1)
    quick, other = await at.subscribe("a")
    for number in range(200):
        await at.publish("a", b"%d" % number)
    await at.settle(other)
    assert quick.offsets("a") == list(range(1, 201))
    assert len(slow.messages) == 1  # what its credit allowed, and one more delivery
    assert subscription.is_behind
    assert subscription.lag > 0
    while len(slow.messages) < 200:
        subscription.grant(1000)
        await at.until(lambda: not subscription.has_room)
    subscription.grant(2**30)
    await at.settle(subscription)
    await at.publish("a", b"live again")
    await at.settle(subscription)
    assert slow.offsets("a") == list(range(1, 202))


@scene()
async def test_paused_transport_is_as_good_as_no_credit(at: At) -> None:
    reader, subscription = await at.subscribe("a")
    subscription.pause()
    for number in range(20):
        await at.publish("a", b"%d" % number)
    assert not reader.messages
    subscription.resume()
    await at.settle(subscription)
    assert reader.offsets("a") == list(range(1, 21))


@scene(TopicRule(match="a", rotate=Rotate(bytes_max=1), retain=Retain(age_ns=10**9)))
async def test_reader_that_retention_overtakes_is_told(at: At) -> None:
    reader, subscription = await at.subscribe("a", credit_bytes=0)
    for number in range(10):
        await at.publish("a", b"%d" % number)
    at.clock.advance(5 * 10**9)
    await at.publish("a", b"young")
    at.clock.advance(20 * 10**9)  # retention's next round is due
    at.clock.advance(0)
    for _ in range(200):
        await asyncio.sleep(0)
    await at.publish("a", b"younger")
    subscription.grant(2**30)
    await at.settle(subscription)
    assert reader.payloads() == [b"younger"]
    assert [(gap.reason, gap.missed, gap.topic) for gap in reader.gaps] == [("retention", 11, "a")]


@scene(
    TopicRule(match="a", rotate=Rotate(bytes_max=1), retain=Retain(age_ns=10**9)),
    log=LogSettings(allocate_bytes=4096, disk_reserve_bytes=0, index_cache_bytes_max=1),
    patterns=("a", "a*"),
)
async def test_reader_that_left_while_it_was_read_for_is_told_nothing(at: At) -> None:
    for turns in range(20):
        reader, subscription = await at.subscribe(at.pattern, credit_bytes=0)
        for payload in (b"1", b"2", b"3"):
            await at.publish("a", payload)
        at.clock.advance(5 * 10**9)
        subscription.grant(PLENTY)
        for _ in range(turns):
            await asyncio.sleep(0)
        subscription.close()
        told = (len(reader.gaps), len(reader.deliveries))
        for _ in range(50):
            await asyncio.sleep(0)
        assert (len(reader.gaps), len(reader.deliveries)) == told


@scene()
async def test_nothing_is_delivered_after_close(at: At) -> None:
    reader, subscription = await at.subscribe("a")
    await at.publish("a", b"1")
    await at.settle(subscription)
    subscription.close()
    await at.publish("a", b"2")
    assert reader.payloads() == [b"1"]
    assert at.broker.statistics()["gauges"]["subscriptions"] == 0  # type: ignore[index]


@scene()
async def test_resume_goes_on_where_deliveries_ended(at: At) -> None:
    await at.publish("a", b"1")
    glob, first = await at.subscribe("*", start=EARLIEST)
    literal, second = await at.subscribe("a", start=EARLIEST)
    await at.publish("a", b"2")
    for each in (first, second):
        await at.settle(each)
        each.close()
    await at.publish("a", b"3")
    await at.publish("b", b"4")
    last = glob.deliveries[-1]
    at_shard = ShardPlace(last.shard.journal, 0, last.epoch, last.next_entry)
    again, third = await at.subscribe("*", start=Start("resume", shards=[at_shard]))
    epoch = literal.deliveries[-1].epoch
    place = PartitionPlace("a", 0, 3, epoch)
    once_more, fourth = await at.subscribe("a", start=Start("resume", [place]))
    for each in (third, fourth):
        await at.settle(each)
    assert again.payloads() == [b"3", b"4"]
    assert once_more.payloads() == [b"3"]


@scene(TopicRule(match="m", keep=Keep.MEMORY))
async def test_resume_in_a_memory_topic_of_an_older_epoch_begins_anew(at: At) -> None:
    await at.publish("m", b"1", b"2")
    start = Start("resume", [PartitionPlace("m", 0, 9, 17)])
    reader, subscription = await at.subscribe("m", start=start)
    await at.settle(subscription)
    assert reader.offsets("m") == [1, 2]


@scene()
async def test_system_topics_are_seen_only_by_patterns_that_begin_with_the_mark(at: At) -> None:
    everything, _ = await at.subscribe("*")
    system, _ = await at.subscribe("!system/metrics/*", start=LAST)
    await asyncio.sleep(0)  # the reporter has begun
    at.clock.advance(10**9)
    await at.until(lambda: len(system.messages) >= 5)
    assert not everything.messages
    assert {message.topic for message in system.messages} >= {"!system/metrics/broker"}


@scene()
async def test_wrong_starts_and_patterns_are_refused(at: At) -> None:
    await at.publish("a", b"1")
    for patterns, start, kind in (
        ((), LATEST, ClientFault),
        (("a[",), LATEST, InvalidNameError),
        (("a",), Start("yesterday"), ClientFault),
        (("a*",), Start("offsets", [PartitionPlace("a", 0, 1)]), ClientFault),
        (("a",), Start("offsets"), ClientFault),
        (("a",), Start("offsets", [PartitionPlace("a", 0, 0)]), ClientFault),
        (("a",), Start("offsets", [PartitionPlace("a", 0, 9)]), OffsetAheadError),
        (tuple(f"t{n}" for n in range(2000)), LATEST, LimitExceededError),
    ):
        with pytest.raises(kind):
            await at.subscribe(*patterns, start=start)
    with pytest.raises(ClientFault, match="overflow"):
        await at.subscribe("a", overflow="explode")
