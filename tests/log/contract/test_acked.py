"""Retention until everything is acknowledged: what goes, message by message, and what stays."""

from __future__ import annotations

import pytest

from runnel.config import Pin, Retain, Rotate, TopicRule, Until
from runnel.config.settings import DAY_NS
from runnel.errors import OffsetGoneError
from runnel.log.log import CursorPosition, OffsetBounds, Position, ShardId, Trimmed
from tests.log.contract.stores import At, scenario
from tests.log.fake_holds import Acknowledged
from tests.log.samples import batch, last_message, one, read_offsets, read_payloads, trim_log

MAIN = ShardId("main")
A, B = ("a", 0), ("b", 0)
HOUR_NS = DAY_NS // 24


def rule(
    *,
    age_ns: int | None = None,
    until: Until | None = Until.ACKED,
    pin: Pin | None = None,
    last_value: bool = False,
) -> TopicRule:
    return TopicRule(
        match="*",
        journal="main",
        rotate=Rotate(bytes_max=1, every_ns=HOUR_NS),  # on disk a segment of its own for each batch
        retain=Retain(age_ns=age_ns, until=until),
        pin=pin or Pin(),
        last_value=last_value,
    )


UNTIL_ACKED = rule()
NOTHING = Trimmed(holds_passed=[])


async def trim(at: At) -> Trimmed:
    """An hour later: by then the last segment on disk has ended too."""
    at.clock.advance(HOUR_NS)
    return await trim_log(at.log)


async def offsets(at: At, topic: str = "a") -> list[int]:
    first = (await at.log.bounds(topic, 0)).first_offset
    return [offset for page in await at.read_all(topic, first) for offset in read_offsets(page)]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_message_goes_once_every_subscription_has_acknowledged_it(at: At) -> None:
    holds = at.subscribed(one=Acknowledged(A), two=Acknowledged(A))
    for number in range(3):
        await at.log.append(one("a", b"%d" % number))
    holds.ack("one", A, [1, 2, 3])
    assert await trim(at) == NOTHING
    holds.ack("two", A, [1, 2])
    trimmed = await trim(at)
    assert trimmed.segments_removed == 2
    assert trimmed.bytes_removed > 0
    assert await at.log.bounds("a", 0) == OffsetBounds(3, 4)
    with pytest.raises(OffsetGoneError):
        await at.log.read("a", 0, 2)
    holds.ack("two", A, [3])
    await trim(at)
    assert await at.log.bounds("a", 0) == OffsetBounds(4, 4)
    assert at.log.statistics().shards[0].stored_bytes == 0
    assert (await at.log.append(one("a", b"new"))).base_offsets == [4]
    assert await offsets(at) == [4]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_straggler_keeps_itself_alone(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(one("a", *[b"%02d" % number * 100 for number in range(1, 11)]))
    await at.log.append(one("a", b"next"))
    before = at.log.statistics().shards[0].stored_bytes
    holds.ack("work", A, [1, 2, 3, 4, 5, 6, 8, 9, 10])
    trimmed = await trim(at)
    assert (trimmed.segments_removed, trimmed.segments_rewritten) == (0, 1)
    assert at.log.statistics().shards[0].stored_bytes < before - 1500
    assert await at.log.bounds("a", 0) == OffsetBounds(7, 12)
    page = await at.log.read("a", 0, 7)
    assert read_offsets(page) == [7, 11]
    assert read_payloads(page) == [b"07" * 100, b"next"]
    [message, _] = await at.read_shard_all(MAIN, Position(0, 1))
    assert message.offset == 7
    assert await trim(at) == NOTHING
    holds.ack("work", A, [7])
    assert (await trim(at)).segments_removed == 1
    assert await offsets(at) == [11]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_several_stragglers_of_a_batch_keep_their_offsets_and_the_order(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A, B))
    await at.log.append(
        batch(("a", [b"1", b"2", b"3"]), ("b", [b"x", b"y"]), ("a", [b"4", b"5", b"6"]))
    )
    holds.ack("work", A, [1, 3, 4, 5])
    holds.ack("work", B, [1, 2])
    assert (await trim(at)).segments_rewritten == 1
    assert await offsets(at) == [2, 6]
    assert await offsets(at, "b") == []
    shown = [(m.payload, m.offset) for m in await at.read_shard_all(MAIN, Position(0, 1))]
    assert shown == [(b"2", 2), (b"6", 6)]
    assert await single(at, 6) == b"6"
    assert await single(at, 4) is None
    holds.ack("work", A, [2])
    await trim(at)
    assert await offsets(at) == [6]


