"""Topics, named cursors, waiting for room, and the end of a log."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import LimitSettings, LogSettings, TopicRule
from runnel.errors import (
    BusyError,
    ClosedError,
    InvalidNameError,
    LimitExceededError,
    UnknownTopicError,
)
from runnel.log.log import CursorPosition, Level, OffsetBounds, Position, ShardId
from tests.log.contract.stores import At, Store, scenario
from tests.log.samples import one, read_offsets, trim_log

MAIN = ShardId("main")


@scenario(TopicRule(match="p/*", partitions=3, journal="many"))
async def test_topic_is_made_by_publishing_or_on_request_with_its_policy(at: At) -> None:
    made = await at.log.metadata.ensure_topic("p/1")
    assert made == at.log.metadata.topics.get("p/1") == await at.log.metadata.ensure_topic("p/1")
    assert made.policy.partitions == 3
    assert made.shards == [ShardId("many")] * 3
    await at.log.append(one("q", b"x"))
    assert at.log.metadata.topics.get("q").shards == [MAIN]
    assert sorted(at.log.metadata.topics.names()) == ["p/1", "q"]


@scenario()
async def test_reading_makes_no_topic(at: At) -> None:
    with pytest.raises(UnknownTopicError):
        await at.log.read("a", 0, 1)
    with pytest.raises(UnknownTopicError):
        at.log.metadata.topics.get("a")
    assert at.log.metadata.topics.names() == []


@scenario()
async def test_bad_name_is_refused_on_request_too(at: At) -> None:
    with pytest.raises(InvalidNameError, match="control character"):
        await at.log.metadata.ensure_topic("a\0b")
    with pytest.raises(InvalidNameError, match="empty"):
        await at.log.metadata.ensure_topic("")
    assert at.log.metadata.topics.names() == []


@scenario()
async def test_names_that_differ_only_in_odd_characters_are_different_topics(at: At) -> None:
    names = ["a", "A", "a ", "%61", "ä", "a\u0308", "a/", "../a", "~", "名"]
    for number, name in enumerate(names):
        await at.log.append(one(name, *[b"x"] * (number + 1)))
    for number, name in enumerate(names):
        assert await at.log.bounds(name, 0) == OffsetBounds(1, number + 2)


# --- Cursors ---


@scenario()
async def test_cursor_is_what_it_was_last_set_to(at: At) -> None:
    await at.log.append(one("a", b"1", b"2", b"3"))
    assert at.log.metadata.cursors.all() == []
    await at.log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=2)])
    at.clock.advance(5)
    positions = [
        CursorPosition(topic="a", offset=3),
        CursorPosition(shard=MAIN, position=Position(1, 2, 3), patterns=("x/*", "y")),
    ]
    await at.log.metadata.set_cursor("c", positions)
    [cursor] = at.log.metadata.cursors.all()
    assert cursor.name == "c"
    assert list(cursor.positions) == positions
    assert cursor.updated_ns == at.clock.time_ns()
    await at.log.metadata.remove_cursor("c")
    assert at.log.metadata.cursors.all() == []
    await at.log.metadata.remove_cursor("c")  # once more does no harm


@scenario(limits=LimitSettings(cursors_max=2))
async def test_cursor_beyond_the_limit_is_refused_and_a_known_one_moves_on(at: At) -> None:
    await at.log.metadata.set_cursor("c", [])
    await at.log.metadata.set_cursor("d", [])
    with pytest.raises(LimitExceededError, match=r"'e' .* limits.cursors_max = 2"):
        await at.log.metadata.set_cursor("e", [])
    await at.log.metadata.set_cursor("d", [CursorPosition(topic="a", offset=1)])
    await at.log.metadata.remove_cursor("c")
    await at.log.metadata.set_cursor("e", [])
    assert sorted(cursor.name for cursor in at.log.metadata.cursors.all()) == ["d", "e"]


@scenario()
async def test_cursor_name_is_checked(at: At) -> None:
    with pytest.raises(InvalidNameError, match="cursor name"):
        await at.log.metadata.set_cursor("", [])


# --- Room ---


@scenario(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, write_queue_batches_max=4))
async def test_full_queue_refuses_until_there_is_room(at: At) -> None:
    """In memory nothing is queued: there is always room."""
    futures = [at.log.append(one("a", b"%d" % number)) for number in range(4)]
    if at.store is Store.MEMORY:
        assert at.log.append(one("a", b"4")).done()
    else:
        with pytest.raises(BusyError, match=r"4 batches of .* bytes wait") as raised:
            at.log.append(one("a", b"refused"))
        assert raised.value.retriable
        waits = [asyncio.ensure_future(at.log.wait_room(MAIN)) for _ in range(3)]
        waits[1].cancel()
        await asyncio.gather(waits[0], waits[2])
        await at.log.append(one("a", b"4"))
    await asyncio.gather(*futures)
    await at.log.wait_room(MAIN)
    assert read_offsets(await at.log.read("a", 0, 1)) == [1, 2, 3, 4, 5]


@scenario(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, write_queue_bytes_max=1))
async def test_queue_is_bounded_in_bytes_too(at: At) -> None:
    at.log.append(one("a", b"1"), Level.NONE)
    if at.store is not Store.MEMORY:
        with pytest.raises(BusyError):
            at.log.append(one("a", b"2"))
    await at.log.wait_room(MAIN)
    await at.log.append(one("a", b"2"))
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 3)


@scenario()
async def test_there_is_always_room_in_a_shard_that_does_not_exist_yet(at: At) -> None:
    await at.log.wait_room(ShardId("new"))


# --- The end ---


@scenario()
async def test_closed_log_answers_everything_with_that(at: At) -> None:
    await at.log.append(one("a", b"1"))
    await at.log.close()
    with pytest.raises(ClosedError):
        at.log.append(one("a", b"2"))
    for call in (
        at.log.read("a", 0, 1),
        at.log.read_shard(MAIN, Position(0, 1)),
        at.log.bounds("a", 0),
        at.log.trim_shard(MAIN),
        at.log.sync(),
        at.log.wait_room(MAIN),
        at.log.metadata.ensure_topic("b"),
        at.log.metadata.purge_topic("a"),
        at.log.metadata.delete_topic("a"),
        at.log.metadata.set_cursor("c", []),
        at.log.metadata.remove_cursor("c"),
    ):
        with pytest.raises(ClosedError):
            await call
    with pytest.raises(ClosedError):
        await anext(at.log.messages_at(MAIN, {("a", 0): 1}))
    await at.log.close()  # once more does no harm


@scenario()
async def test_closing_stores_what_is_queued(at: At) -> None:
    futures = [at.log.append(one("a", b"%d" % number)) for number in range(10)]
    await at.log.close()
    assert [future.result().base_offsets for future in futures] == [[n] for n in range(1, 11)]


@scenario()
async def test_many_callers_at_once_do_not_disturb_each_other(at: At) -> None:
    async def publish(name: str) -> None:
        for number in range(10):
            await at.log.append(one(name, b"%d" % number))

    async def read(name: str) -> None:
        offset = 1
        while offset < 11:
            page = await at.log.read(name, 0, offset, bytes_max=1)
            assert read_offsets(page) == list(range(offset, page.next_offset))
            offset = page.next_offset
            await asyncio.sleep(0)

    names = [f"t{number}" for number in range(5)]
    for name in names:
        await at.log.metadata.ensure_topic(name)
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(publish(name))
            group.create_task(read(name))
        group.create_task(trim_log(at.log))
        group.create_task(at.log.sync())
    assert at.log.shard(MAIN).entries() == OffsetBounds(1, 51)
