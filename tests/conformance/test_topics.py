"""Topics: list, describe, delete, purge and create them again."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import Keep, Retain, Settings, TopicRule
from runnel.errors import InvalidNameError, OffsetGoneError, UnknownTopicError
from tests.conformance.listeners import Ability
from tests.conformance.stage import LOG, Stage, nothing_more, take_payloads, verb

LIVE = TopicRule(match="live/*", keep=Keep.NONE)
STATE = TopicRule(match="state/*", keep=Keep.NONE, last_value=True)
MEMORY = TopicRule(match="m/*", keep=Keep.MEMORY)
SPREAD = TopicRule(
    match="p/*", partitions=3, journal="spread", retain=Retain(age_ns=7 * 86_400 * 10**9)
)


async def names(stage: Stage, pattern: str = "*") -> list[str]:
    return [topic.name for topic in await stage.bus.topics(pattern)]


@verb(MEMORY, STATE)
async def test_topics_are_listed_by_name_whoever_keeps_them(stage: Stage) -> None:
    assert await names(stage) == []
    for topic in ("b", "m/a", "a", "state/a", "ä", "a/1"):
        await stage.publish(topic, b"x")
    assert await names(stage) == ["a", "a/1", "b", "m/a", "state/a", "ä"]
    assert await names(stage, "a*") == ["a", "a/1"]
    assert await names(stage, "?") == ["a", "b", "ä"]
    assert await names(stage, "*/[ab]") == ["m/a", "state/a"]
    assert await names(stage, "none of them") == []


@verb()
async def test_long_lists_come_in_several_pages(stage: Stage) -> None:
    async with stage.bus.publisher() as publisher:
        for number in range(1200):
            publisher.send(b"x", f"t/{number:04}")
    assert await names(stage) == [f"t/{number:04}" for number in range(1200)]
    assert await names(stage, "t/?199") == ["t/0199", "t/1199"]


@verb()
async def test_system_topics_are_listed_only_by_patterns_that_begin_with_their_mark(
    stage: Stage,
) -> None:
    await stage.publish("a", b"x")  # the broker publishes an event about it
    assert await names(stage) == ["a"]
    assert "!system/events" in await names(stage, "!*")


@verb(SPREAD)
async def test_description_has_policy_and_partitions(stage: Stage) -> None:
    for number in range(5):
        await stage.bus.publish("p/a", b"x", partition=number % 2)
    async with stage.bus.subscribe("p/*"):
        state = await stage.bus.topic("p/a")
    assert (state.name, state.keep, state.journal) == ("p/a", "disk", "spread")
    assert (state.partition_count, state.messages, state.subscribers) == (3, 5, 1)
    assert (state.rule, state.last_value, state.retain) == ("p/*", False, "7d")
    bounds = [(each.first_offset, each.next_offset) for each in state.partitions]
    assert bounds == [(1, 4), (1, 3), (1, 1)]
    assert {each.owner.journal for each in state.partitions} == {"spread"}
    [listed] = await stage.bus.topics("p/a")
    assert (listed.messages, listed.partitions) == (5, [])


@verb(LIVE)
async def test_unknown_topic_cannot_be_described_deleted_or_purged(stage: Stage) -> None:
    for topic in ("nowhere", "live/nobody"):
        for act in (stage.bus.topic, stage.bus.delete_topic, stage.bus.purge_topic):
            with pytest.raises(UnknownTopicError, match=topic):
                await act(topic)


@verb(MEMORY)
async def test_deleted_topic_is_gone_at_once_and_goes_on_when_made_again(stage: Stage) -> None:
    for topic in ("d", "m/a"):
        await stage.publish(topic, b"1", b"2")
        await stage.publish(f"{topic}/other", b"x")
        await stage.bus.delete_topic(topic)
        assert topic not in await names(stage)
        with pytest.raises(UnknownTopicError):
            await stage.bus.fetch(topic)
        assert (await stage.bus.publish(topic, b"3")).offset == 3
        assert await stage.payloads(topic) == [b"3"]
        assert await stage.payloads(f"{topic}/other") == [b"x"]
        with pytest.raises(OffsetGoneError) as error:
            await stage.bus.fetch(topic, 1)
        assert error.value.first_offset == 3


@verb(MEMORY)
async def test_purged_topic_stays_and_counts_on(stage: Stage) -> None:
    for topic in ("d", "m/a"):
        await stage.publish(topic, b"1", b"2")
        await stage.bus.purge_topic(topic)
        assert topic in await names(stage)
        assert await stage.payloads(topic) == []
        assert (await stage.bus.publish(topic, b"3")).offset == 3
        assert await stage.payloads(topic) == [b"3"]


@verb(needs=[Ability.RESTART])
async def test_deleting_and_purging_survive_a_restart(stage: Stage) -> None:
    for topic in ("deleted", "purged", "kept"):
        await stage.publish(topic, b"1", b"2")
    await stage.bus.delete_topic("deleted")
    await stage.bus.purge_topic("purged")
    await stage.restart()
    assert await names(stage) == ["kept", "purged"]
    assert await stage.payloads("purged") == []
    assert await stage.payloads("kept") == [b"1", b"2"]
    for topic in ("deleted", "purged"):
        assert (await stage.bus.publish(topic, b"3")).offset == 3


@verb()
async def test_subscription_goes_on_with_a_topic_that_was_deleted_and_made_again(
    stage: Stage,
) -> None:
    await stage.publish("a", b"1")
    async with (
        stage.bus.subscribe("a", start="earliest") as literal,
        stage.bus.subscribe("?", start="earliest") as glob,
    ):
        for subscription in (literal, glob):
            assert await take_payloads(subscription, 1) == [b"1"]
        await stage.bus.delete_topic("a")
        await stage.publish("a", b"2")
        for subscription in (literal, glob):
            assert await take_payloads(subscription, 1) == [b"2"]
            await nothing_more(stage, subscription)


@verb()
async def test_reader_that_begins_after_a_purge_sees_what_came_since(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    await stage.bus.purge_topic("a")
    async with (
        stage.bus.subscribe("a", start="earliest") as literal,
        stage.bus.subscribe("?", start="earliest") as glob,
        stage.bus.subscribe("a", start="last") as last,
    ):
        await stage.publish("a", b"3")
        for subscription in (literal, glob, last):
            assert await take_payloads(subscription, 1) == [b"3"]


@verb(STATE)
async def test_last_value_of_a_topic_that_is_not_kept_goes_with_purge_and_deletion(
    stage: Stage,
) -> None:
    for topic, act in (
        ("state/p", stage.bus.purge_topic),
        ("state/d", stage.bus.delete_topic),
    ):
        await stage.publish(topic, b"1")
        await act(topic)
        async with stage.bus.subscribe(topic, start="last") as subscription:
            await nothing_more(stage, subscription)


@verb(TopicRule(match="*", journal="main", partitions=2), needs=[Ability.RESTART])
async def test_partitions_and_journal_stay_as_they_were_made(stage: Stage) -> None:
    await stage.bus.publish("old", b"x", partition=1)
    await stage.restart(TopicRule(match="*", journal="elsewhere", partitions=5, last_value=True))
    await stage.bus.publish("new", b"x", partition=4)
    old, new = await stage.bus.topic("old"), await stage.bus.topic("new")
    assert (old.partition_count, old.journal, old.last_value) == (2, "main", True)
    assert (new.partition_count, new.journal) == (5, "elsewhere")


@verb(settings=Settings(log=LOG))
async def test_topics_may_have_any_name_that_is_allowed(stage: Stage) -> None:
    allowed = [
        "/",
        "..",
        "a/../b",
        "C:\\x",
        "é",
        "e\u0301",
        " ",
        "a b",
        "x" * 255,
        "{topic}",
        "%2F",
    ]
    await asyncio.gather(*(stage.bus.publish(name, name.encode()) for name in allowed))
    for name in allowed:
        assert await stage.payloads(name) == [name.encode()]
    assert sorted(allowed) == await names(stage)
    for name in ("", "a\nb", "x" * 256, "é" * 128, "\x85", "\u2028"):
        with pytest.raises(InvalidNameError):
            await stage.bus.publish(name, b"x")
