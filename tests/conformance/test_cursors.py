"""Named cursors: positions that outlive their readers, and hold back retention of messages after them."""

from __future__ import annotations

import json

import pytest

from runnel.client import Bus
from runnel.config import Keep, Pin, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, InvalidNameError, OffsetGoneError, UnknownTopicError
from runnel.formats.wire import CursorPlace
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, verb

AGED = TopicRule(
    match="*",
    journal="main",
    rotate=Rotate(bytes_max=1),
    retain=Retain(age_ns=60 * 10**9),
    pin=Pin(age_ns=3600 * 10**9),
)
SPREAD = TopicRule(match="p/*", partitions=3)
LIVE = TopicRule(match="live/*", keep=Keep.NONE)
MEMORY = TopicRule(match="m/*", keep=Keep.MEMORY)


async def places(bus: Bus, name: str) -> list[tuple[str | None, int, int, int]]:
    """Topic, partition, offset and lag of a cursor."""
    cursor = await bus.cursor(name)
    assert cursor is not None
    return [(each.topic, each.partition, each.offset, each.lag) for each in cursor.places]


@verb(SPREAD)
async def test_cursor_is_stored_and_listed_with_its_lag(stage: Stage) -> None:
    for partition in (0, 0, 0, 1):
        await stage.bus.publish("p/a", b"x", partition=partition)
    await stage.publish("b", b"1", b"2")
    await stage.bus.set_cursor("reader", {("p/a", 0): 2, ("p/a", 1): 2, "b": 1})
    assert sorted(await places(stage.bus, "reader"), key=str) == [
        ("b", 0, 1, 2),
        ("p/a", 0, 2, 2),
        ("p/a", 1, 2, 0),
    ]
    await stage.publish("b", b"3")
    assert ("b", 0, 1, 3) in await places(stage.bus, "reader")
    [listed] = await stage.bus.cursors()
    assert (listed.name, listed.updated_ns) == ("reader", stage.clock.time_ns())


@verb()
async def test_cursor_moves_and_is_removed(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    await stage.bus.set_cursor("c", {"a": 1})
    await stage.bus.set_cursor("c", {"a": 4})
    assert await places(stage.bus, "c") == [("a", 0, 4, 0)]
    await stage.bus.set_cursor("b", {"a": 2})
    assert [cursor.name for cursor in await stage.bus.cursors()] == ["b", "c"]
    await stage.bus.remove_cursor("c")
    assert await stage.bus.cursor("c") is None
    assert [cursor.name for cursor in await stage.bus.cursors()] == ["b"]
    with pytest.raises(UnknownTopicError, match="cursor 'c' does not exist"):
        await stage.bus.remove_cursor("c")


@verb()
async def test_cursor_over_patterns_stands_in_a_shard(stage: Stage) -> None:
    for number in range(4):
        await stage.publish(f"s/{number}", b"x")
    place = CursorPlace(journal="main", entry=2, patterns=("s/*",))
    await stage.bus.set_cursor("c", [place])
    cursor = await stage.bus.cursor("c")
    assert cursor is not None
    [found] = cursor.places
    assert (found.topic, found.journal, found.shard, found.entry) == (None, "main", 0, 2)
    assert (list(found.patterns), found.lag) == (["s/*"], 3)


@verb(AGED)
async def test_cursor_holds_retention_back_until_it_is_moved_or_removed(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    await stage.publish("b", b"1")
    await stage.bus.set_cursor("c", {"a": 2})
    stage.advance(120)
    await stage.publish("a", b"4")
    assert await stage.payloads("a") == [b"2", b"3", b"4"]
    assert await stage.payloads("b") == []  # a cursor holds only its own topics
    await stage.bus.set_cursor("c", {"a": 3})
    assert await stage.payloads("a") == [b"3", b"4"]
    await stage.bus.remove_cursor("c")
    assert await stage.payloads("a") == [b"4"]


@verb(AGED)
async def test_cursor_over_patterns_holds_what_they_match(stage: Stage) -> None:
    await stage.publish("s/a", b"1")
    await stage.publish("other", b"1")
    await stage.bus.set_cursor("c", [CursorPlace(journal="main", entry=1, patterns=("s/*",))])
    stage.advance(120)
    assert await stage.payloads("s/a") == [b"1"]
    assert await stage.payloads("other") == []


@verb(AGED)
async def test_pin_has_a_ceiling_whose_passing_is_reported_loudly(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    await stage.bus.set_cursor("slow", {"a": 2})
    async with stage.bus.subscribe("!system/events") as events:
        stage.advance(2 * 3600)
        async for message in events:
            if message.tags.get("kind") == "pin_passed":
                break
        told = json.loads(message.payload)
    assert told["subject"] == "slow"
    assert told["messages_lost"] == 2
    with pytest.raises(OffsetGoneError) as error:
        await stage.bus.fetch("a", 2)
    assert error.value.first_offset == 4


@verb(AGED, needs=[Ability.RESTART])
async def test_cursor_survives_a_restart_and_still_holds(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    await stage.bus.set_cursor("c", {"a": 2})
    await stage.restart()
    assert await places(stage.bus, "c") == [("a", 0, 2, 1)]
    stage.advance(120)
    assert await stage.payloads("a") == [b"2"]


@verb(AGED)
async def test_cursor_of_a_deleted_topic_has_no_lag(stage: Stage) -> None:
    await stage.publish("a", b"1")
    await stage.bus.set_cursor("c", {"a": 1})
    await stage.bus.delete_topic("a")
    assert [lag for *_, lag in await places(stage.bus, "c")] in ([], [0])


@verb(LIVE, MEMORY)
async def test_cursor_that_makes_no_sense_is_refused_and_says_why(stage: Stage) -> None:
    await stage.publish("a", b"1")
    await stage.publish("m/a", b"1")
    set_cursor = stage.bus.set_cursor
    with pytest.raises(UnknownTopicError, match="nowhere"):
        await set_cursor("c", {"nowhere": 1})
    with pytest.raises(ClientFault, match="not kept"):
        await set_cursor("c", {"live/a": 1})
    with pytest.raises(ClientFault, match=r"offset 3 of a\[0\] is not between 1 and 2"):
        await set_cursor("c", {"a": 3})
    with pytest.raises(ClientFault, match=r"offset 0 of a\[0\]"):
        await set_cursor("c", {"a": 0})
    with pytest.raises(UnknownTopicError, match="partition"):
        await set_cursor("c", {("a", 1): 1})
    with pytest.raises(ClientFault, match=r"at least one position|\$.places"):
        await set_cursor("c", {})
    with pytest.raises(ClientFault, match="disk or in memory, not in both"):
        await set_cursor("c", {"a": 1, "m/a": 1})
    with pytest.raises(ClientFault, match="either a topic"):
        await set_cursor("c", [CursorPlace()])
    with pytest.raises(UnknownTopicError, match="no shard nowhere/0"):
        await set_cursor("c", [CursorPlace(journal="nowhere", entry=1, patterns=("*",))])
    with pytest.raises(InvalidNameError, match="name"):
        await set_cursor("c\n", {"a": 1})
    assert await stage.bus.cursors() == []
