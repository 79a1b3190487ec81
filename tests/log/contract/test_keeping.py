"""Retention, holds and their ceilings, purging, deleting, last values."""

from __future__ import annotations

import pytest

from runnel.config import LogSettings, Pin, Retain, Rotate, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import OffsetGoneError, UnknownTopicError
from runnel.log.log import CursorPosition, OffsetBounds, Position, ShardId
from tests.log.contract.stores import LOG, At, scenario
from tests.log.samples import (
    batch,
    last_message,
    one,
    read_offsets,
    read_payloads,
    read_topics,
    trim_log,
)

MAIN = ShardId("main")
HOUR_NS = DAY_NS // 24
EVERY_BATCH = Rotate(bytes_max=1, every_ns=HOUR_NS)  # on disk a segment of its own for each


def rule(
    *, retain: Retain, pin: Pin | None = None, match: str = "*", last_value: bool = False
) -> TopicRule:
    return TopicRule(
        match=match,
        journal="main",
        rotate=EVERY_BATCH,
        retain=retain,
        pin=pin or Pin(),
        last_value=last_value,
    )


BY_AGE = rule(retain=Retain(age_ns=DAY_NS))
BY_AGE_WITH_LAST = rule(retain=Retain(age_ns=DAY_NS), last_value=True)
PINNED_FOR_A_WEEK = rule(retain=Retain(age_ns=DAY_NS), pin=Pin(age_ns=7 * DAY_NS, bytes_max=None))


async def append_hourly(at: At, topic: str, count: int) -> None:
    for number in range(count):
        await at.log.append(one(topic, b"%d" % (number + 1)))
        at.clock.advance(HOUR_NS)


# --- By age ---


@scenario(BY_AGE)
async def test_message_past_its_age_is_not_served_even_before_retention_looks(at: At) -> None:
    await append_hourly(at, "a", 4)
    at.clock.advance(DAY_NS - 3 * HOUR_NS)  # the first is a day and an hour old
    assert await at.log.bounds("a", 0) == OffsetBounds(2, 5)
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read("a", 0, 1)
    assert (raised.value.first_offset, raised.value.gap) == (2, 1)
    assert read_offsets(await at.log.read("a", 0, 2)) == [2, 3, 4]
    assert [m.offset for m in await at.read_shard_all(MAIN, Position(0, 1))] == [2, 3, 4]
    at.clock.advance(DAY_NS)
    assert await at.log.bounds("a", 0) == OffsetBounds(5, 5)
    assert not (await at.log.read("a", 0, 5)).found
    assert await last_message(at.log, "a", 0) is None


@scenario(BY_AGE)
async def test_retention_by_age_removes_what_has_passed_it(at: At) -> None:
    await append_hourly(at, "a", 6)
    at.clock.advance(DAY_NS - 4 * HOUR_NS)  # the first two are over a day old
    trimmed = await trim_log(at.log)
    assert trimmed.segments_removed == 2
    assert trimmed.bytes_removed > 0
    assert list(trimmed.holds_passed) == []
    assert at.log.shard(MAIN).entries() == OffsetBounds(3, 7)
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read_shard(MAIN, Position(0, 1))
    assert raised.value.gap == 2
    assert (await trim_log(at.log)).segments_removed == 0


@scenario(BY_AGE)
async def test_everything_may_go_and_numbers_go_on(at: At) -> None:
    await append_hourly(at, "a", 3)
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert at.log.statistics().shards[0].stored_bytes == 0
    assert await at.log.bounds("a", 0) == OffsetBounds(4, 4)
    assert at.log.shard(MAIN).entries() == OffsetBounds(4, 4)
    done = await at.log.append(one("a", b"new"))
    assert (done.base_offsets, done.entry) == ([4], 4)
    assert read_payloads(await at.log.read("a", 0, 4)) == [b"new"]
    assert [m.payload for m in await at.read_shard_all(MAIN, Position(0, 4))] == [b"new"]


