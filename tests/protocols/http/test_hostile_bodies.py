"""Hostile bodies and readers, and tokens that are revoked while a body arrives."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from pathlib import Path

import pytest

from runnel.formats.batch import Batch
from runnel.formats.heads import PartitionPlace, Start
from runnel.formats.message import Message
from runnel.protocols.http.encoding.event_ids import ID_CHARS_MAX, EventIds
from runnel.protocols.http.encoding.sent_last_values import SentLists
from runnel.protocols.http.resources.publish import ARRAY_MAX
from runnel.protocols.http.server.bodies import CONTROL_BYTES_MAX
from tests.protocols.http.scene import in_loop, open_scene, until
from tests.protocols.http.talker import Talker
from tests.security.keyring import Keyring

SECOND_NS = 1_000_000_000
JSON = {"content-type": "application/json"}
LINE = b'{"text":"' + b"x" * 1000 + b'"}\n'
CHUNK = b"%x\r\n%b\r\n" % (len(LINE) * 60, LINE * 60)


async def _lines_without_end(talker: Talker, token: str = "") -> asyncio.Task[None]:
    talker.say(
        b"POST /v1/topics/lines/messages HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n"
    )
    talker.say(b"authorization: Bearer %b\r\n\r\n" % token.encode() if token else b"\r\n")

    async def send() -> None:
        try:
            while True:
                talker.say(CHUNK)
                await talker.writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            return

    return asyncio.create_task(send())


# --- Whose time is over ---


@in_loop
async def test_a_revoked_token_ends_a_bulk_however_fast_it_comes(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("writer", "publish:*")
    async with open_scene(security=keys.settings().security) as scene:
        talker = await Talker.connect(scene.listener.address)
        sending = await _lines_without_end(talker, token)
        counters = scene.broker.metrics.counters
        await until(lambda: counters.messages_in > 0)
        keys.revoke("writer")
        scene.clock.advance(SECOND_NS)
        answer = await talker.hear()
        assert answer.status == 401
        assert answer.json["details"]["published"] == counters.messages_in
        sending.cancel()
        talker.vanish()


@in_loop
async def test_a_bulk_ends_when_the_listener_closes_however_fast_it_comes() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        sending = await _lines_without_end(talker)
        counters = scene.broker.metrics.counters
        await until(lambda: counters.messages_in > 0)
        draining = asyncio.create_task(scene.listener.drain())
        answer = await talker.hear()
        assert (answer.status, answer.json["code"]) == (503, "closed")
        assert answer.json["details"]["published"] == counters.messages_in
        while not draining.done():  # a client that keeps sending is soon cut off
            scene.clock.advance(SECOND_NS)
            await asyncio.sleep(0.001)
        assert await draining
        await sending


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/topics/a/messages", b"payload"),
        ("PUT", "/v1/cursors/c", b'{"places":[{"topic":"a","partition":0,"offset":1}]}'),
    ],
)
@in_loop
async def test_a_body_that_comes_after_the_revocation_does_nothing(
    method: str, path: str, body: bytes, tmp_path: Path
) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("writer", "publish:*", "read:*")
    async with open_scene(security=keys.settings().security) as scene:
        talker = await Talker.connect(scene.listener.address)
        headers = {"authorization": f"Bearer {token}", "content-length": str(len(body))}
        talker.ask(method, path, b"", headers)
        await until(lambda: scene.broker.metrics.counters.requests == 1)
        keys.revoke("writer")
        scene.clock.advance(SECOND_NS)
        await asyncio.sleep(0.01)
        talker.say(body)
        assert (await talker.hear()).status == 401
        assert scene.broker.metrics.counters.messages_in == 0
        talker.vanish()


# --- Many of something small ---


@in_loop
async def test_an_array_has_a_limit_and_its_error_tells_of_lines() -> None:
    async with open_scene() as scene:
        path = "/v1/topics/a/messages"
        body = b"[" + b"{}," * ARRAY_MAX + b"{}]"
        refused = await scene.http.post(path, content=body, headers=JSON)
        assert (refused.status_code, refused.json()["code"]) == (413, "limit_exceeded")
        assert "application/x-ndjson" in refused.json()["detail"]
        assert scene.broker.metrics.counters.messages_in == 0
        taken = await scene.http.post(path, content=body.replace(b"{},", b"", 1), headers=JSON)
        assert taken.json()["published"] == ARRAY_MAX


@pytest.mark.parametrize(
    "many", [b'{"json":[' + b"{}," * ARRAY_MAX + b"{}]}", b'{"text":"' + b"{" * 20_000 + b'"}']
)
@in_loop
async def test_braces_within_a_message_do_not_count(many: bytes) -> None:
    async with open_scene() as scene:
        path = "/v1/topics/a/messages"
        taken = await scene.http.post(path, content=b"[" + many + b",{}]", headers=JSON)
        assert taken.json()["published"] == 2
        wrong = await scene.http.post(path, content=b"[" + many + b",{]", headers=JSON)
        assert wrong.json()["code"] == "malformed"


@pytest.mark.parametrize("given", [b'{"acks":[%b""]}', b'{"acks":[%b{}]}'])
@in_loop
async def test_a_body_without_messages_has_a_limit_of_its_own(given: bytes) -> None:
    async with open_scene() as scene:
        body = given % (b'"",' * (CONTROL_BYTES_MAX // 3))
        refused = await scene.http.post("/v1/subscriptions/s/ack", content=body, headers=JSON)
        assert (refused.status_code, refused.json()["code"]) == (413, "limit_exceeded")


@in_loop
async def test_many_short_lines_leave_time_for_others() -> None:
    async with open_scene() as scene:
        body = b"{}\n" * 100_000
        headers = {"content-type": "application/x-ndjson"}
        path = "/v1/topics/a/messages"
        publishing = asyncio.create_task(scene.http.post(path, content=body, headers=headers))
        turns = 0
        while not publishing.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await publishing).json()["published"] == 100_000
        assert turns > 10


# --- Readers ---


def test_places_that_are_too_many_for_an_id_cost_nothing() -> None:
    topics = [f"many/{number}" for number in range(1000)]
    position = EventIds(topics, Start("latest"), SentLists())
    position.begin((), [PartitionPlace(topic, at, 1, 1) for topic in topics for at in range(64)])
    batch = Batch.from_messages([Message(topic, b"x") for topic in topics])
    began = time.process_time()
    assert set(position.ids(batch, "main", 0, 1, 2, is_whole=True)) == {None}
    assert time.process_time() - began < 0.5  # it was minutes


@pytest.mark.parametrize("count", [100, 400, 600, 700])
def test_an_id_fits_or_there_is_none(count: int) -> None:
    topics = [f"many/{number}" for number in range(count)]
    position = EventIds(topics, Start("latest"), SentLists())
    position.begin((), [PartitionPlace(topic, 0, 1, 1) for topic in topics])
    ids = [position.current() for _ in range(2)]
    assert ids[0] == ids[1]
    assert ids[0] is None or len(ids[0]) <= ID_CHARS_MAX
    assert (ids[0] is not None) == (count <= 400)


@pytest.mark.parametrize(
    ("count", "payload_bytes"), [(20_000, 20), (8_000, 500)], ids=["small", "larger"]
)
@in_loop
async def test_an_unread_stream_holds_little_more_than_a_block(
    count: int, payload_bytes: int
) -> None:
    async with open_scene() as scene, scene.stream("a", start="earliest") as stream:
        payloads = [b"%0*d" % (payload_bytes, number) for number in range(count)]
        batch = Batch.from_messages([Message("a", payload) for payload in payloads])
        block_bytes = len(batch.pack())
        del payloads
        tracemalloc.start(1)
        try:
            await scene.broker.publish(batch)
            del batch
            [connection] = scene.listener.server.connections
            await until(lambda: connection.flow.write_paused)
            # The block as it is stored in memory, and the copy that is being written.
            held_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held_bytes < 2 * block_bytes + 512 * 1024
        texts = await stream.texts(count)
        assert [int(text) for text in texts] == list(range(count))
