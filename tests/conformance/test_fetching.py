"""Fetch: pages of one partition from an offset or a time on, and errors that name the first existing offset."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from runnel.config import Keep, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, until, verb

SPREAD = TopicRule(match="p/*", partitions=3)
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))
AGED = TopicRule(match="*", journal="main", retain=Retain(age_ns=60 * 10**9))
KEPT = (TopicRule(match="m/*", keep=Keep.MEMORY),)


@verb(SMALL)
async def test_pages_follow_each_other_without_gap_or_repeat(stage: Stage) -> None:
    for begin in range(0, 40, 4):
        await stage.bus.publish_batch(
            Batch.from_messages([Message("a", b"%d" % n) for n in range(begin, begin + 4)])
        )
    seen: list[bytes] = []
    offset = 1
    while offset < 41:
        page = await stage.bus.fetch("a", offset, messages_max=7)
        assert 1 <= len(page) <= 7
        assert (page.first_offset, page.end_offset) == (1, 41)
        assert [m.offset for m in page.messages] == list(range(offset, page.next_offset))
        seen += [message.payload for message in page.messages]
        offset = page.next_offset
    assert seen == [b"%d" % number for number in range(40)]


@verb()
async def test_fetch_without_an_offset_begins_with_the_first_message(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    page = await stage.bus.fetch("a")
    assert [message.payload for message in page.messages] == [b"1", b"2"]
    assert (page.next_offset, page.gaps) == (3, [])


@verb()
async def test_fetch_begins_inside_a_batch_exactly_at_the_offset(stage: Stage) -> None:
    await stage.bus.publish_batch(Batch.from_messages([Message("a", b"%d" % n) for n in range(9)]))
    page = await stage.bus.fetch("a", 5, messages_max=2)
    assert [message.offset for message in page.messages] == [5, 6]
    assert page.next_offset == 7


@verb()
async def test_bytes_max_bounds_a_page_but_for_its_first_batch(stage: Stage) -> None:
    for _ in range(10):
        await stage.bus.publish("a", bytes(1000))
    assert len(await stage.bus.fetch("a", 1, bytes_max=1)) == 1
    assert 1 < len(await stage.bus.fetch("a", 1, bytes_max=5000)) < 6


@verb()
async def test_at_the_end_there_is_an_empty_page(stage: Stage) -> None:
    await stage.publish("a", b"1")
    page = await stage.bus.fetch("a", 2)
    assert (page.messages, page.next_offset, page.end_offset) == ([], 2, 2)


@verb(SPREAD)
async def test_partitions_are_read_apart(stage: Stage) -> None:
    for number in range(6):
        await stage.bus.publish("p/a", b"%d" % number, partition=number % 3)
    for partition in range(3):
        page = await stage.bus.fetch("p/a", 1, partition=partition)
        assert [m.payload for m in page.messages] == [b"%d" % partition, b"%d" % (partition + 3)]
        assert {message.partition for message in page.messages} == {partition}


@verb(SPREAD)
async def test_topic_of_several_partitions_needs_one_named(stage: Stage) -> None:
    await stage.bus.publish("p/a", b"x", partition=0)
    with pytest.raises(ClientFault, match="3 partitions: name one of 0 to 2"):
        await stage.bus.fetch("p/a", 1)
    with pytest.raises(UnknownTopicError, match="3"):
        await stage.bus.fetch("p/a", 1, partition=3)


@verb()
async def test_time_finds_the_first_message_received_then_or_later(stage: Stage) -> None:
    for number in range(10):
        await stage.bus.publish("a", b"%d" % number)
        stage.advance(1)
    time_ns = stage.clock.time_ns() - 4_500_000_000
    by_ns = await stage.bus.fetch("a", time=time_ns)
    moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    by_datetime = await stage.bus.fetch("a", time=moment)
    for page in (by_ns, by_datetime):
        assert [message.payload for message in page.messages] == [b"6", b"7", b"8", b"9"]
    assert (await stage.bus.fetch("a", time=stage.clock.time_ns())).messages == []
    assert len(await stage.bus.fetch("a", time=0)) == 10


@verb()
async def test_fetch_waits_for_the_first_message(stage: Stage) -> None:
    await stage.publish("a", b"1")
    waiting = asyncio.ensure_future(stage.bus.fetch("a", 2, wait_s=20))
    await stage.bus.ping()
    assert not waiting.done()
    await stage.publish("b", b"something else")
    assert not waiting.done()
    await stage.publish("a", b"2")
    page = await waiting
    assert [message.payload for message in page.messages] == [b"2"]


@verb()
async def test_many_fetches_that_wait_hold_up_neither_each_other_nor_anything_else(
    stage: Stage,
) -> None:
    topics = [f"t/{number}" for number in range(30)]
    for topic in topics:
        await stage.publish(topic, b"0")
    waiting = [asyncio.ensure_future(stage.bus.fetch(topic, 2, wait_s=60)) for topic in topics]
    assert len(await stage.bus.fetch(topics[0], 1)) == 1
    for topic in reversed(topics):
        await stage.publish(topic, b"1")
    for page in await asyncio.gather(*waiting):
        assert [message.payload for message in page.messages] == [b"1"]


@verb()
async def test_one_fetch_brings_so_much_at_most(stage: Stage) -> None:
    await stage.publish("a", *(bytes(900_000) for _ in range(10)))
    page = await stage.bus.fetch("a", 1, bytes_max=2**62)
    assert 1 <= sum(len(message.payload) for message in page.messages) <= 2 * 4 * 2**20


@verb(needs=[Ability.ALONE])  # the gauge is that of the broker that is asked
async def test_fetch_that_waits_in_vain_gets_an_empty_page_by_the_clock(stage: Stage) -> None:
    await stage.publish("a", b"1")
    waiting = asyncio.ensure_future(stage.bus.fetch("a", 2, wait_s=20))
    await until(stage.bus.statistics, lambda told: told["gauges"]["fetches_waiting"] == 1)
    stage.advance(19)
    await stage.bus.ping()
    assert not waiting.done()
    stage.advance(2)
    assert (await waiting).next_offset == 2


@verb(AGED)
async def test_offset_that_retention_has_passed_is_reported_with_the_first_there_is(
    stage: Stage,
) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    stage.advance(50)
    await stage.publish("a", b"4")
    stage.advance(20)
    with pytest.raises(
        OffsetGoneError, match="begins at offset 4: 2 messages from offset 2 on"
    ) as e:
        await stage.bus.fetch("a", 2)
    gone = e.value
    assert (gone.topic, gone.partition, gone.offset, gone.first_offset) == ("a", 0, 2, 4)
    assert gone.gap == 2
    assert await stage.payloads("a") == [b"4"]
    assert [m.offset for m in (await stage.bus.fetch("a", time=0)).messages] == [4]


@verb(AGED)
async def test_fetch_without_an_offset_begins_with_the_first_there_is(stage: Stage) -> None:
    await stage.publish("a", b"1")
    stage.advance(70)
    await stage.publish("a", b"2")
    page = await stage.bus.fetch("a")
    assert [message.payload for message in page.messages] == [b"2"]


@verb()
async def test_offset_beyond_the_next_is_a_mistake_and_reported_with_the_next(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    with pytest.raises(OffsetAheadError, match=r"has not reached offset 9: the next .* be 3") as e:
        await stage.bus.fetch("a", 9)
    ahead = e.value
    assert (ahead.topic, ahead.partition, ahead.offset, ahead.next_offset) == ("a", 0, 9, 3)


@verb()
async def test_reading_does_not_make_a_topic(stage: Stage) -> None:
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        await stage.bus.fetch("nowhere")
    assert await stage.bus.topics() == []


@verb(TopicRule(match="live", keep=Keep.NONE))
async def test_topic_that_is_not_kept_cannot_be_fetched(stage: Stage) -> None:
    with pytest.raises(ClientFault, match=r"not kept.*subscribe"):
        await stage.bus.fetch("live")


@verb(*KEPT, needs=[Ability.RESTART])
async def test_what_is_on_disk_is_there_after_a_restart_and_what_is_in_memory_is_not(
    stage: Stage,
) -> None:
    await stage.publish("d", b"1", b"2")
    await stage.publish("m/a", b"1", b"2")
    await stage.restart()
    assert await stage.payloads("d") == [b"1", b"2"]
    assert (await stage.bus.publish("d", b"3")).offset == 3
    with pytest.raises(UnknownTopicError):
        await stage.bus.fetch("m/a")
    assert (await stage.bus.publish("m/a", b"1")).offset == 1


@verb()
async def test_several_clients_fetch_as_often_as_they_like(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    other = await stage.connect()
    pages = await asyncio.gather(*(bus.fetch("a") for bus in (stage.bus, other) * 5))
    assert all([m.payload for m in page.messages] == [b"1", b"2"] for page in pages)
