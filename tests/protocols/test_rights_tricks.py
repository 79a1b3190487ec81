"""Ways around a right, tried at every listener: wider patterns, other spellings, other people's places and names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runnel.client import Bus
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.config import TopicRule
from runnel.errors import ClientFault, ForbiddenError
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from tests.protocols.guarded import EVERYTHING, LISTENERS, Guarded, run_guarded
from tests.protocols.test_rights import set_the_scene

ALL_OF_OPEN = tuple(f"{right}:open/*" for right in ("publish", "read", "consume", "admin"))
ALL_BUT_SYSTEM = tuple(f"{right}:*" for right in ("publish", "read", "consume", "admin"))

Trick = Callable[[Guarded, Bus], Awaitable[None]]


def at_every_listener(*allow: str) -> Callable[[Trick], Callable[[str], None]]:
    """Makes a test of a coroutine that takes a client with these rights; the scene is that of the matrix."""

    def decorate(trick: Trick) -> Callable[[str], None]:
        @pytest.mark.parametrize("listener", LISTENERS)
        def test(listener: str) -> None:
            async def scenario(guarded: Guarded) -> None:
                await set_the_scene(await guarded.client("native", *EVERYTHING))
                await trick(guarded, await guarded.client(listener, *allow))

            run_guarded(scenario, listener)

        test.__name__ = trick.__name__
        test.__doc__ = trick.__doc__
        return test

    return decorate


async def refused(asking: Awaitable[object]) -> None:
    with pytest.raises(ForbiddenError, match="has no right to"):
        await asking


async def subscribing(bus: Bus, *patterns: str) -> None:
    async with bus.subscribe(*patterns):
        pass


# --- Patterns and names ---


@at_every_listener("read:open/*")
async def test_pattern_that_matches_more_than_the_right_is_refused(
    guarded: Guarded, bus: Bus
) -> None:
    for pattern in ("*", "**", "o*", "open*", "?pen/*", "[no]pen/*", "[a-z]pen/a", "*/a", "open?a"):
        await refused(subscribing(bus, pattern))
    for pattern in ("closed/*", "closed/a", "!*", "!system/*", "!dead/mine", "Open/*", "open"):
        await refused(subscribing(bus, pattern))
    for pattern in ("open/*", "[o]pen/*", "open/a", "open/", "open/?", "open/[ab]", "open/*/*"):
        await subscribing(bus, pattern)


@at_every_listener("read:open/*")
async def test_one_forbidden_pattern_among_others_refuses_all(guarded: Guarded, bus: Bus) -> None:
    await refused(subscribing(bus, "open/*", "closed/*"))
    await refused(subscribing(bus, "open/a", "open/b", "closed/a"))
    await refused(subscribing(bus, "open/a", "!system/events"))


@at_every_listener("read:open/?", "read:open/[a-c]x", "read:exact")
async def test_rights_with_wildcards_of_their_own_cover_no_more_than_they_say(
    guarded: Guarded, bus: Bus
) -> None:
    for pattern in ("open/*", "open/??", "open/[b-d]x", "open/?x", "exact*", "exac?"):
        await refused(subscribing(bus, pattern))
    for pattern in ("open/a", "open/[xyz]", "open/ax", "open/[ab]x", "exact"):
        await subscribing(bus, pattern)


@at_every_listener("publish:open/*", "read:open/*")
async def test_name_that_looks_like_an_allowed_one_is_another(guarded: Guarded, bus: Bus) -> None:
    for topic in (
        "Open/a",
        "OPEN/a",
        "open",
        "\N{CYRILLIC SMALL LETTER O}pen/a",
        "open\N{FULLWIDTH SOLIDUS}a",
        "open\N{DIVISION SLASH}a",
        "open%2Fa",
        "open%252Fa",
        " open/a",
        "./open/a",
        "/open/a",
        "closed/../open/a",
        "closed/%2e%2e/open/a",
        "%6fpen/a",
        "open\\a",
    ):
        await refused(bus.publish(topic, b"x"))
        await refused(bus.fetch(topic))


@at_every_listener("publish:open/*", "read:open/*")
async def test_steps_up_are_part_of_a_name_and_lead_nowhere(guarded: Guarded, bus: Bus) -> None:
    root = await guarded.client("native", *EVERYTHING)
    before = (await root.fetch("closed/a")).end_offset
    for topic in ("open/../closed/a", "open/%2e%2e/closed/a", "open/..%2Fclosed%2Fa", "open//a"):
        receipt = await bus.publish(topic, b"x")
        assert (receipt.topic, receipt.offset) == (topic, 1)
        assert [message.topic for message in (await bus.fetch(topic)).messages] == [topic]
        assert (await root.topic(topic)).messages == 1
    assert (await root.fetch("closed/a")).end_offset == before


@at_every_listener(*ALL_BUT_SYSTEM)
async def test_right_to_everything_is_none_to_the_system_s_topics(
    guarded: Guarded, bus: Bus
) -> None:
    await refused(bus.publish("!dead/mine", b"x"))
    await refused(bus.publish("!system/stats/a", b"x"))
    await refused(bus.fetch("!dead/mine"))
    await refused(bus.topic("!system/events"))
    await refused(bus.purge_topic("!dead/mine"))
    await refused(bus.delete_topic("!dead/mine"))
    await refused(bus.set_cursor("c", {"!dead/mine": 1}))
    await refused(bus.statistics())
    for pattern in ("!*", "!dead/*", "!system/events"):
        await refused(subscribing(bus, pattern))
        await refused(bus.make_subscription("s", pattern))
        assert await bus.topics(pattern) == []


# --- What is hidden ---


@at_every_listener("read:open/*")
async def test_lists_have_no_name_that_the_caller_has_no_right_to(
    guarded: Guarded, bus: Bus
) -> None:
    assert {topic.name for topic in await bus.topics()} == {"open/a", "open/b", "open/c"}
    for pattern in ("closed/*", "*/a*", "!*"):
        assert all(topic.name.startswith("open/") for topic in await bus.topics(pattern))
    assert [cursor.name for cursor in await bus.cursors()] == ["spare"]
    assert await bus.subscriptions() == []  # reading is not consuming


@at_every_listener("consume:open/*")
async def test_subscriptions_over_other_topics_are_not_listed(guarded: Guarded, bus: Bus) -> None:
    assert [each.name for each in await bus.subscriptions()] == ["many", "mine", "spare"]
    assert await bus.cursors() == []  # consuming is not reading


@at_every_listener(*ALL_OF_OPEN)
async def test_refusal_does_not_tell_whether_there_is_something(guarded: Guarded, bus: Bus) -> None:
    for ask in (bus.topic, bus.fetch, bus.delete_topic, bus.purge_topic):
        told = []
        for topic in ("closed/a", "closed/z"):
            with pytest.raises(ForbiddenError) as refusal:
                await ask(topic)
            told.append(str(refusal.value).replace(topic, "…"))
        assert told[0] == told[1]


@at_every_listener("read:open/*")
async def test_subscription_that_exists_is_as_unknown_as_one_that_does_not(
    guarded: Guarded, bus: Bus
) -> None:
    for name in ("theirs", "nobody"):
        await refused(bus.subscription(name))
        await refused(bus.delete_subscription(name))
        await refused(bus.dead_letter_page(name))


# --- Other people's things ---


@at_every_listener(*ALL_OF_OPEN)
async def test_subscription_over_forbidden_topics_is_not_for_who_names_no_patterns(
    guarded: Guarded, bus: Bus
) -> None:
    await refused(bus.consume("theirs").open())
    await refused(bus.consume("theirs", "open/*").open())
    await refused(bus.consume("theirs", "closed/*").open())
    await refused(bus.consume("new", "open/*", "closed/*").open())
    await refused(bus.make_subscription("theirs", "open/*"))
    await refused(bus.make_subscription("new", "open/*", "closed/a"))
    for act in (bus.delete_subscription, bus.pause_subscription, bus.resume_subscription):
        await refused(act("theirs"))
    await refused(bus.move_subscription("theirs", "latest"))
    await refused(bus.remove_member("theirs", "m"))
    assert not await guarded_names(guarded, "new")


async def guarded_names(guarded: Guarded, name: str) -> list[str]:
    root = await guarded.client("native", *EVERYTHING)
    return [each.name for each in await root.subscriptions() if each.name == name]


@at_every_listener(*ALL_OF_OPEN)
async def test_dead_letters_of_others_can_be_neither_seen_nor_settled(
    guarded: Guarded, bus: Bus
) -> None:
    await refused(bus.dead_letter_page("theirs"))
    await refused(bus.redrive("theirs", "all"))
    await refused(bus.redrive("theirs", [1]))
    await refused(bus.drop_dead("theirs", "all"))
    await refused(bus.fetch("!dead/theirs"))
    root = await guarded.client("native", *EVERYTHING)
    assert len((await root.dead_letter_page("theirs")).messages) == 3


@at_every_listener(*ALL_OF_OPEN)
async def test_cursors_of_others_can_be_neither_seen_nor_moved(guarded: Guarded, bus: Bus) -> None:
    assert await bus.cursor("theirs") is None
    await refused(bus.set_cursor("theirs", {"open/a": 1}))
    await refused(bus.remove_cursor("theirs"))
    await refused(bus.set_cursor("c", {"open/a": 1, "closed/a": 1}))
    for patterns in (("*",), (), ("open/*", "closed/*")):
        place = CursorPlace(journal="main", entry=1, patterns=patterns)
        await refused(bus.set_cursor("c", [place]))
    root = await guarded.client("native", *EVERYTHING)
    cursor = await root.cursor("theirs")
    assert cursor is not None
    assert [(place.topic, place.offset) for place in cursor.places] == [("closed/a", 1)]
    assert await root.cursor("c") is None


@at_every_listener(*ALL_OF_OPEN)
async def test_right_to_admin_is_none_to_publish_read_or_consume_elsewhere(
    guarded: Guarded, bus: Bus
) -> None:
    for topic in ("closed/a", "elsewhere"):
        await refused(bus.publish(topic, b"x"))
        await refused(bus.fetch(topic))
        await refused(bus.purge_topic(topic))


# --- Batches and shards: not over HTTP ---


@pytest.mark.parametrize("listener", ["native", "grpc"])
def test_one_forbidden_topic_in_a_batch_refuses_all_of_it(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        bus = await guarded.client(listener, "publish:open/*", "read:open/*")
        mixed = [Message("open/a", b"x"), Message("closed/a", b"x"), Message("open/b", b"x")]
        await refused(bus.publish_batch(Batch.from_messages(mixed)))
        assert await bus.topics() == []

    run_guarded(scenario, listener)


@pytest.mark.parametrize("listener", ["native", "grpc"])
def test_shard_that_holds_forbidden_topics_gives_only_the_others(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        await set_the_scene(await guarded.client("native", *EVERYTHING))
        bus = await guarded.client(listener, "read:open/*")
        for patterns in (["*"], [], ["open/*", "closed/*"], ["!dead/*"]):
            await refused(bus.fetch_shard("main", 0, 1, patterns=patterns))
            await refused(bus.shards(*patterns))
        page = await bus.fetch_shard("main", 0, 1, patterns=["open/*"])
        topics = {message.topic for batch in page.batches for message in batch}
        assert topics == {"open/a", "open/b", "open/c"}

    run_guarded(scenario, listener)


# --- Going on where others stood ---


async def position_of(bus: Any, *patterns: str) -> Any:
    """Where a subscription stands that has read something, as its listener tells it."""
    async with bus.subscribe(*patterns, start="earliest") as subscription:
        await anext(subscription)
        return subscription.position


@pytest.mark.parametrize("listener", ["http", "grpc"])
def test_position_of_others_opens_nothing(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root: Any = await guarded.client(listener, *EVERYTHING)
        await set_the_scene(await guarded.client("native", *EVERYTHING))
        bus: Any = await guarded.client(listener, "read:open/*")
        for patterns in (("*",), ("closed/*",), ("open/*", "closed/*"), ("closed/a",)):
            place = await position_of(root, *patterns)
            with pytest.raises(ForbiddenError):
                await bus.subscribe(*patterns, position=place).open()
            # With allowed patterns it is refused as another's, or leads to allowed topics alone.
            subscription = bus.subscribe("open/*", position=place)
            try:
                await subscription.open()
            except ClientFault:
                continue
            await root.publish("closed/a", b"secret")
            await root.publish("open/a", b"end")
            while (message := await anext(subscription)).payload != b"end":
                assert message.topic.startswith("open/")
            await subscription.close()

    run_guarded(scenario, listener)


def test_resuming_at_a_shard_or_partition_of_others_gives_only_what_the_patterns_match() -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await set_the_scene(root)
        bus = await guarded.client("native", "read:open/*")
        shards = (wire.ShardPlace("main", 0, 1, 1),)
        partitions = (wire.PartitionPlace("closed/a", 0, 1, 1),)
        for patterns, start in (
            (("open/*",), wire.Start("resume", (), 0, shards)),
            (("open/*",), wire.Start("resume", partitions, 0, shards)),
            (("open/a",), wire.Start("resume", partitions, 0, ())),
            (("open/a",), wire.Start("offsets", partitions, 0, ())),
            (("open/a",), wire.Start("resume_last", partitions, 0, shards)),
        ):
            subscription = bus.subscribe(*patterns)
            subscription._position = SubscriptionPosition(patterns, start)
            try:
                await subscription.open()
            except ClientFault:
                continue
            await root.publish("closed/a", b"secret")
            await root.publish("open/a", b"end")
            while (message := await anext(subscription)).payload != b"end":
                assert message.topic.startswith("open/")
            await subscription.close()

    run_guarded(scenario)


# --- Paths that no client would write ---


async def ask_raw(guarded: Guarded, method: str, path: str, token: str) -> int:
    """The status of a request whose path is sent as it is."""
    host, port = guarded.addresses["http"].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"text": "x"}' if method == "POST" else b""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return status


def test_no_spelling_of_a_path_leads_to_a_forbidden_topic() -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await root.publish("closed/a", b"x")
        token = guarded.token("publish:open/*", "read:open/*")
        for topic in (
            "closed/a",
            "closed%2Fa",
            "closed%2fa",
            "%63losed/a",
            "open/../closed/a",
            "open%2F..%2Fclosed%2Fa",
            "open/%2e%2e/closed/a",
            "open%2F%2E%2E%2Fclosed%2Fa",
            "./closed/a",
            "//closed/a",
            "closed%252Fa",
            "open%00/closed/a",
            "open/a/messages/../../../closed/a",
            "open/a%2Fmessages%3F/../closed/a",
            "%ff/a",
            "open;/closed/a",
        ):
            path = f"/v1/topics/{topic}/messages"
            for method in ("POST", "GET"):
                status = await ask_raw(guarded, method, path, token)
                assert status in (200, 400, 403, 404), (method, path, status)
        assert (await root.fetch("closed/a")).end_offset == 2
        assert all(
            topic.name.startswith("open/") or topic.name == "closed/a"
            for topic in await root.topics()
        )

    run_guarded(scenario, "http")


# --- Journals that are called after their topics ---


@pytest.mark.parametrize("listener", ["native", "grpc"])
def test_journal_of_another_topics_own_tells_nothing_not_even_that_it_exists(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await root.publish("own/secret", b"1")
        await root.publish("open/a", b"1")
        bus = await guarded.client(listener, "read:open/*")
        for journal in ("own/secret", "own/missing"):
            at = CursorPlace(journal=journal, shard=0, entry=1, patterns=["open/*"])
            for asking in (
                bus.fetch_shard(journal, 0, 1, patterns=["open/*"]),
                bus.set_cursor("c", [at]),
            ):
                with pytest.raises(ForbiddenError, match=f"no right to topic '{journal}'"):
                    await asking
        assert await root.cursors() == []
        page = await bus.fetch_shard("main", 0, 1, patterns=["open/*"])  # which topics share
        assert [message.payload for batch in page.batches for message in batch] == [b"1"]
        owner = await guarded.client(listener, "read:own/*")
        assert (await owner.fetch_shard("own/secret", 0, 1, patterns=["own/*"])).batches

    run_guarded(scenario, listener, topics=(TopicRule(match="own/*", journal="{topic}"),))
