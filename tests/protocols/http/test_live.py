"""Live reading as server-sent events: the events, resuming after a loss, and the cost of a slow reader."""

from __future__ import annotations

import asyncio
import json

import pytest

from runnel.config import (
    Authentication,
    HttpSettings,
    Keep,
    SecuritySettings,
    TopicRule,
)
from runnel.formats.message import Message
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from runnel.testing import VirtualClock
from tests.protocols.http.scene import Event, HttpScene, given_up, in_loop, open_scene, until

NOT_KEPT = (TopicRule(match="live/*", keep=Keep.NONE),)


def _kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


@in_loop
async def test_messages_come_as_events_with_all_that_they_have() -> None:
    async with open_scene() as scene, scene.stream("sensors/*") as stream:
        assert stream.status == 200
        await scene.publish_all(
            Message("sensors/a", b"21.5", b"a", {"unit": "C"}, event_time_ns=7, partition_key=b"p")
        )
        [event] = await stream.events(1)
        assert event.kind == "message"
        assert event.data == {
            "topic": "sensors/a",
            "partition": 0,
            "offset": 1,
            "event_time_ns": 7,
            "transmit_time_ns": 0,
            "receive_time_ns": scene.clock.time_ns(),
            "size": 4,
            "tags": {"unit": "C"},
            "key": "a",
            "partition_key": "p",
            "text": "21.5",
        }
        assert stream.retry_ms > 0


@in_loop
async def test_payloads_are_given_as_the_reader_wants_them() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b'{"x":\n1}', b"\xff")
        async with scene.stream("a", start="earliest", payload="json") as stream:
            first, second = await stream.events(2)
            assert first.data["json"] == {"x": 1}
            assert second.data["base64"] == "/w=="


@in_loop
async def test_a_stream_begins_at_a_time() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"before")
        scene.clock.advance(10**9)
        time_ns = scene.clock.time_ns()
        await scene.publish("a", b"after")
        async with scene.stream("*", start="time", time=str(time_ns)) as stream:
            assert await stream.texts(1) == ["after"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"pattern": "a", "start": "soon"}, "start"),
        ({"pattern": "a", "start": "time"}, "time"),
        ({"pattern": "a", "time": "5"}, "time"),
        ({"pattern": "a", "start": "time", "time": "yesterday"}, "time"),
        ({"pattern": "a", "overflow": "never"}, "overflow"),
        ({"pattern": "a", "payload": "xml"}, "payload"),
        ({}, "pattern"),
        ({"pattern": "a", "last_event_id": "nonsense"}, "last_event_id"),
        ({"pattern": "a", "last_event_id": "AAAA.1.1"}, "last_event_id"),
        ({"pattern": "a", "last_event_id": "x" * 5000}, "last_event_id"),
        ({"pattern": "a", "last_event_id": "é.1"}, "last_event_id"),
    ],
)
@in_loop
async def test_a_wrong_question_is_answered_with_its_field(
    query: dict[str, str], field: str
) -> None:
    async with open_scene() as scene:
        answer = await scene.http.get("/v1/stream", params=query)
        assert (answer.status_code, answer.json()["field"]) == (400, field)


@in_loop
async def test_a_wrong_pattern_is_refused() -> None:
    async with open_scene() as scene:
        answer = await scene.http.get("/v1/stream", params={"pattern": "[a"})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_name")


# --- Going on ---


