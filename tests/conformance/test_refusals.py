"""Bad input of every kind is refused with an error that says what was wrong, and the connection stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from runnel.client.connection import Deadline, LoopTimers
from runnel.client.consumer import StartAt
from runnel.config import Keep, LimitSettings, Settings, TopicRule
from runnel.errors import (
    ClientFault,
    ClosedError,
    InvalidNameError,
    LimitExceededError,
    MalformedError,
    RunnelError,
    UnknownTopicError,
)
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, RouteList, Routes
from tests.conformance.listeners import Ability
from tests.conformance.stage import LOG, PATIENT, Stage, verb

TIGHT = Settings(
    log=LOG,
    native=PATIENT,
    limits=LimitSettings(
        message_bytes_max=1000,
        batch_bytes_max=5000,
        tags_max=3,
        tag_bytes_max=100,
        topics_max=4,
        cursors_max=2,
        cursor_places_max=5,
    ),
    topics=(
        TopicRule(match="live/*", keep=Keep.NONE),
        TopicRule(match="m/*", keep=Keep.MEMORY),
    ),
)
ANSWER_TIMEOUT_S = 2.0
SPREAD = TopicRule(match="p/*", partitions=3)


async def refused(stage: Stage, kind: type[RunnelError], text: str, act: Awaitable[object]) -> None:
    """The broker refuses it at once, with this text and as not retriable, and the connection still works."""
    with pytest.raises(kind, match=text) as error:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await act
    assert not error.value.retriable
    await stage.bus.ping()


async def subscribing(stage: Stage, *patterns: str, start: StartAt = "latest", **more: Any) -> None:
    await stage.bus.subscribe(*patterns, start=start, **more).open()


@verb()
async def test_names_that_are_not_allowed(stage: Stage) -> None:
    name = InvalidNameError
    await refused(stage, name, "topic.* is empty", stage.bus.publish("", b"x"))
    await refused(stage, name, r"U\+000A at character 2", stage.bus.publish("a\nb", b"x"))
    await refused(stage, name, "longer than 255 bytes", stage.bus.publish("é" * 128, b""))
    await refused(stage, name, "topic", stage.bus.fetch("a\0"))
    await refused(stage, name, "empty", stage.bus.topic(""))
    await refused(stage, name, "pattern", stage.bus.topics("[a"))
    await refused(stage, name, "pattern", subscribing(stage, "a["))
    await refused(stage, name, "empty", subscribing(stage, "a", ""))
    assert await stage.bus.topics() == []


@verb()
async def test_publishing_to_a_pattern_is_refused(stage: Stage) -> None:
    for topic in ("a/*", "a?", "a[b"):
        await refused(
            stage, InvalidNameError, "limits.allow_wildcard_names", stage.bus.publish(topic, b"x")
        )
    assert await stage.bus.topics() == []


@verb(needs=[Ability.BATCHES])
async def test_batch_with_a_pattern_among_its_topics_is_refused(stage: Stage) -> None:
    batch = Batch.from_messages([Message("a", b"x"), Message("b/*", b"y")])
    text = r"topic 'b/\*'.*limits.allow_wildcard_names"
    await refused(stage, InvalidNameError, text, stage.bus.publish_batch(batch))
    assert await stage.bus.topics() == []


@verb(
    settings=Settings(log=LOG, native=PATIENT, limits=LimitSettings(allow_wildcard_names=True)),
    needs=[Ability.RESTART],
)
async def test_topics_with_wildcards_in_their_names_stay_readable(stage: Stage) -> None:
    await stage.publish("a/*", b"x")
    stage.settings = msgspec.structs.replace(stage.settings, limits=LimitSettings())
    await stage.restart()
    assert await stage.payloads("a/*") == [b"x"]
    async with stage.bus.subscribe("a/[*]", start="earliest") as subscription:
        assert (await anext(subscription)).payload == b"x"
    await refused(
        stage, InvalidNameError, "limits.allow_wildcard_names", stage.bus.publish("a/*", b"y")
    )


@verb(needs=[Ability.NAMED])
async def test_names_of_publishers_that_are_not_allowed(stage: Stage) -> None:
    opening = stage.bus.publisher("a", name="\t").open()
    await refused(stage, InvalidNameError, "producer", opening)


@verb()
async def test_values_of_the_wrong_kind(stage: Stage) -> None:
    fault = ClientFault
    await refused(stage, fault, "payload", stage.bus.publish("a", "text"))  # type: ignore[arg-type]
    await refused(stage, fault, "key", stage.bus.publish("a", b"", key="k"))  # type: ignore[arg-type]
    await refused(
        stage,
        fault,
        "tag",
        stage.bus.publish("a", b"", tags={"n": 1}),  # type: ignore[dict-item]
    )
    await refused(stage, fault, "uid.*20", stage.bus.publish("a", b"", uid=b"short"))
    await refused(
        stage,
        fault,
        "level.* 'safe'.*stored",
        stage.bus.publish("a", b"", level="safe"),
    )
    assert await stage.bus.topics() == []


@verb(SPREAD)
async def test_partitions_that_are_not_there(stage: Stage) -> None:
    text = "partitions 0 to 2, not"
    publish = stage.bus.publish
    await refused(stage, UnknownTopicError, text, publish("p/a", b"", partition=3))
    await refused(stage, ClientFault, "partition", publish("p/a", b"", partition=-1))
    batch = Batch.from_messages([Message("p/a", b"x", partition=7)])
    await refused(stage, UnknownTopicError, text, stage.bus.publish_batch(batch))


@verb()
async def test_offsets_and_times_that_make_no_sense(stage: Stage) -> None:
    await stage.publish("a", b"1")
    fault = ClientFault
    await refused(stage, fault, "not (at )?both", stage.bus.fetch("a", 1, time=0))
    await refused(stage, fault, "offset", stage.bus.fetch("a", 0))


@verb(needs=[Ability.OFFSETS])
async def test_live_offsets_that_make_no_sense(stage: Stage) -> None:
    await stage.publish("a", b"1")
    fault = ClientFault
    await refused(stage, fault, "offset", subscribing(stage, "a", start=0))
    await refused(stage, fault, "offset", subscribing(stage, "a", start={"a": -1}))


@verb()
async def test_time_that_does_not_fit(stage: Stage) -> None:
    text = "event_time"
    await refused(stage, ClientFault, text, stage.bus.publish("a", b"", event_time_ns=2**63))


@verb()
async def test_numbers_below_zero(stage: Stage) -> None:
    await stage.publish("a", b"1")
    fetch = stage.bus.fetch
    await refused(stage, ClientFault, "offset", fetch("a", -1))
    await refused(stage, ClientFault, "partition", fetch("a", 1, partition=-1))
    await refused(stage, ClientFault, "messages_max|limit", fetch("a", 1, messages_max=-1))
    await refused(stage, ClientFault, "bytes", fetch("a", 1, bytes_max=-1))
    await refused(stage, ClientFault, "wait", fetch("a", 1, wait_s=-1))


@verb()
async def test_subscriptions_that_make_no_sense(stage: Stage) -> None:
    fault = ClientFault
    await refused(stage, fault, "at least one pattern|'pattern' is needed", subscribing(stage))
    text = "overflow.* 'wait'.* drop_oldest, newest"
    await refused(stage, fault, text, subscribing(stage, "a", overflow="wait"))
    with pytest.raises(fault, match="buffer_bytes"):
        stage.bus.subscribe("a", buffer_bytes=0)


@verb(needs=[Ability.NATIVE])
async def test_publishers_that_make_no_sense(stage: Stage) -> None:
    for options, text in (
        ({"batch_messages_max": 0}, "batch_messages_max is 0"),
        ({"linger_ms": -1}, "linger_ms"),
        ({"buffer_bytes_max": 0}, "buffer_bytes_max"),
        ({"batch_bytes_max": 2**23}, "the broker's largest batch is 4194304"),
        ({"compression": "rar"}, "rar"),
        ({"level": "safe"}, "level 'safe'"),
    ):
        with pytest.raises(ClientFault, match=text):
            stage.bus.publisher("a", **options)
    async with stage.bus.publisher() as publisher:
        with pytest.raises(ClientFault, match="no topic"):
            publisher.send(b"x")


@verb(settings=TIGHT)
async def test_limits_of_messages_and_batches(stage: Stage) -> None:
    limit = LimitExceededError
    await stage.bus.publish("a", bytes(1000), tags={"a": "", "b": "", "c": "x" * 97})
    for topic in ("a", "m/a", "live/a"):
        await refused(stage, limit, "1001.*1000", stage.bus.publish(topic, bytes(1001)))
        large = Batch.from_messages([Message(topic, bytes(1001))])
        await refused(stage, limit, "1001.*1000", stage.bus.publish_batch(large))
        tagged = dict.fromkeys("abcd", "")
        await refused(
            stage,
            limit,
            "4 tags; limits.tags_max = 3",
            stage.bus.publish(topic, b"", tags=tagged),
        )
        heavy = Batch.from_messages([Message(topic, b"", tags={"a": "x" * 100})])
        await refused(
            stage,
            limit,
            "101 bytes of tags; limits.tag_bytes_max = 100",
            stage.bus.publish_batch(heavy),
        )
    assert len(await stage.payloads("a")) == 1


@verb(settings=TIGHT, needs=[Ability.BATCHES])
async def test_limit_of_a_batch(stage: Stage) -> None:
    for topic in ("a", "m/a", "live/a"):
        many = Batch.from_messages([Message(topic, bytes(900))] * 6)
        await refused(stage, ClientFault, "5000", stage.bus.publish_batch(many))
    assert await stage.bus.topics() == []


@verb(settings=TIGHT)
async def test_limits_of_topics_and_cursors(stage: Stage) -> None:
    for topic in "abcd":
        await stage.publish(topic, b"x")
    limit = LimitExceededError
    await refused(stage, limit, r"limits\.topics_max = 4", stage.bus.publish("e", b"x"))
    for name in ("one", "two", "two"):
        await stage.bus.set_cursor(name, {"a": 1})
    await refused(stage, limit, r"limits\.cursors_max = 2", stage.bus.set_cursor("three", {"a": 1}))
    await stage.publish("a", b"still")


@verb(needs=[Ability.BATCHES])
async def test_batch_that_cannot_be_read_is_refused(stage: Stage) -> None:
    batch = Batch.from_messages([Message("a", b"x" * 100)])
    torn = Batch(batch.envelope, bytes(batch.body)[:-8])
    with pytest.raises((MalformedError, ClientFault)):
        await stage.bus.publish_batch(torn)
    await stage.bus.ping()


@verb()
async def test_closed_bus_refuses_everything(stage: Stage) -> None:
    bus = await stage.connect()
    await bus.close()
    await bus.close()
    for act in (bus.publish("a", b"x"), bus.fetch("a"), bus.topics(), bus.ping()):
        with pytest.raises(ClosedError, match="bus has been closed"):
            await act
    with pytest.raises(ClosedError):
        bus.subscribe("a")
    with pytest.raises(ClosedError):
        bus.publisher("a")


@verb()
async def test_nobody_publishes_where_the_system_does(stage: Stage) -> None:
    for topic in ("!system/metrics/broker", "!mine"):
        await refused(stage, ClientFault, "the system's", stage.bus.publish(topic, b"x"))


@verb(needs=[Ability.BATCHES])
async def test_nobody_puts_the_system_s_topics_into_a_batch(stage: Stage) -> None:
    for topic in ("!system/metrics/broker", "!mine"):
        batch = Batch.from_messages([Message("a", b"x"), Message(topic, b"x")])
        await refused(stage, ClientFault, "the system's", stage.bus.publish_batch(batch))


@verb()
async def test_pipelines_publish_figures_and_dead_letters_among_the_system_s_topics(
    stage: Stage,
) -> None:
    for topic in ("!system/stats", "!system/statsx", "!dead"):
        await refused(stage, ClientFault, "the system's", stage.bus.publish(topic, b"x"))
    await stage.bus.publish("!dead/orders", b"0")
    await stage.bus.publish("!system/stats/main/a", b"1")
    names = [f"!system/stats/main/{name}" for name in "ab"]
    for name in names:
        await stage.bus.publish_batch(Batch.from_messages([Message(name, b"2")]))
    async with stage.bus.subscribe("!system/stats/*", start="last") as watching:
        last = {(message := await anext(watching)).topic: message.payload for _ in names}
    assert last == dict.fromkeys(names, b"2")


@verb(settings=TIGHT)
async def test_cursor_with_too_many_places_or_patterns(stage: Stage) -> None:
    await stage.publish("a", b"x")

    def shard(*patterns: str, entry: int = 1) -> CursorPlace:
        return CursorPlace(journal="main", entry=entry, patterns=patterns)

    async def setting(*places: CursorPlace) -> None:
        await stage.bus.set_cursor("c", places)

    limit = LimitExceededError
    many = [shard(f"a{number}") for number in range(6)]
    await refused(stage, limit, r"6 positions; limits\.cursor_places_max allows 5", setting(*many))
    await setting(*many[:5])
    patterns = [f"{number}" for number in range(1025)]
    await refused(stage, limit, "1025 patterns of one position", setting(shard(*patterns)))
    await setting(shard(*patterns[:1024]))
    twice = (shard("b", "c"), shard("c", "b", entry=2))
    await refused(stage, ClientFault, r"main\[0\] is given twice", setting(*twice))
    twice = (CursorPlace("a", 0, 1), CursorPlace("a", 0, 2))
    await refused(stage, ClientFault, r"a\[0\] is given twice", setting(*twice))
    await refused(stage, InvalidNameError, "pattern", setting(shard("a"), shard("[")))


@verb(needs=[Ability.NATIVE])
async def test_routes_of_too_many_topics_at_once(stage: Stage) -> None:
    link = stage.bus._router.home
    for count in (10_000, 10_001):
        names = [f"t/{number}" for number in range(count)]
        asking = link.ask(
            RouteList,
            lambda number, names=names: Routes(number, names),  # type: ignore[misc]
            deadline=Deadline(LoopTimers(), ANSWER_TIMEOUT_S),
            what="asking",
        )
        if count == 10_000:
            answer, _ = await asking
            assert len(answer.routes) == count
        else:
            await refused(stage, LimitExceededError, "at most 10000 can be asked for", asking)