async def single(at: At, offset: int) -> bytes | None:
    async for chosen in at.log.messages_at(MAIN, {A: offset}):
        for each in chosen:
            return each.taken().messages()[0].payload
    return None


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_what_is_mostly_owed_is_left_as_it_is(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(one("a", b"1", b"2", b"3", b"4", b"5"))
    holds.ack("work", A, [1, 5])
    assert await trim(at) == NOTHING
    assert await offsets(at) == [1, 2, 3, 4, 5]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_what_is_acknowledged_goes_from_the_middle_too(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    for number in range(1, 6):
        await at.log.append(one("a", b"%d" % number))
    holds.ack("work", A, [2, 3, 5])
    assert (await trim(at)).segments_removed == 3
    assert await offsets(at) == [1, 4]
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 6)
    assert [m.offset for m in await at.read_shard_all(MAIN, Position(0, 1))] == [1, 4]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_partition_that_no_subscription_covers_stays(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(batch(("a", [b"1"] * 5), ("b", [b"2"])))
    await at.log.append(one("b", b"3"))
    holds.ack("work", A, range(1, 6))
    await trim(at)
    assert await offsets(at) == []
    assert await offsets(at, "b") == [1, 2]
    holds.subscriptions.clear()
    holds.version += 1
    assert await trim(at) == NOTHING


@scenario(rule(age_ns=DAY_NS), knows_subscriptions=True)
async def test_what_no_subscription_covers_goes_by_the_other_limits(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(one("b", b"old"))
    await at.log.append(one("a", b"owed"))
    at.clock.advance(2 * DAY_NS)
    assert (await trim(at)).segments_removed == 1
    assert await offsets(at, "b") == []
    assert await offsets(at) == [1]
    holds.ack("work", A, [1])
    await trim(at)
    assert await offsets(at) == []


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_cursor_holds_what_it_has_not_passed_though_it_is_acknowledged(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A, B))
    await at.log.append(one("a", b"1", b"2", b"3", b"4"))
    await at.log.append(one("b", b"5"))
    await at.log.append(one("b", b"6"))
    holds.ack("work", A, range(1, 5))
    holds.ack("work", B, range(1, 3))
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=4)])
    await at.log.metadata.set_cursor(
        "watcher", [CursorPosition(shard=MAIN, position=Position(0, 3), patterns=("b",))]
    )
    await trim(at)
    assert await offsets(at) == [4]
    assert await offsets(at, "b") == [2]
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=5)])
    await at.log.metadata.remove_cursor("watcher")
    await trim(at)
    assert at.log.statistics().shards[0].stored_bytes == 0


