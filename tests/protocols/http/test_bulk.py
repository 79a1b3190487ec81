"""Bulk publishing: lines without end, in order, within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from runnel.broker.fetcher import FetchRequest
from runnel.config import HttpSettings, LimitSettings, Settings, TopicRule
from tests.protocols.http.scene import HttpScene, in_loop, open_scene, until
from tests.protocols.http.talker import Talker

LINES = {"content-type": "application/x-ndjson"}
PATH = "/v1/topics/lines/messages"


async def _payloads(scene: HttpScene, partition: int = 0) -> list[bytes]:
    payloads: list[bytes] = []
    offset = 1
    while True:
        fetched = await scene.broker.fetch(FetchRequest("lines", partition, offset=offset))
        if not fetched.batches:
            return payloads
        payloads += [message.payload for batch in fetched.batches for message in batch]
        offset = fetched.next_offset


@in_loop
async def test_lines_are_stored_in_their_order_however_they_are_cut() -> None:
    lines = [b'{"text":"%d"}' % number for number in range(2000)]
    body = b"\n".join(lines)

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 777):
            yield body[begin : begin + 777]

    async with open_scene() as scene:
        answer = await scene.http.post(PATH, content=chunks(), headers=LINES)
        assert answer.status_code == 200
        assert answer.json() == {
            "published": 2000,
            "level": "received",
            "partitions": [{"partition": 0, "first_offset": 1, "next_offset": 2001}],
        }
        assert await _payloads(scene) == [b"%d" % number for number in range(2000)]


@in_loop
async def test_empty_lines_and_line_ends_of_either_kind_are_passed_over() -> None:
    async with open_scene() as scene:
        body = b'\n{"text":"a"}\r\n\r\n{"text":"b"}\n \n'
        answer = await scene.http.post(PATH, content=body, headers=LINES)
        assert answer.json()["published"] == 2
        nothing = await scene.http.post(PATH, content=b"", headers=LINES)
        assert nothing.json() == {"published": 0, "level": None, "partitions": []}


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (b'{"txt":"x"}', "did you mean 'text'?"),
        (b'{"text":"x"', "not JSON"),
        (b'{"text":"x"} {"text":"y"}', "not JSON"),
        (b'{"base64":"A"}', "base64"),
        (b'{"text":"\xff"}', "UTF-8"),
        (b'{"json":' + b"[" * 50_000, "nested too deeply"),
    ],
)
@in_loop
async def test_a_wrong_line_is_named_and_those_before_it_are_published(
    wrong: bytes, part: str
) -> None:
    async with open_scene() as scene:
        body = b'{"text":"a"}\n\n{"text":"b"}\n' + wrong + b'\n{"text":"c"}\n'
        answer = await scene.http.post(PATH, content=body, headers=LINES)
        assert answer.status_code == 400
        problem = answer.json()
        assert problem["details"]["line"] == 4
        assert problem["details"]["published"] == 2
        assert part in problem["detail"]
        assert await _payloads(scene) == [b"a", b"b"]


@in_loop
async def test_a_message_that_is_too_large_is_found_among_the_lines() -> None:
    settings = Settings(limits=LimitSettings(message_bytes_max=100))
    async with open_scene(settings=settings) as scene:
        lines = [json.dumps({"text": "x" * (101 if number == 37 else 10)}) for number in range(60)]
        answer = await scene.http.post(PATH, content="\n".join(lines), headers=LINES)
        assert answer.status_code == 413
        assert answer.json()["details"] == {"published": 37, "line": 38}
        assert len(await _payloads(scene)) == 37


@in_loop
async def test_lines_beyond_one_batch_become_several() -> None:
    settings = Settings(limits=LimitSettings(message_bytes_max=1000, batch_bytes_max=4000))
    async with open_scene(settings=settings) as scene:
        lines = "\n".join(json.dumps({"text": "x" * 900}) for _ in range(50))
        answer = await scene.http.post(PATH, content=lines, headers=LINES)
        assert answer.json()["published"] == 50


@in_loop
async def test_a_line_has_a_limit_and_the_body_has_none() -> None:
    async with open_scene(http=HttpSettings(body_bytes_max=1000)) as scene:
        many = b'{"text":"abc"}\n' * 500
        assert (await scene.http.post(PATH, content=many, headers=LINES)).json()["published"] == 500
        long = b'{"text":"a"}\n{"text":"' + b"x" * 5000
        answer = await scene.http.post(PATH, content=long, headers=LINES)
        assert answer.status_code in (400, 413)
        assert answer.json()["details"]["line"] == 2


@in_loop
async def test_keys_choose_partitions_and_the_rest_takes_turns() -> None:
    async with open_scene(topics=(TopicRule(match="lines", partitions=3),)) as scene:
        keyed = "\n".join(json.dumps({"text": str(n), "key": str(n % 10)}) for n in range(200))
        answer = await scene.http.post(PATH, content=keyed, headers=LINES)
        ranges = answer.json()["partitions"]
        assert sum(each["next_offset"] - each["first_offset"] for each in ranges) == 200
        stored = [[int(text) for text in await _payloads(scene, number)] for number in range(3)]
        assert all(numbers == sorted(numbers) for numbers in stored)
        for _ in range(6):
            await scene.http.post(PATH, content=b'{"text":"0"}\n', headers=LINES)
        assert [len(await _payloads(scene, number)) for number in range(3)] == [
            len(numbers) + 2 for numbers in stored
        ]


@in_loop
async def test_lines_for_several_shards_keep_the_order_of_each_partition() -> None:
    topics = (TopicRule(match="lines", partitions=4, journal="spread"),)
    async with open_scene(topics=topics, journal_shards=4) as scene:
        keyed = "\n".join(json.dumps({"text": str(n), "key": str(n % 50)}) for n in range(500))
        answer = await scene.http.post(PATH, content=keyed, headers=LINES)
        assert answer.json()["published"] == 500
        stored = [[int(text) for text in await _payloads(scene, number)] for number in range(4)]
        assert all(numbers == sorted(numbers) for numbers in stored)
        assert sorted(number for numbers in stored for number in numbers) == list(range(500))


@in_loop
async def test_lines_of_all_shards_before_one_that_is_too_large_are_published() -> None:
    settings = Settings(limits=LimitSettings(message_bytes_max=100))
    topics = (TopicRule(match="lines", partitions=4, journal="spread"),)
    async with open_scene(settings=settings, topics=topics, journal_shards=4) as scene:
        lines = [
            json.dumps({"text": f"{n} " + "x" * (101 if n in (37, 51) else 10), "key": str(n)})
            for n in range(60)
        ]
        answer = await scene.http.post(PATH, content="\n".join(lines), headers=LINES)
        assert answer.status_code == 413
        assert answer.json()["details"]["line"] == 38
        stored = {int(text.split()[0]) for n in range(4) for text in await _payloads(scene, n)}
        assert stored >= set(range(37))
        assert answer.json()["details"]["published"] == len(stored)


@in_loop
async def test_lines_are_published_while_the_rest_is_still_to_come() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(
            b"POST /v1/topics/lines/messages HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
            b'd\r\n{"text":"a"}\n\r\n'
        )
        await until(lambda: scene.broker.metrics.counters.messages_in == 1)
        talker.say(b'd\r\n{"text":"b"}\n\r\n0\r\n\r\n')
        assert (await talker.hear()).json["published"] == 2
        talker.vanish()


@in_loop
async def test_time_between_lines_is_limited_and_not_the_whole() -> None:
    second_ns = 1_000_000_000
    async with open_scene(http=HttpSettings(request_timeout_ns=10 * second_ns)) as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(
            b"POST /v1/topics/lines/messages HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        counters = scene.broker.metrics.counters
        for count in range(1, 5):
            talker.say(b'd\r\n{"text":"a"}\n\r\n')
            await until(lambda count=count: counters.messages_in == count)  # type: ignore[misc]
            await asyncio.sleep(0)
            for _ in range(9):
                scene.clock.advance(second_ns)
                await asyncio.sleep(0.001)
        for _ in range(4):
            scene.clock.advance(second_ns)
            await asyncio.sleep(0.001)
        assert (await talker.hear()).status == 408
        assert await talker.is_over()


@in_loop
async def test_a_bulk_that_does_not_end_is_ended_when_the_listener_closes() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(
            b"POST /v1/topics/lines/messages HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
            b'd\r\n{"text":"a"}\n\r\n'
        )
        await until(lambda: scene.broker.metrics.counters.messages_in == 1)
        draining = asyncio.create_task(scene.listener.drain())
        answer = await talker.hear()
        assert answer.status == 503
        assert answer.json["details"]["published"] == 1
        assert answer.json["retriable"]
        assert await talker.is_over()
        assert await draining


@in_loop
async def test_whoever_vanishes_in_the_middle_has_published_what_came() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(
            b"POST /v1/topics/lines/messages HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
            b'd\r\n{"text":"a"}\n\r\n'
        )
        await until(lambda: scene.broker.metrics.counters.messages_in == 1)
        talker.vanish()
        await until(lambda: scene.listener.connection_count == 0)
        assert await _payloads(scene) == [b"a"]
