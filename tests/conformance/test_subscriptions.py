"""Acknowledged subscriptions: make, list, pause, move and delete them, and their errors."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from runnel.config import Keep, LimitSettings, Settings, TopicRule
from runnel.errors import (
    ClientFault,
    InvalidNameError,
    LateAckError,
    LimitExceededError,
    SubscriptionDiffersError,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats.work_heads import MemberState
from tests.conformance.listeners import Ability
from tests.conformance.stage import (
    LOG,
    NS_PER_SECOND,
    PATIENT,
    Stage,
    nothing_more,
    take_work,
    until,
    verb,
)

LIVE = TopicRule(match="live/*", keep=Keep.NONE)
SPREAD = TopicRule(match="p/*", partitions=3)
FEW = Settings(log=LOG, native=PATIENT, limits=LimitSettings(durable_subscriptions_max=2))


async def members(stage: Stage, name: str = "s") -> list[MemberState]:
    return list((await stage.bus.subscription(name)).members)


async def backlog(stage: Stage, name: str = "s") -> int:
    return sum(member.backlog for member in await members(stage, name))


@verb(
    needs=[Ability.ALONE]
)  # while its shard moves, "latest" is a moment, and here the clock stands still
async def test_subscription_is_made_listed_described_and_deleted(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    await stage.bus.make_subscription("s", "a", "b/*", mode="key_shared", lease_s=10)
    await stage.bus.make_subscription("r", "a", start="latest")
    first, second = await stage.bus.subscriptions()
    assert (first.name, first.mode, first.members[0].backlog) == ("r", "shared", 0)
    assert (second.name, second.mode, list(second.patterns)) == ("s", "key_shared", ["a", "b/*"])
    assert (second.options.lease_ms, second.options.deliveries_max) == (10_000, 8)
    assert (second.made_ns, list(second.partitions)) == (stage.clock.time_ns(), [])
    described = await stage.bus.subscription("s")
    (place,) = described.partitions
    assert (place.topic, place.floor, place.next_offset) == ("a", 1, 3)
    await stage.bus.delete_subscription("s")
    assert [each.name for each in await stage.bus.subscriptions()] == ["r"]


@verb()
async def test_backlog_and_what_is_in_flight_are_reported(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    async with stage.bus.consume("s", "a", window_messages=2) as consumer:
        works = await take_work(consumer, 2)
        (member,) = await members(stage)
        assert (member.consumers, member.backlog, member.in_flight) == (1, 3, 2)
        assert member.oldest_ns == works[0].receive_time_ns
        await consumer.ack(*works, stored=True)
        (member,) = await members(stage)
        assert (member.backlog, member.oldest_ns > 0) == (1, True)


@verb()
async def test_the_same_again_is_no_error_and_anything_else_is(stage: Stage) -> None:
    await stage.bus.make_subscription("s", "a", "b")
    await stage.bus.make_subscription("s", "b", "a", deliveries_max=3)
    assert (await stage.bus.subscription("s")).options.deliveries_max == 3
    with pytest.raises(SubscriptionDiffersError, match="'s' is shared, not multicast"):
        await stage.bus.make_subscription("s", "a", "b", mode="multicast")
    with pytest.raises(SubscriptionDiffersError, match="is over a b, not over a"):
        await stage.bus.consume("s", "a").open()
    with pytest.raises(ClientFault, match="only a multicast has members"):
        await stage.bus.consume("s", member="m").open()
    async with stage.bus.consume("s", mode="shared") as consumer:
        assert consumer.mode == "shared"


@verb(
    SPREAD, needs=[Ability.ALONE]
)  # while its shard moves, "latest" is a moment, and here the clock stands still
async def test_it_begins_where_it_was_told_to(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    stage.advance(10)
    since = datetime.fromtimestamp(stage.clock.time_ns() / NS_PER_SECOND, UTC)
    await stage.publish("a", b"3")
    await stage.bus.publish("p/a", b"x", partition=1)
    for name, start, owed in (
        ("earliest", "earliest", 3),
        ("latest", "latest", 0),
        ("time", since, 1),
        ("offset", 2, 2),
        ("map", {"a": 3}, 1),
    ):
        await stage.bus.make_subscription(name, "a", start=start)  # type: ignore[arg-type]
        assert await backlog(stage, name) == owed, name
    await stage.bus.make_subscription("several", "*", start={("p/a", 1): 2, "a": 1})
    assert await backlog(stage, "several") == 3


@verb()
async def test_paused_subscription_delivers_nothing_until_it_is_resumed(stage: Stage) -> None:
    async with stage.bus.consume("s", "a") as consumer:
        await stage.bus.pause_subscription("s")
        await stage.publish("a", b"1")
        await nothing_more(stage, consumer)
        assert (await stage.bus.subscription("s")).is_paused
        await stage.bus.resume_subscription("s")
        assert (await anext(consumer)).payload == b"1"


@verb()
async def test_moved_subscription_goes_on_elsewhere_and_what_was_leased_is_late(
    stage: Stage,
) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    async with stage.bus.consume("s", "a") as consumer:
        works = await take_work(consumer, 3)
        await consumer.ack(works[0], stored=True)
        await stage.bus.move_subscription("s", "earliest")
        again = await take_work(consumer, 3)
        assert [(work.offset, work.failures) for work in again] == [(1, 0), (2, 0), (3, 0)]
        with pytest.raises(LateAckError):
            await works[2].ack(stored=True)
        await stage.bus.move_subscription("s", {"a": 3})
        assert (await anext(consumer)).offset == 3
        await stage.bus.move_subscription("s", "latest")
        assert await backlog(stage) == 0
        await nothing_more(stage, consumer)


@verb()
async def test_deleted_subscription_ends_its_consumers_and_begins_anew_if_made_again(
    stage: Stage,
) -> None:
    await stage.publish("a", b"1")
    async with stage.bus.consume("s", "a") as consumer:
        await (await anext(consumer)).ack(stored=True)
        await stage.bus.delete_subscription("s")
        with pytest.raises(UnknownSubscriptionError, match=r"'s' (was deleted|does not exist)"):
            await anext(consumer)
    async with stage.bus.consume("s", "a") as consumer:
        assert (await anext(consumer)).payload == b"1"


@verb(needs=[Ability.TOLD])
async def test_members_are_removed_or_forgotten_when_they_are_absent_for_long(
    stage: Stage,
) -> None:
    for member in ("x", "y"):
        async with stage.bus.consume(
            "s", "a", mode="multicast", member=member, absent_max_s=60
        ) as consumer:
            assert consumer.mode == "multicast"
    await stage.publish("a", b"1", b"2")
    await stage.bus.move_subscription("s", {"a": 2}, member="y")
    assert {each.name: each.backlog for each in await members(stage)} == {"x": 2, "y": 1}
    async with stage.bus.consume("s", member="x") as x:
        await take_work(x, 2)
        await stage.bus.remove_member("s", "x")
        with pytest.raises(UnknownSubscriptionError, match="member 'x' of subscription 's'"):
            await anext(x)
    assert [each.name for each in await members(stage)] == ["y"]

    async def look_later() -> list[MemberState]:
        stage.advance(10)
        return await members(stage)

    await until(look_later, lambda left: not left)


@verb(needs=[Ability.RESTART])
async def test_subscriptions_survive_a_restart(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    await stage.bus.make_subscription("kept", "a", mode="key_shared", deliveries_max=3)
    await stage.bus.make_subscription("paused", "a", start={"a": 2})
    await stage.bus.pause_subscription("paused")
    await stage.bus.make_subscription("deleted", "a")
    await stage.bus.delete_subscription("deleted")
    before = await stage.bus.subscriptions()
    await stage.restart()
    assert await stage.bus.subscriptions() == before
    assert (await backlog(stage, "kept"), await backlog(stage, "paused")) == (2, 1)
    assert [each.is_paused for each in before] == [False, True]


@verb()
async def test_unknown_subscriptions_and_members_cannot_be_dealt_with(stage: Stage) -> None:
    bus = stage.bus
    for act in (bus.subscription, bus.delete_subscription, bus.pause_subscription):
        with pytest.raises(UnknownSubscriptionError, match="'nobody'"):
            await act("nobody")
    with pytest.raises(UnknownSubscriptionError, match="'nobody'"):
        await bus.move_subscription("nobody", "latest")
    with pytest.raises(UnknownSubscriptionError, match=r"name its topics|'nobody' does not exist"):
        await bus.consume("nobody").open()
    await bus.make_subscription("s", "a")
    with pytest.raises(UnknownSubscriptionError, match="no member 'm'"):
        await bus.remove_member("s", "m")
    assert [each.name for each in await bus.subscriptions()] == ["s"]


@verb(LIVE, needs=[Ability.ALONE])
async def test_start_beyond_the_end_is_refused(stage: Stage) -> None:
    """By the owner of the shard: with several nodes, one that is made elsewhere begins at the end."""
    await stage.publish("a", b"1")
    with pytest.raises(ClientFault, match=r"offset 5 of a\[0\] is not between 1 and 2"):
        await stage.bus.make_subscription("s", "a", start={"a": 5})


@verb(LIVE)
async def test_subscription_that_makes_no_sense_is_refused_and_says_why(stage: Stage) -> None:
    make = stage.bus.make_subscription
    await stage.publish("a", b"1")
    with pytest.raises(ClientFault, match="'live/a' is not kept"):
        await make("s", "live/a")
    with pytest.raises(ClientFault, match="key_shared, multicast"):
        await make("s", "a", mode="queue")
    with pytest.raises(ClientFault, match=r"at least one pattern|0 patterns; 1 to|\$.patterns"):
        await make("s")
    with pytest.raises(InvalidNameError, match="name"):
        await make("s\n", "a")
    with pytest.raises(ClientFault, match="are the system's"):
        await make("!s", "a")
    with pytest.raises(ClientFault, match="its dead-letter topic"):
        await make("s" * 255, "a")
    with pytest.raises(ClientFault, match="too short"):
        await make("s", "a", lease_s=0.01)
    with pytest.raises(UnknownTopicError, match=r"b\[0\] is no partition"):
        await make("s", "a", start={"b": 1})
    with pytest.raises(ClientFault, match="one of earliest, latest"):
        await make("s", "a", start="last")
    with pytest.raises(ClientFault, match="window_messages is 0"):
        stage.bus.consume("s", "a", window_messages=0)
    assert await stage.bus.subscriptions() == []


@verb(settings=FEW)
async def test_no_more_subscriptions_than_allowed(stage: Stage) -> None:
    await stage.bus.make_subscription("1", "a")
    await stage.bus.make_subscription("2", "a")
    with pytest.raises(LimitExceededError, match="durable_subscriptions_max"):
        await stage.bus.make_subscription("3", "a")
    await stage.bus.delete_subscription("1")
    await stage.bus.make_subscription("3", "a")