@scenario(BY_AGE)
async def test_reader_that_waits_at_the_end_misses_nothing_when_all_before_it_goes(at: At) -> None:
    await append_hourly(at, "a", 3)
    assert [read_offsets(page) for page in await at.read_all("a", 1)] == [[1], [2], [3]]
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert not (await at.log.read("a", 0, 4)).found
    await at.log.append(one("a", b"4"))
    assert read_payloads(await at.log.read("a", 0, 4)) == [b"4"]


# --- By size ---


@scenario(rule(retain=Retain(bytes_max=10_000)))
async def test_retention_by_bytes_removes_the_oldest(at: At) -> None:
    for number in range(20):
        await at.log.append(one("a", b"%02d" % number * 500))
    trimmed = await trim_log(at.log)
    statistics = at.log.statistics().shards[0]
    assert statistics.stored_bytes <= 10_000
    bounds = await at.log.bounds("a", 0)
    assert bounds.next_offset == 21
    assert bounds.first_offset == 1 + trimmed.segments_removed
    assert 5 <= bounds.next_offset - bounds.first_offset <= 9
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read("a", 0, 1)
    assert raised.value.gap == trimmed.segments_removed
    assert read_offsets(await at.log.read("a", 0, bounds.first_offset)) == list(
        range(bounds.first_offset, 21)
    )


@scenario(rule(retain=Retain()))
async def test_without_retention_nothing_goes(at: At) -> None:
    await append_hourly(at, "a", 5)
    at.clock.advance(1000 * DAY_NS)
    assert (await trim_log(at.log)).segments_removed == 0
    assert read_offsets(await at.log.read("a", 0, 1)) == [1, 2, 3, 4, 5]


# --- Pins ---


@scenario(PINNED_FOR_A_WEEK)
async def test_what_a_cursor_has_not_passed_is_kept_and_served_whatever_its_age(at: At) -> None:
    await append_hourly(at, "a", 5)
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=3)])
    at.clock.advance(2 * DAY_NS)
    assert await at.log.bounds("a", 0) == OffsetBounds(3, 6)
    trimmed = await trim_log(at.log)
    assert trimmed.segments_removed == 2
    assert list(trimmed.holds_passed) == []
    assert read_offsets(await at.log.read("a", 0, 3)) == [3, 4, 5]
    assert [m.offset for m in await at.read_shard_all(MAIN, Position(0, 3))] == [3, 4, 5]


@scenario(PINNED_FOR_A_WEEK)
async def test_cursor_holds_its_own_topic_alone(at: At) -> None:
    for number in range(4):
        await at.log.append(one("ab"[number % 2], b"%d" % number))
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=1)])
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 3)
    assert await at.log.bounds("b", 0) == OffsetBounds(3, 3)
    assert [m.topic for m in await at.read_shard_all(MAIN, Position(0, 1))] == ["a", "a"]


@scenario(PINNED_FOR_A_WEEK)
async def test_cursor_that_moves_on_lets_go_and_a_removed_one_of_everything(at: At) -> None:
    await append_hourly(at, "a", 5)
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=1)])
    at.clock.advance(2 * DAY_NS)
    assert (await trim_log(at.log)).segments_removed == 0
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=4)])
    assert (await trim_log(at.log)).segments_removed == 3
    await at.log.metadata.remove_cursor("reader")
    assert await at.log.bounds("a", 0) == OffsetBounds(6, 6)
    assert (await trim_log(at.log)).segments_removed == 2


@scenario(PINNED_FOR_A_WEEK)
async def test_cursor_over_patterns_holds_matching_topics_from_its_position_on(at: At) -> None:
    for name in ("x/1", "y/1", "x/2", "y/2", "x/1"):
        await at.log.append(one(name, b"m"))
    await at.log.metadata.set_cursor(
        "reader", [CursorPosition(shard=MAIN, position=Position(0, 2), patterns=("x/*",))]
    )
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert [m.topic for m in await at.read_shard_all(MAIN, Position(0, 3))] == ["x/2", "x/1"]
    assert await at.log.bounds("x/1", 0) == OffsetBounds(2, 3)
    assert await at.log.bounds("y/2", 0) == OffsetBounds(2, 2)


