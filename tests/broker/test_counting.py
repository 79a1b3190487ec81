"""What a broker counts of its own work, and what it tells of slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from tests.broker.scenes import EARLIEST, At, Reader, scene

SECOND_NS = 1_000_000_000


def totals(at: At) -> dict[str, int]:
    return at.broker.metrics.totals()


def events(reader: Reader, kind: str) -> list[dict[str, Any]]:
    found = [msgspec.json.decode(message.payload) for message in reader.messages]
    return [event for event in found if event["kind"] == kind]


@scene()
async def test_repeated_batch_is_counted(at: At) -> None:
    batch = Batch.from_messages([Message("a", b"1")], producer="shop", term=1, number=0)
    for expected in (0, 1, 2):
        published = await at.broker.publish(batch)
        await asyncio.sleep(0)
        assert published.is_repeated == (expected > 0)
        assert totals(at)["publishes_repeated"] == expected


@scene()
async def test_what_the_broker_says_itself_is_no_traffic(at: At) -> None:
    watcher, subscription = await at.subscribe("!system/*")
    await at.settle(subscription)
    for _ in range(3):
        at.clock.advance(SECOND_NS)
        await at.settle(subscription)
    assert len(watcher.messages) >= 3 * 5
    counted = {name: totals(at)[name] for name in ("messages_in", "batches_in", "bytes_in")}
    assert counted == {"messages_in": 0, "batches_in": 0, "bytes_in": 0}
    await at.publish("a", b"1", b"2")
    assert (totals(at)["messages_in"], totals(at)["commands_in"]) == (2, 2)
    assert totals(at)["batches_in"] == 1


@scene(patterns=("a", "a*"))
async def test_slow_reader_is_reported_and_reported_again_when_it_has_caught_up(at: At) -> None:
    watcher, watching = await at.subscribe("!system/events")
    _, slow = await at.subscribe(at.pattern, credit_bytes=1)
    for number in range(10):
        await at.publish("a", b"%d" % number)
    await at.settle(watching)
    (told,) = events(watcher, "slow_reader")
    assert (told["subject"], told["patterns"]) == ("a test 1", [at.pattern])
    assert totals(at)["slow_readers"] == 1
    assert not events(watcher, "reader_caught_up")
    slow.grant(2**30)
    await at.settle(slow)
    await at.settle(watching)
    (told,) = events(watcher, "reader_caught_up")
    assert told["subject"] == "a test 1"


@scene(patterns=("a", "a*"))
async def test_whoever_begins_with_the_past_is_not_told_of(at: At) -> None:
    watcher, watching = await at.subscribe("!system/events")
    for number in range(10):
        await at.publish("a", b"%d" % number)
    reader, subscription = await at.subscribe(at.pattern, start=EARLIEST)
    await at.settle(subscription)
    await at.settle(watching)
    assert len(reader.messages) == 10
    assert not events(watcher, "slow_reader")
    assert not events(watcher, "reader_caught_up")


@scene(patterns=("a", "a*"))
async def test_cutting_runs_out_of_a_compressed_batch_makes_nobody_a_slow_reader(at: At) -> None:
    watcher, watching = await at.subscribe("!system/events")
    reader, subscription = await at.subscribe(at.pattern)
    mixed = [Message(topic, b"z" * 500) for topic in ("a", "b")]
    for _ in range(5):
        await at.broker.publish(Batch.from_messages(mixed, codec=Codec.ZSTD))
        await at.settle(subscription)
    await at.settle(watching)
    assert len(reader.messages) == 5
    assert totals(at)["slow_readers"] == 0
    assert not events(watcher, "slow_reader")
    assert not events(watcher, "reader_caught_up")


@scene()
async def test_delivery_time_is_counted_once_a_batch_that_somebody_was_sent_at_once(at: At) -> None:
    def observed() -> int:
        return at.broker.metrics.delivery_time.total().count

    await at.publish("a", b"nobody reads it")
    assert observed() == 0
    _, one = await at.subscribe("a")
    _, other = await at.subscribe("?", credit_bytes=1)
    for _ in range(3):
        await at.publish("a", b"1", b"2")
    assert observed() == 3
    one.close()
    await at.publish("a", b"read from the log, later")
    assert observed() == 3
    other.grant(2**30)
    await at.settle(other)
    assert observed() == 3