@scenario(rule(last_value=True), knows_subscriptions=True)
async def test_last_value_is_kept_beyond_its_acknowledgement(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A, B))
    await at.log.append(batch(("a", [b"1", b"2", b"3"]), ("b", [b"4"])))
    holds.ack("work", A, [1, 2, 3])
    for _ in range(2):  # cut out of its batch, then gone with it
        await trim(at)
        last = await last_message(at.log, "a", 0)
        assert last is not None
        assert last.messages()[0].payload == b"3"
        assert await offsets(at) == []
        holds.ack("work", B, [1])
    last = await last_message(at.log, "b", 0)
    assert last is not None
    assert last.messages()[0].payload == b"4"


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_purged_messages_count_as_gone(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A, B))
    await at.log.append(batch(("a", [b"1", b"2", b"3"]), ("b", [b"4", b"5", b"6"])))
    holds.ack("work", B, [1, 3])
    await at.log.metadata.purge_topic("a")
    await trim(at)
    await trim(at)
    assert await offsets(at, "b") == [2]
    holds.ack("work", B, [2])
    await trim(at)
    assert at.log.statistics().shards[0].stored_bytes == 0


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_purge_of_what_is_left_of_a_batch_frees_all_of_it(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(one("a", *[b"%d" % number for number in range(10)]))
    holds.ack("work", A, [1, 2, 3, 5, 6, 7, 8])
    await trim(at)
    assert await offsets(at) == [4, 9, 10]
    await at.log.metadata.purge_topic("a")
    await trim(at)
    assert await at.log.bounds("a", 0) == OffsetBounds(11, 11)
    assert at.log.statistics().shards[0].stored_bytes == 0


@scenario(rule(until=None), knows_subscriptions=True)
async def test_without_the_policy_acknowledged_messages_stay(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    await at.log.append(one("a", b"1"))
    holds.ack("work", A, [1])
    assert await trim(at) == NOTHING
    assert await offsets(at) == [1]


@scenario(UNTIL_ACKED)
async def test_nothing_goes_while_nobody_tells_what_is_owed(at: At) -> None:
    await at.log.append(one("a", b"1"))
    assert await trim(at) == NOTHING
    assert await offsets(at) == [1]


@scenario(UNTIL_ACKED, knows_subscriptions=True)
async def test_nothing_is_looked_at_twice_without_a_reason(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    for number in range(3):
        await at.log.append(one("a", b"%d" % number))
    await trim(at)
    assert holds.questions > 0
    for reason in range(3):
        holds.questions = 0
        await trim(at)
        assert holds.questions == 0
        if reason == 0:
            holds.version += 1
        elif reason == 1:
            await at.log.metadata.set_cursor("reader", [])
        else:
            await at.log.append(one("a", b"new"))
        await trim(at)
        assert holds.questions > 0


# --- Against age and size a subscription holds messages as a cursor does ---


@scenario(rule(age_ns=DAY_NS, pin=Pin(age_ns=7 * DAY_NS)), knows_subscriptions=True)
async def test_owed_message_is_kept_and_served_beyond_its_age_up_to_the_ceiling(at: At) -> None:
    holds = at.subscribed(work=Acknowledged(A))
    for number in range(1, 4):
        await at.log.append(one("a", b"%d" % number))
    holds.ack("work", A, [1])
    at.clock.advance(2 * DAY_NS)
    assert await offsets(at) == [2, 3]
    trimmed = await trim(at)
    assert (trimmed.segments_removed, list(trimmed.holds_passed)) == (1, [])
    assert await offsets(at) == [2, 3]
    at.clock.advance(6 * DAY_NS)
    assert await offsets(at) == []
    trimmed = await trim(at)
    assert trimmed.segments_removed == 2
    assert list(trimmed.holds_passed) == ["subscription work"]


@scenario(
    rule(age_ns=DAY_NS, until=None, pin=Pin(age_ns=None, bytes_max=None)), knows_subscriptions=True
)
async def test_subscription_and_cursor_hold_each_their_own(at: At) -> None:
    at.subscribed(work=Acknowledged(A))
    await at.log.append(batch(("a", [b"1"]), ("b", [b"2"]), ("c", [b"3"] * 4)))
    await at.log.metadata.set_cursor("reader", [CursorPosition(topic="b", offset=1)])
    at.clock.advance(2 * DAY_NS)
    await trim(at)
    assert await offsets(at) == await offsets(at, "b") == [1]
    assert await offsets(at, "c") == []