@scenario(PINNED_FOR_A_WEEK)
async def test_hold_is_passed_at_its_ceiling_of_age_and_that_is_reported(at: At) -> None:
    await append_hourly(at, "a", 3)
    await at.log.metadata.set_cursor("slow", [CursorPosition(topic="a", offset=1)])
    await at.log.metadata.set_cursor("quick", [CursorPosition(topic="a", offset=4)])
    at.clock.advance(8 * DAY_NS)
    assert await at.log.bounds("a", 0) == OffsetBounds(4, 4)
    trimmed = await trim_log(at.log)
    assert trimmed.segments_removed == 3
    assert list(trimmed.holds_passed) == ["slow"]
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read("a", 0, 1)
    assert raised.value.gap == 3


@scenario(rule(retain=Retain(bytes_max=5_000), pin=Pin(bytes_max=10_000)))
async def test_hold_is_passed_at_its_ceiling_of_bytes_and_that_is_reported(at: At) -> None:
    await at.log.metadata.set_cursor("slow", [CursorPosition(topic="a", offset=1)])
    for number in range(6):
        await at.log.append(one("a", b"%d" % number * 1000))
    assert list((await trim_log(at.log)).holds_passed) == []
    assert at.log.statistics().shards[0].stored_bytes > 5_000
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 7)
    for number in range(8):
        await at.log.append(one("a", b"%d" % number * 1000))
    trimmed = await trim_log(at.log)
    assert list(trimmed.holds_passed) == ["slow"]
    assert 5_000 < at.log.statistics().shards[0].stored_bytes <= 10_000
    assert (await at.log.bounds("a", 0)).first_offset == 1 + trimmed.segments_removed


# --- Last values ---


@scenario(BY_AGE_WITH_LAST)
async def test_last_value_is_kept_beyond_retention(at: At) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
    at.clock.advance(2 * DAY_NS)
    await at.log.append(one("c", b"4"))
    for _ in range(2):  # expired, then removed
        assert await at.log.bounds("a", 0) == OffsetBounds(3, 3)
        last = await last_message(at.log, "a", 0)
        assert last is not None
        [message] = last.messages()
        assert (message.topic, message.offset, message.payload) == ("a", 2, b"2")
        await trim_log(at.log)
    assert at.log.shard(MAIN).entries().first_offset == 2
    await at.log.append(one("a", b"5"))
    last = await last_message(at.log, "a", 0)
    assert last is not None
    assert last.messages()[0].payload == b"5"


@scenario(BY_AGE)
async def test_without_last_value_the_last_message_goes_too(at: At) -> None:
    await at.log.append(one("a", b"1"))
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert await last_message(at.log, "a", 0) is None


@scenario(
    BY_AGE_WITH_LAST,
    log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, last_value_bytes_max=500),
)
async def test_last_value_that_is_too_large_goes_and_no_older_one_stands_in_for_it(at: At) -> None:
    await at.log.append(one("a", b"small"))
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    last = await last_message(at.log, "a", 0)
    assert last is not None
    assert last.messages()[0].payload == b"small"
    await at.log.append(one("a", b"large" * 200))
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert await last_message(at.log, "a", 0) is None


@scenario(rule(retain=Retain(age_ns=DAY_NS), pin=Pin(age_ns=None, bytes_max=None), last_value=True))
async def test_last_value_is_kept_when_others_hold_the_batch_it_came_in(at: At) -> None:
    await at.log.append(batch(("a", [b"1"] * 10), ("held", [b"2"])))
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="held", offset=1)])
    at.clock.advance(2 * DAY_NS)
    for _ in range(3):
        await trim_log(at.log)
        last = await last_message(at.log, "a", 0)
        assert last is not None
        assert last.messages()[0].offset == 10
        assert await at.log.bounds("held", 0) == OffsetBounds(1, 2)