async def _read_in_pieces(
    scene: HttpScene, patterns: tuple[str, ...], start: str, total: int, piece: int
) -> list[Event]:
    """Reads everything, with readers that each vanish after a few messages."""
    found: list[Event] = []
    last_id = ""
    while len(found) < total:
        query = {"last_event_id": last_id} if last_id else {"start": start}
        async with scene.stream(*patterns, **query) as stream:
            found += await stream.events(min(piece, total - len(found)))
            last_id = stream.last_id
    return found


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("patterns", [("a/*",), ("a/1", "a/2", "a/3"), ("a/*", "b")])
@in_loop
async def test_a_reconnect_in_any_place_of_a_batch_misses_and_repeats_nothing(
    patterns: tuple[str, ...], piece: int
) -> None:
    rules = (TopicRule(match="a/3", journal="other", partitions=2), TopicRule(match="*"))
    async with open_scene(topics=rules) as scene:
        # Batches of several runs, of which a reader wants some: rows of them stand apart.
        for number in range(4):
            await scene.publish_all(
                *(Message("a/1", b"%d" % n) for n in range(3)),
                Message("c", b"not wanted"),
                *(Message("a/2", b"%d" % n) for n in range(2)),
                Message("a/1", b"%d" % number),
            )
            await scene.publish_all(
                Message("a/3", b"x", partition=0), Message("a/3", b"y", partition=1)
            )
        total = 4 * 8
        found = await _read_in_pieces(scene, patterns, "earliest", total, piece)
        places = [(e.data["topic"], e.data["partition"], e.data["offset"]) for e in found]
        assert len(set(places)) == total
        for key in {place[:2] for place in places}:
            offsets = [place[2] for place in places if place[:2] == key]
            assert offsets == list(range(1, len(offsets) + 1))


@in_loop
async def test_what_comes_while_nobody_reads_is_there_when_it_goes_on() -> None:
    async with open_scene() as scene:
        async with scene.stream("a/*") as stream:
            await scene.publish("a/1", b"1")
            assert await stream.texts(1) == ["1"]
            last_id = stream.last_id
        await scene.publish("a/1", b"2")
        await scene.publish("a/2", b"3")
        async with scene.stream("a/*", last_event_id=last_id) as stream:
            await scene.publish("a/1", b"4")
            assert await stream.texts(3) == ["2", "3", "4"]


@in_loop
async def test_a_reader_that_got_nothing_yet_goes_on_from_where_it_began() -> None:
    async with open_scene() as scene:
        await scene.publish("a/1", b"old")
        async with scene.stream("a/*") as stream:
            assert await given_up(stream.event())
            last_id = stream.last_id
        await scene.publish("a/1", b"new")
        async with scene.stream("a/*", last_event_id=last_id) as stream:
            assert await stream.texts(1) == ["new"]


@in_loop
async def test_the_header_of_a_browser_is_newer_than_its_query() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1", b"2", b"3")
        async with scene.stream("a", start="earliest") as stream:
            first, second = await stream.events(2)
        again = scene.stream("a", last_event_id=first.id)
        again.headers["Last-Event-ID"] = second.id
        async with again as stream:
            assert await stream.texts(1) == ["3"]


@in_loop
async def test_an_id_of_other_patterns_is_refused() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        async with scene.stream("*", start="earliest") as stream:
            await stream.events(1)
        query = {"pattern": "a", "last_event_id": stream.last_id}
        answer = await scene.http.get("/v1/stream", params=query)
        assert answer.status_code == 400
        assert "other patterns" in answer.json()["detail"]


