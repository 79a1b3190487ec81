"""Publishing over HTTP: JSON, arrays, and raw bodies."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from runnel.broker.fetcher import FetchRequest
from runnel.config import HttpSettings, LimitSettings, Settings, TopicRule
from runnel.formats.message import Message
from runnel.topics.partitions import partition_of_key
from tests.protocols.http.scene import HttpScene, in_loop, open_scene

MESSAGES = "/v1/topics/sensors%2Fa/messages"
JSON = {"content-type": "application/json"}


async def _stored(scene: HttpScene, topic: str = "sensors/a", partition: int = 0) -> list[Message]:
    fetched = await scene.broker.fetch(FetchRequest(topic, partition))
    return [message for batch in fetched.batches for message in batch]


def _problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["code"] == code
    assert problem["status"] == status
    assert problem["type"] == f"urn:runnel:problem:{code}"
    return problem


@in_loop
async def test_a_message_has_all_that_its_json_gives_it() -> None:
    async with open_scene() as scene:
        uid = bytes(range(20))
        answer = await scene.http.post(
            MESSAGES,
            json={
                "text": "21.5 °C",
                "key": "a",
                "partition_key_base64": "AP8=",
                "tags": {"unit": "C"},
                "event_time": "2026-01-31T13:00:00.25+01:00",
                "transmit_time": 7,
                "uid": base64.b64encode(uid).decode(),
            },
        )
        assert answer.status_code == 200
        receipt = answer.json()
        assert receipt.pop("epoch") > 0
        assert receipt == {
            "topic": "sensors/a",
            "partition": 0,
            "offset": 1,
            "receive_time_ns": scene.clock.time_ns(),
            "level": "received",
        }
        [message] = await _stored(scene)
        assert message.payload == "21.5 °C".encode()
        assert (message.key, message.partition_key) == (b"a", b"\x00\xff")
        assert dict(message.tags) == {"unit": "C"}
        assert (message.event_time_ns, message.transmit_time_ns) == (1_769_860_800_250_000_000, 7)
        assert message.uid == uid


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        (b"{}", b""),
        (b'{"text": ""}', b""),
        (b'{"json": {"a" : [1, null]}}', b'{"a" : [1, null]}'),
        (b'{"json": null}', b"null"),
        (b'{"base64": "AAEC"}', b"\x00\x01\x02"),
        (b'{"text": null, "base64": "AAEC", "key": null}', b"\x00\x01\x02"),
    ],
)
@in_loop
async def test_a_payload_is_text_or_json_or_base64_or_nothing(body: bytes, payload: bytes) -> None:
    async with open_scene() as scene:
        assert (await scene.http.post(MESSAGES, content=body, headers=JSON)).status_code == 200
        [message] = await _stored(scene)
        assert message.payload == payload


@pytest.mark.parametrize(
    ("body", "field", "part"),
    [
        (b'{"txt": "a"}', "$.txt", "did you mean 'text'?"),
        (b'{"text": "a", "json": 1}', "$", "one payload"),
        (b'{"key": "a", "key_base64": "AA=="}', "$", "one of them is enough"),
        (b'{"text": 3}', "$.text", "Expected"),
        (b'{"base64": "A"}', "$.base64", "base64"),
        (b'{"uid": "AAAA"}', "$.uid", "20"),
        (b'{"event_time": "yesterday"}', "$.event_time", "RFC 3339"),
        (b'{"event_time": 9223372036854775808}', "$.event_time", "64 bits"),
        (b'{"tags": {"a": 1}}', "$.tags[...]", "Expected"),
        (b'[{"text": "a"}, {"txt": "b"}]', "$[1].txt", "did you mean 'text'?"),
        (b'[{"text": "a"}, {"base64": "A"}]', "$[1].base64", "base64"),
        (b"[]", "$", "at least one message"),
        (b'"text"', "$", "Expected `object`"),
    ],
)
@in_loop
async def test_wrong_messages_are_refused_with_their_place(
    body: bytes, field: str, part: str
) -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(MESSAGES, content=body, headers=JSON)
        problem = _problem(answer, 400, "bad_request")
        assert problem["field"] == field
        assert part in problem["detail"]
        assert await scene.broker.topics.list() == ([], True)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not JSON"),
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "a"} x', "not JSON"),
        (b'{"json": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
@in_loop
async def test_what_is_not_json_is_malformed(body: bytes, part: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(MESSAGES, content=body, headers=JSON)
        assert part in _problem(answer, 400, "malformed")["detail"]


@in_loop
async def test_json_within_json_that_is_not_utf8_is_refused() -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(MESSAGES, content=b'{"json": "\xff"}', headers=JSON)
        assert _problem(answer, 400, "bad_request")["field"] == "$.json"


@in_loop
async def test_an_array_is_stored_whole_and_answered_in_its_order() -> None:
    topics = (TopicRule(match="p", partitions=4),)
    async with open_scene(topics=topics) as scene:
        keys = [str(number) for number in range(8)]
        answer = await scene.http.post(
            "/v1/topics/p/messages", json=[{"text": key, "key": key} for key in keys]
        )
        receipts = answer.json()["receipts"]
        assert answer.json()["published"] == 8
        for key, receipt in zip(keys, receipts, strict=True):
            assert receipt["partition"] == partition_of_key(key.encode(), 4)
            stored = await _stored(scene, "p", receipt["partition"])
            assert stored[receipt["offset"] - 1].payload == key.encode()
        by_query = await scene.http.post(
            "/v1/topics/p/messages?partition=1", json=[{"key": "0"}, {}]
        )
        assert [receipt["partition"] for receipt in by_query.json()["receipts"]] == [1, 1]


@in_loop
async def test_an_array_for_several_shards_is_answered_in_its_order() -> None:
    """A batch for each shard: each is stored whole."""
    topics = (TopicRule(match="p", partitions=4, journal="spread"),)
    async with open_scene(topics=topics, journal_shards=4) as scene:
        (route,) = scene.broker.routes(["p"])
        assert len({owner.shard for owner in route.owners}) > 1
        keys = [str(number) for number in range(40)]
        for level in ("", "?level=none"):
            answer = await scene.http.post(
                f"/v1/topics/p/messages{level}", json=[{"text": key, "key": key} for key in keys]
            )
            assert answer.json()["published"] == 40
            partitions = [receipt["partition"] for receipt in answer.json()["receipts"]]
            assert partitions == [partition_of_key(key.encode(), 4) for key in keys]
            if not level:
                for key, receipt in zip(keys, answer.json()["receipts"], strict=True):
                    stored = await _stored(scene, "p", receipt["partition"])
                    assert stored[receipt["offset"] - 1].payload == key.encode()
        assert sum([len(await _stored(scene, "p", number)) for number in range(4)]) == 80
        wrong = await scene.http.post("/v1/topics/p/messages?partition=4", json=[{"key": "0"}, {}])
        assert "has partitions 0 to 3, not 4" in wrong.json()["detail"]


@in_loop
async def test_a_body_of_another_type_is_the_payload() -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(
            MESSAGES,
            content=b"\x00raw\xff",
            headers=[
                ("content-type", "image/png"),
                ("runnel-key", "a%2Fb"),
                ("runnel-partition-key-base64", "AP8="),
                ("runnel-tag", "unit=%C2%B0C"),
                ("runnel-tag", "line=%0A"),
                ("runnel-event-time", "1700000000000000000"),
            ],
        )
        assert answer.status_code == 200
        [message] = await _stored(scene)
        assert message.payload == b"\x00raw\xff"
        assert (message.key, message.partition_key) == (b"a/b", b"\x00\xff")
        assert dict(message.tags) == {"unit": "°C", "line": "\n"}
        assert message.event_time_ns == 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("Runnel-Tag", "unit", "name=value"),
        ("Runnel-Tags", "unit=C", "did you mean 'Runnel-Tag'?"),
        ("RUNNEL-PARTITIONKEY", "a", "did you mean 'Runnel-Partition-Key'?"),
        ("Runnel-Zoo", "a", "known are Runnel-Key, "),
        ("Runnel-Key-Base64", "A", "base64"),
        ("Runnel-Event-Time", "noon", "RFC 3339"),
        ("runnel-keys", "a", "did you mean 'Runnel-Key'?"),
        ("Runnel-Key", "%ff", "UTF-8"),
    ],
)
@in_loop
async def test_wrong_headers_are_named(name: str, value: str, part: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(MESSAGES, content=b"x", headers={name: value})
        problem = _problem(answer, 400, "bad_request")
        assert problem["field"].lower() == name.lower()
        assert part in problem["detail"]


@in_loop
async def test_a_partition_that_is_not_there_is_told_without_words_of_the_log() -> None:
    async with open_scene() as scene:
        for body in ({"text": "a"}, [{"text": "a"}, {"text": "b"}]):
            answer = await scene.http.post(MESSAGES, params={"partition": 7}, json=body)
            problem = _problem(answer, 404, "unknown_topic")
            assert problem["detail"] == "topic 'sensors/a' has partitions 0 to 0, not 7"


@in_loop
async def test_level_none_is_accepted_and_level_nonsense_is_not() -> None:
    async with open_scene() as scene:
        taken = await scene.http.post(MESSAGES, params={"level": "none"}, json={"text": "a"})
        assert taken.status_code == 202
        assert taken.json() == {"topic": "sensors/a", "partition": 0, "level": "none"}
        many = await scene.http.post(MESSAGES, params={"level": "none"}, json=[{"text": "b"}])
        assert many.status_code == 202
        wrong = await scene.http.post(MESSAGES, params={"level": "soon"}, json={"text": "a"})
        problem = _problem(wrong, 400, "bad_request")
        assert problem["field"] == "level"
        assert "none, received, stored" in problem["detail"]
        assert len(await _stored(scene)) == 2


@in_loop
async def test_the_trace_of_a_request_becomes_tags_of_messages_without_one() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    own = parent.replace("0af", "1af")
    async with open_scene() as scene:
        headers = {"traceparent": parent, "tracestate": "a=b"}
        await scene.http.post(MESSAGES, json={"text": "a", "tags": {"x": "y"}}, headers=headers)
        await scene.http.post(
            MESSAGES, json=[{"tags": {"traceparent": own}}], headers={"traceparent": parent}
        )
        await scene.http.post(MESSAGES, content=b"c", headers={"traceparent": "nonsense"})
        tags = [dict(message.tags) for message in await _stored(scene)]
        assert tags == [
            {"x": "y", "traceparent": parent, "tracestate": "a=b"},
            {"traceparent": own},
            {},
        ]


@in_loop
async def test_what_is_too_large_is_413() -> None:
    settings = Settings(limits=LimitSettings(message_bytes_max=100))
    async with open_scene(settings=settings, http=HttpSettings(body_bytes_max=1000)) as scene:
        message = await scene.http.post(MESSAGES, content=b"x" * 101)
        assert "limits.message_bytes_max" in _problem(message, 413, "limit_exceeded")["detail"]
        body = await scene.http.post(MESSAGES, content=b"x" * 1001)
        assert "http.body_bytes_max" in _problem(body, 413, "limit_exceeded")["detail"]

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 100

        chunked = await scene.http.post(MESSAGES, content=chunks())
        _problem(chunked, 413, "limit_exceeded")
        assert (await scene.http.get("/healthz")).status_code == 200
