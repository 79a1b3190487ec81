"""Replayed reading over HTTP: pages, long polls, and raw single messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.broker.fetcher import FetchRequest
from runnel.config import BrokerSettings, HttpSettings, Keep, Settings, TopicRule
from runnel.formats.message import Message
from runnel.protocols.http.encoding.parameters import time_ns, time_text
from tests.protocols.http.scene import in_loop, open_scene, until
from tests.protocols.http.talker import Talker
from tests.security.keyring import Keyring

PATH = "/v1/topics/a/messages"
SECOND_NS = 1_000_000_000


@in_loop
async def test_a_page_has_messages_and_where_the_next_one_begins() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1", b"2", b"3", key=b"k")
        first = (await scene.http.get(PATH, params={"limit": "2"})).json()
        assert [message["text"] for message in first["messages"]] == ["1", "2"]
        assert first["messages"][0] == {
            "topic": "a",
            "partition": 0,
            "offset": 1,
            "event_time_ns": 0,
            "transmit_time_ns": 0,
            "receive_time_ns": scene.clock.time_ns(),
            "size": 1,
            "tags": {},
            "key": "k",
            "text": "1",
        }
        rest = (await scene.http.get(PATH, params={"offset": first["next_offset"]})).json()
        assert [message["text"] for message in rest["messages"]] == ["3"]
        assert (rest["next_offset"], rest["first_offset"], rest["end_offset"]) == (4, 1, 4)
        assert rest["gaps"] == []


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("auto", [{"text": '{"a":\n1}'}, {"base64": "/w=="}, {"base64": "AA=="}, {"text": "nan"}]),
        ("json", [{"json": {"a": 1}}, {"base64": "/w=="}, {"base64": "AA=="}, {"text": "nan"}]),
        ("text", [{"text": '{"a":\n1}'}, {"text": "\ufffd"}, {"text": "\x00"}, {"text": "nan"}]),
        (
            "base64",
            [
                {"base64": "eyJhIjoKMX0="},
                {"base64": "/w=="},
                {"base64": "AA=="},
                {"base64": "bmFu"},
            ],
        ),
    ],
)
@in_loop
async def test_payloads_come_in_the_form_that_is_asked_for(
    form: str, expected: list[dict[str, object]]
) -> None:
    async with open_scene() as scene:
        await scene.publish("a", b'{"a":\n1}', b"\xff", b"\x00", b"nan")
        page = (await scene.http.get(PATH, params={"payload": form})).json()
        kinds = ("text", "json", "base64")
        assert [
            {kind: message[kind] for kind in kinds if kind in message}
            for message in page["messages"]
        ] == expected


@in_loop
async def test_keys_that_are_not_text_come_in_base64() -> None:
    async with open_scene() as scene:
        await scene.publish_all(Message("a", b"", b"\xff", partition_key=b"p"))
        [message] = (await scene.http.get(PATH)).json()["messages"]
        assert (message["key_base64"], message["partition_key"]) == ("/w==", "p")
        assert "key" not in message


@in_loop
async def test_reading_begins_at_a_time() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        scene.clock.advance(60 * SECOND_NS)
        await scene.publish("a", b"2")
        for time in (str(scene.clock.time_ns() - SECOND_NS), "2023-11-14T22:14:00Z"):
            page = (await scene.http.get(PATH, params={"time": time})).json()
            assert [message["text"] for message in page["messages"]] == ["2"]


@in_loop
async def test_a_long_poll_ends_empty_when_the_listener_closes() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        polling = asyncio.create_task(scene.http.get(PATH, params={"offset": "2", "wait": "20"}))
        await until(lambda: scene.listener.server.stream_count == 1)
        assert await scene.listener.drain()
        assert (await polling).json()["messages"] == []


@in_loop
async def test_whoever_vanishes_waits_no_longer() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        talker = await Talker.connect(scene.listener.address)
        talker.ask("GET", f"{PATH}?offset=2&wait=1h")
        await until(lambda: scene.listener.server.stream_count == 1)
        talker.vanish()
        await until(lambda: scene.listener.server.stream_count == 0)
        assert scene.broker.metrics.gauges()["fetches_waiting"] == 0


@in_loop
async def test_long_polls_have_a_limit() -> None:
    settings = Settings(broker=BrokerSettings(fetches_waiting_max=10))
    async with open_scene(settings=settings, http=HttpSettings(streams_max=1)) as scene:
        await scene.publish("a", b"1")
        query = {"offset": "2", "wait": "20"}
        polling = asyncio.create_task(scene.http.get(PATH, params=query))
        await until(lambda: scene.listener.server.stream_count == 1)
        refused = await scene.http.get(PATH, params=query)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "http.streams_max" in refused.json()["detail"]
        await scene.publish("a", b"2")
        assert (await polling).status_code == 200


@pytest.mark.parametrize(
    ("query", "field", "part"),
    [
        ({"offset": "x"}, "offset", "last for the last message"),
        ({"offset": "latest"}, "offset", "a number that is >= 0, such as 17"),
        ({"offset": "9" * 19}, "offset", "is no offset"),
        ({"offset": "-1"}, "offset", ">= 0"),
        ({"limit": "0"}, "limit", ">= 1"),
        ({"bytes": "0"}, "bytes", ">= 1"),
        ({"partition": "null"}, "partition", "leave it out"),
        ({"offset": ["1", "2"]}, "offset", "given twice"),
        ({"wait": "soon"}, "wait", "500ms"),
        ({"payload": "xml"}, "payload", "auto, text, json, base64"),
        ({"time": "noon"}, "time", "RFC 3339"),
        ({"ofset": "1"}, "ofset", "did you mean 'offset'?"),
    ],
)
@in_loop
async def test_wrong_parameters_are_named(query: dict[str, Any], field: str, part: str) -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        answer = await scene.http.get(PATH, params=query)
        assert answer.status_code == 400
        assert answer.json()["field"] == field
        assert part in answer.json()["detail"]


@in_loop
async def test_what_is_not_there_is_told_apart() -> None:
    rules = (TopicRule(match="live", keep=Keep.NONE), TopicRule(match="p", partitions=2))
    async with open_scene(topics=rules) as scene:
        await scene.publish("a", b"1")
        await scene.publish("p", b"1")
        unknown = await scene.http.get("/v1/topics/nothing/messages")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_topic")
        ahead = await scene.http.get(PATH, params={"offset": "9"})
        assert (ahead.status_code, ahead.json()["details"]["next_offset"]) == (416, 2)
        await scene.http.delete(PATH)
        await scene.publish("a", b"2")
        gone = await scene.http.get(PATH, params={"offset": "1"})
        assert (gone.status_code, gone.json()["details"]["first_offset"]) == (410, 2)
        not_kept = await scene.http.get("/v1/topics/live/messages")
        assert "not kept" in not_kept.json()["detail"]
        which = await scene.http.get("/v1/topics/p/messages")
        assert (which.status_code, "partition" in which.json()["detail"]) == (400, True)


@in_loop
async def test_one_message_is_its_payload_with_the_rest_in_headers() -> None:
    async with open_scene() as scene:
        topic = "ü/a"
        uid = bytes(range(20))
        message = Message(
            topic, b"<script>", b"k\r\nSet-Cookie: x", {"a=b": "c\n", " ": "d "}, 7, uid=uid
        )
        await scene.publish_all(message)
        answer = await scene.http.get("/v1/topics/%C3%BC/a/messages/1")
        assert answer.content == b"<script>"
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["runnel-topic"] == "%C3%BC/a"
        assert answer.headers["runnel-key"] == "k%0D%0ASet-Cookie: x"
        assert answer.headers.get_list("runnel-tag") == ["a%3Db=c%0A", "%20=d%20"]
        assert "set-cookie" not in answer.headers
        # As it came, it can be published again.
        headers = [
            (name, value)
            for name, value in answer.headers.multi_items()
            if name in ("runnel-key", "runnel-tag", "runnel-event-time", "runnel-uid")
        ]
        await scene.http.post("/v1/topics/b/messages", content=answer.content, headers=headers)
        fetched = await scene.broker.fetch(FetchRequest("b", 0))
        [copy] = fetched.batches[0]
        assert (copy.payload, copy.key, dict(copy.tags)) == (
            message.payload,
            message.key,
            dict(message.tags),
        )
        assert (copy.event_time_ns, copy.uid) == (7, uid)


@in_loop
async def test_a_message_that_is_not_there_says_why() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        for offset, status in ((2, 416), (9, 416)):
            assert (await scene.http.get(f"{PATH}/{offset}")).status_code == status
        await scene.http.delete(PATH)
        assert (await scene.http.get(f"{PATH}/1")).status_code == 410


# --- The last message ---


@in_loop
async def test_the_last_message_is_read_by_a_word() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1", b"2", b"3")
        page = (await scene.http.get(PATH, params={"offset": "last"})).json()
        assert [message["text"] for message in page["messages"]] == ["3"]
        assert page["next_offset"] == 4
        last = await scene.http.get(f"{PATH}/last", params={"payload": "json"})
        assert (last.status_code, last.json()["offset"], last.json()["json"]) == (200, 3, 3)
        await scene.publish("b/c", b"x")
        assert (await scene.http.get("/v1/topics/b/c/messages/last")).json()["text"] == "x"


@in_loop
async def test_a_partition_has_its_own_last_message_and_must_be_named() -> None:
    rules = (TopicRule(match="*", partitions=2),)
    async with open_scene(topics=rules) as scene:
        await scene.publish_all(Message("a", b"0", partition=0), Message("a", b"1", partition=1))
        for partition in ("0", "1"):
            query = {"partition": partition}
            last = (await scene.http.get(f"{PATH}/last", params=query)).json()
            assert (last["text"], last["partition"]) == (partition, int(partition))
            page = (await scene.http.get(PATH, params={**query, "offset": "last"})).json()
            assert [message["text"] for message in page["messages"]] == [partition]
        assert (await scene.http.get(f"{PATH}/last")).status_code == 400


@in_loop
async def test_a_topic_without_messages_has_no_last_one() -> None:
    async with open_scene() as scene:
        missing = await scene.http.get(f"{PATH}/last")
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_topic")
        await scene.publish("a", b"1", b"2")
        await scene.broker.purge_topic("a")
        empty = await scene.http.get(f"{PATH}/last")
        assert (empty.status_code, empty.json()["code"]) == (404, "not_found")
        assert empty.json()["detail"] == (
            "topic 'a' has no message now; the next one will have offset 3"
        )
        page = (await scene.http.get(PATH, params={"offset": "last"})).json()
        assert (page["messages"], page["next_offset"]) == ([], 3)
        polling = asyncio.create_task(scene.http.get(PATH, params={"offset": "last", "wait": "20"}))
        await until(lambda: scene.listener.server.stream_count == 1)
        await scene.publish("a", b"3")
        assert [each["text"] for each in (await polling).json()["messages"]] == ["3"]


@in_loop
async def test_the_last_message_needs_the_right_to_read(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("writer", "publish:*")
    async with open_scene(security=keys.settings().security) as scene:
        await scene.publish("a", b"1")
        await scene.broker.purge_topic("a")
        headers = {"authorization": f"Bearer {token}"}
        for path in (f"{PATH}/last", f"{PATH}?offset=last"):
            assert (await scene.http.get(path, headers=headers)).status_code == 403


# --- Times ---


@in_loop
async def test_times_are_texts_with_nanoseconds_beside_the_numbers_if_asked_for() -> None:
    async with open_scene() as scene:
        given_ns = 1_769_860_800_123_456_789
        await scene.publish_all(Message("a", b"1", event_time_ns=given_ns))
        query = {"times": "rfc3339"}
        [message] = (await scene.http.get(PATH, params=query)).json()["messages"]
        assert message["event_time"] == "2026-01-31T12:00:00.123456789Z"
        assert message["event_time_ns"] == given_ns
        assert time_ns("receive_time", message["receive_time"]) == message["receive_time_ns"]
        assert "transmit_time" not in message  # the publisher gave none
        last = (await scene.http.get(f"{PATH}/last", params=query)).json()
        assert last == message
        async with scene.stream("a", start="earliest", times="rfc3339") as stream:
            [event] = await stream.events(1)
        assert event.data == message
        [plain] = (await scene.http.get(PATH)).json()["messages"]
        assert {"event_time", "transmit_time", "receive_time"}.isdisjoint(plain)


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_a_time_as_text_is_read_back_as_it_was(moment_ns: int) -> None:
    assert time_ns("time", time_text(moment_ns)) == moment_ns