@pytest.mark.parametrize("patterns", [("a/*",), ("a/1", "a/2")])
@pytest.mark.parametrize("read", [0, 1, 2, 3, 4])
@in_loop
async def test_last_values_that_came_do_not_come_again(
    patterns: tuple[str, ...], read: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with open_scene() as scene:
        await scene.publish("a/1", b"old", b"one")
        await scene.publish("a/2", b"two")
        async with scene.stream(*patterns, start="last") as stream:
            found = await stream.events(min(read, 3))
            if not read:
                assert (await stream.block())[0].startswith("retry")
                stream.last_id = ""
            last_id = stream.last_id
        await scene.publish("a/1", b"three")
        query = {"last_event_id": last_id} if last_id else {"start": "last"}
        async with scene.stream(*patterns, **query) as stream:
            if not last_id:
                assert {event.text for event in await stream.events(2)} == {"two", "three"}
                return
            found += await stream.events(4 - len(found))
        kinds = _kinds(found)
        assert kinds.count("caught_up") == 1
        texts = [event.text for event in found if event.kind == "message"]
        assert sorted(texts[:2]) == ["one", "two"]
        assert texts[2:] == ["three"]


@in_loop
async def test_many_last_values_have_short_ids_and_none_comes_again() -> None:
    async with open_scene() as scene:
        await scene.publish_all(*(Message(f"a/{number}", b"x") for number in range(600)))
        async with scene.stream("a/*", start="last") as stream:
            first = await stream.events(590)
            last_id = stream.last_id
        assert max(len(event.id) for event in first) <= 64
        found = [event.data["topic"] for event in first]
        async with scene.stream("a/*", last_event_id=last_id) as stream:
            while (event := await stream.event()) is not None and event.kind == "message":
                found.append(event.data["topic"])
        assert len(found) == len(set(found)) == 600


@in_loop
async def test_a_restart_amid_last_values_brings_them_again_and_misses_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = str(tmp_path_factory.mktemp("data"))
    async with open_scene(directory=directory) as scene:
        await scene.publish_all(*(Message(f"a/{number}", b"x") for number in range(10)))
        async with scene.stream("a/*", start="last") as stream:
            await stream.events(4)
            last_id = stream.last_id
        await scene.publish("a/new", b"y")
    async with open_scene(directory=directory) as scene:
        async with scene.stream("a/*", last_event_id=last_id) as stream:
            found = await stream.events(12)
        topics = [event.data["topic"] for event in found[:10]]
        assert sorted(topics) == sorted(f"a/{number}" for number in range(10))
        assert [event.kind for event in found[10:]] == ["caught_up", "message"]
        assert found[11].data["topic"] == "a/new"


@pytest.mark.parametrize("pattern", ["a/*", "a/1"])
@in_loop
async def test_a_stream_goes_on_after_a_restart(
    pattern: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = str(tmp_path_factory.mktemp("data"))
    async with open_scene(directory=directory) as scene:
        await scene.publish("a/1", b"1", b"2", b"3")
        async with scene.stream(pattern, start="earliest") as stream:
            assert await stream.texts(2) == ["1", "2"]
            last_id = stream.last_id
    async with open_scene(directory=directory) as scene:
        await scene.publish("a/1", b"4")
        async with scene.stream(pattern, last_event_id=last_id) as stream:
            assert await stream.texts(2) == ["3", "4"]


@pytest.mark.parametrize("pattern", ["a/*", "a/1"])
@in_loop
async def test_what_was_in_memory_is_a_gap_after_a_restart(pattern: str) -> None:
    clock = VirtualClock()
    async with open_scene(clock=clock) as scene:
        await scene.publish("a/1", b"1", b"2")
        async with scene.stream(pattern, start="earliest") as stream:
            await stream.events(2)
            last_id = stream.last_id
    clock.advance(10**9)
    async with open_scene(clock=clock) as scene:
        await scene.publish("a/1", b"new")
        async with scene.stream(pattern, last_event_id=last_id) as stream:
            gap, message = await stream.events(2)
            assert (gap.kind, gap.data["reason"]) == ("gap", "restart")
            assert message.text == "new"


@in_loop
async def test_a_gap_is_not_told_again_to_who_comes_back_behind_it() -> None:
    async with open_scene() as scene:
        async with scene.stream("m*") as stream:
            await scene.publish("m", b"1")
            await stream.events(1)
            before = stream.last_id
        await scene.publish_all(Message("m", b"2"), Message("n", b"1"))
        await scene.broker.purge_topic("m")
        async with scene.stream("m*", last_event_id=before) as stream:
            [gap] = await stream.events(1)
            assert (gap.kind, gap.data["missed"]) == ("gap", 1)
            more = asyncio.ensure_future(stream.event())
            await until(lambda: stream.last_id != before)
            await given_up(more)
            behind = stream.last_id
        async with scene.stream("m*", last_event_id=behind) as stream:
            await scene.publish("m", b"3")
            assert await stream.texts(1) == ["3"]


# --- Slow and vanished readers, and the end ---


@in_loop
async def test_a_vanished_reader_costs_nothing_lasting() -> None:
    async with open_scene() as scene:
        async with scene.stream("*"):
            assert len(scene.broker._live_subscriptions) == 1
            assert scene.listener.server.stream_count == 1
        await until(
            lambda: (
                not len(scene.broker._live_subscriptions) and not scene.listener.server.stream_count
            )
        )


@in_loop
async def test_a_reader_that_reads_nothing_holds_back_no_more_than_its_credit() -> None:
    async with open_scene() as scene, scene.stream("a") as stream:
        payload = b"x" * 10_000
        for _ in range(60):
            await scene.publish("a", *[payload] * 10)
        [subscription] = scene.broker._live_subscriptions.subscriptions()
        await until(lambda: subscription.is_behind)
        [connection] = scene.listener.server.connections
        assert connection.transport.get_write_buffer_size() < 400_000
        # What it could not be sent is there when it reads.
        events = await stream.events(600)
        assert [event.offset for event in events] == list(range(1, 601))


@in_loop
async def test_a_reader_that_vanishes_while_it_reads_nothing_is_noticed() -> None:
    async with open_scene() as scene:
        async with scene.stream("a"):
            for _ in range(60):
                await scene.publish("a", *[b"x" * 10_000] * 10)
            [subscription] = scene.broker._live_subscriptions.subscriptions()
            await until(lambda: subscription.is_behind)
        await until(lambda: subscription.is_closed)


@in_loop
async def test_a_quiet_stream_has_a_heartbeat() -> None:
    async with open_scene() as scene, scene.stream("a") as stream:
        await stream.block()
        for _ in range(3):
            scene.clock.advance(15 * 10**9)
            assert await stream.block() == [":"]


@in_loop
async def test_a_reader_is_told_when_the_broker_goes() -> None:
    async with open_scene() as scene, scene.stream("a", start="earliest") as stream:
        await scene.publish("a", b"1")
        assert await stream.texts(1) == ["1"]
        draining = asyncio.get_running_loop().create_task(scene.listener.drain())
        [event] = await stream.events(1)
        assert (event.kind, event.data["code"]) == ("closing", "closed")
        assert event.id == stream.last_id
        assert await stream.event() is None
        assert await draining


@in_loop
async def test_no_more_streams_than_the_settings_allow() -> None:
    async with open_scene(http=HttpSettings(streams_max=1)) as scene:
        async with scene.stream("a"):
            answer = await scene.http.get("/v1/stream", params={"pattern": "a"})
            assert (answer.status_code, answer.json()["code"]) == (429, "limit_exceeded")
        await until(lambda: scene.listener.server.stream_count == 0)
        async with scene.stream("a") as stream:
            assert stream.status == 200


@in_loop
async def test_an_httpx_reader_understands_the_stream() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"line\nline")
        query = {"pattern": "a", "start": "earliest"}
        async with scene.http.stream("GET", "/v1/stream", params=query) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line[6:])["text"] == "line\nline"
                    break


@in_loop
async def test_a_stream_ends_when_its_token_is_revoked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    tokens = TokenFile(path)
    token, text = new_token("reader", [Grant.parse("read:a/*")], now_ns=0)
    with tokens.changing() as known:
        known.append(token)
    security = SecuritySettings(authentication=Authentication.TOKEN, tokens_file=str(path))
    async with open_scene(security=security) as scene:
        answer = await scene.http.get(
            "/v1/stream",
            params={"pattern": "*"},
            headers={"Authorization": f"Bearer {text}"},
        )
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        # An id says where to go on, and not what may be read.
        async with scene.stream("a/*", access_token=text) as stream:
            await stream.block()
            await scene.publish("a/1", b"1")
            assert await stream.texts(1) == ["1"]
            with tokens.changing() as known:
                known.clear()
            scene.clock.advance(10**9)
            [event] = await stream.events(1)
            assert (event.kind, event.data["code"]) == ("ended", "unauthenticated")
            assert await stream.event() is None