@scenario(BY_AGE_WITH_LAST)
async def test_purging_takes_the_last_value_too(at: At) -> None:
    await at.log.append(one("a", b"1"))
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    assert await last_message(at.log, "a", 0) is not None
    await at.log.metadata.purge_topic("a")
    assert await last_message(at.log, "a", 0) is None


# --- Purging and deleting ---


@scenario(rule(retain=Retain()))
async def test_purged_messages_are_hidden_at_once_and_numbers_go_on(at: At) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
    await at.log.append(one("a", b"4"))
    await at.log.metadata.purge_topic("a")
    assert await at.log.bounds("a", 0) == OffsetBounds(4, 4)
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read("a", 0, 1)
    assert raised.value.gap == 3
    assert [m.topic for m in await at.read_shard_all(MAIN, Position(0, 1))] == ["b"]
    assert (await at.log.append(one("a", b"5"))).base_offsets == [4]
    assert read_payloads(await at.log.read("a", 0, 4)) == [b"5"]
    assert read_payloads(await at.log.read("b", 0, 1)) == [b"3"]


@scenario(rule(retain=Retain()))
async def test_room_of_purged_messages_is_freed_and_the_others_keep_their_places(at: At) -> None:
    for number in range(4):
        await at.log.append(batch(("a", [b"x" * 1000]), ("b", [b"%d" % number])))
    await at.log.append(one("c", b"end"))
    before = at.log.statistics().shards[0].stored_bytes
    await at.log.metadata.purge_topic("a")
    trimmed = await trim_log(at.log)
    assert trimmed.segments_rewritten == 4
    assert at.log.statistics().shards[0].stored_bytes < before - 4000
    for entry in range(1, 5):
        page = await at.log.read_shard(MAIN, Position(0, entry), bytes_max=1)
        assert read_payloads(page)[0] == b"%d" % (entry - 1)
        [run, *_] = page.found[0].wanted().runs()
        assert (run.topic, run.entry, run.row) == ("b", entry, 1)
    assert read_offsets(await at.log.read("b", 0, 1)) == [1, 2, 3, 4]
    assert (await trim_log(at.log)).segments_rewritten == 0


@scenario(rule(retain=Retain()))
async def test_reader_passes_holes_that_purging_left(at: At) -> None:
    await at.log.append(one("keep", b"1"))
    await at.log.append(one("gone", b"2"))
    await at.log.append(one("keep", b"3"))
    await at.log.append(one("end", b"4"))
    await at.log.metadata.purge_topic("gone")
    await trim_log(at.log)
    position, seen = Position(0, 1), []
    while position.entry < 5:
        page = await at.log.read_shard(MAIN, position, bytes_max=1)
        seen += read_topics(page)
        assert page.next_position > position
        position = page.next_position
    assert seen == ["keep", "keep", "end"]


@scenario()
async def test_deleted_topic_is_unknown_and_goes_on_from_its_offsets_when_made_again(
    at: At,
) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
    await at.log.metadata.delete_topic("a")
    assert at.log.metadata.topics.names() == ["b"]
    with pytest.raises(UnknownTopicError):
        at.log.metadata.topics.get("a")
    with pytest.raises(UnknownTopicError):
        await at.log.read("a", 0, 1)
    with pytest.raises(UnknownTopicError):
        await at.log.metadata.delete_topic("a")
    assert [m.topic for m in await at.read_shard_all(MAIN, Position(0, 1))] == ["b"]
    assert (await at.log.append(one("a", b"4"))).base_offsets == [3]
    assert await at.log.bounds("a", 0) == OffsetBounds(3, 4)
    assert read_payloads(await at.log.read("a", 0, 3)) == [b"4"]
    assert [m.payload for m in await at.read_shard_all(MAIN, Position(0, 1))] == [b"3", b"4"]
    with pytest.raises(OffsetGoneError):
        await at.log.read("a", 0, 2)


@scenario(log=LOG)
async def test_purging_or_deleting_nothing_is_an_error(at: At) -> None:
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        await at.log.metadata.purge_topic("nowhere")
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        await at.log.metadata.delete_topic("nowhere")
