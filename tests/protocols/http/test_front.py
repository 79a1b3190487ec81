"""Access control: tokens, web pages of other sites, and requests that no resource accepts."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest

from tests.protocols.http.scene import in_loop, open_scene, until
from tests.protocols.http.talker import Talker
from tests.security.keyring import Keyring

SECOND_NS = 1_000_000_000


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@in_loop
async def test_a_token_has_its_rights_and_no_others(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("reader", "read:a")
    async with open_scene(security=keys.settings().security) as scene:
        await scene.publish("a", b"1")
        headers = _bearer(token)
        assert (await scene.http.get("/v1/topics/a/messages", headers=headers)).status_code == 200
        refused = await scene.http.get("/v1/topics/b/messages", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        refused = await scene.http.post("/v1/topics/a/messages", content=b"x", headers=headers)
        assert refused.status_code == 403
        for path in ("/v1/statistics", "/v1/connections", "/v1/policies?topic=b"):
            assert (await scene.http.get(path, headers=headers)).status_code == 403
        [read] = scene.listener.server.rows().values()
        row = read()
        assert row.token == "reader"


@in_loop
async def test_without_a_token_nothing_is_told_but_health_and_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = Keyring(tmp_path)
    keys.add("reader", "read:*")
    async with open_scene(security=keys.settings().security) as scene:
        for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
            assert (await scene.http.get(path)).status_code == 200
        for headers in (
            {},
            _bearer("runnel_nonsense"),
            {"authorization": "Basic YTpi"},
            _bearer(keys.texts["reader"][:-1]),
        ):
            asking = asyncio.create_task(scene.http.get("/v1/topics", headers=headers))
            while not asking.done():
                scene.clock.advance(SECOND_NS)
                await asyncio.sleep(0.001)
            answer = await asking
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert not any(secret in caplog.text for secret in keys.secrets)


@in_loop
async def test_wrong_tokens_are_answered_later_and_later(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    async with open_scene(security=keys.settings().security) as scene:
        asking = asyncio.create_task(scene.http.get("/v1/topics", headers=_bearer("runnel_x")))
        await until(lambda: scene.broker.metrics.counters.requests == 1)
        assert not asking.done()
        scene.clock.advance(10 * SECOND_NS)
        assert (await asking).status_code == 401


@in_loop
async def test_missing_tokens_are_answered_at_once_however_many(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    async with open_scene(security=keys.settings().security) as scene:
        for headers in 10 * [{}, {"authorization": "Basic YTpi"}]:
            # The clock stands still: a request that had to wait would wait for ever.
            assert (await scene.http.get("/v1/topics", headers=headers)).status_code == 401


@in_loop
async def test_a_tokens_calls_under_way_have_a_limit(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    headers = _bearer(keys.add("reader", "read:*", connections_max=1))
    async with open_scene(security=keys.settings().security) as scene:
        await scene.publish("a", b"1")
        path = "/v1/topics/a/messages?offset=2&wait=20"
        polling = asyncio.create_task(scene.http.get(path, headers=headers))
        await until(lambda: scene.listener.server.stream_count == 1)
        refused = await scene.http.get("/v1/topics", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (429, "limit_exceeded")
        await scene.publish("a", b"2")
        await polling
        assert (await scene.http.get("/v1/topics", headers=headers)).status_code == 200


@in_loop
async def test_a_revoked_token_ends_a_long_poll(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    headers = _bearer(keys.add("reader", "read:*"))
    async with open_scene(security=keys.settings().security) as scene:
        await scene.publish("a", b"1")
        path = "/v1/topics/a/messages?offset=2&wait=1h"
        polling = asyncio.create_task(scene.http.get(path, headers=headers))
        await until(lambda: scene.listener.server.stream_count == 1)
        keys.revoke("reader")
        scene.clock.advance(SECOND_NS)
        assert (await polling).status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:7480",
        "127.0.0.1",
        "127.0.0.2:80",
        "[::1]:7480",
        "a.localhost",
        "10.0.0.1",
        socket.gethostname(),
    ],
)
@in_loop
async def test_this_machine_is_known_by_its_names(host: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.get("/v1/topics", headers={"host": host})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:7480", ""]
)
@in_loop
async def test_a_page_does_not_come_in_by_a_name_of_its_own(host: str) -> None:
    async with open_scene() as scene:
        for path in ("/v1/topics", "/healthz"):
            answer = await scene.http.get(path, headers={"host": host})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        posted = await scene.http.post(
            "/v1/topics/a/messages", content=b"x", headers={"host": host}
        )
        assert posted.status_code == 403
        assert await scene.broker.topics.list() == ([], True)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost:1", "http://[", ""]
)
@in_loop
async def test_pages_of_other_sites_may_not_ask(origin: str) -> None:
    async with open_scene() as scene:
        posted = await scene.http.post(
            "/v1/topics/a/messages", content=b"x", headers={"origin": origin}
        )
        assert (posted.status_code, posted.json()["code"]) == (403, "forbidden")
        own = await scene.http.post(
            "/v1/topics/a/messages", content=b"x", headers={"origin": scene.url}
        )
        assert own.status_code == 200


@in_loop
async def test_with_tokens_names_and_sites_do_not_matter(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    headers = _bearer(keys.add("reader", "read:*"))
    async with open_scene(security=keys.settings().security) as scene:
        answer = await scene.http.get(
            "/v1/topics",
            headers={**headers, "host": "broker.example", "origin": "https://ui.example"},
        )
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


@in_loop
async def test_compressed_bodies_are_not_taken() -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(
            "/v1/topics/a/messages", content=b"x", headers={"content-encoding": "gzip"}
        )
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


@in_loop
async def test_resources_that_are_not_there_and_methods_that_they_do_not_have() -> None:
    async with open_scene() as scene:
        missing = await scene.http.get("/v2/nothing")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        wrong = await scene.http.patch("/v1/topics/a/messages")
        assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
        assert set(wrong.headers["allow"].split(", ")) == {"DELETE", "GET", "OPTIONS", "POST"}
        options = await scene.http.options("/v1/topics/a/messages")
        assert options.headers["allow"] == "DELETE, GET, OPTIONS, POST"
        assert scene.broker.metrics.counters.requests_failed == 2


@in_loop
async def test_a_bug_is_told_without_its_insides_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_scene() as scene:

        def broken() -> None:
            raise RuntimeError("the secret inside")

        monkeypatch.setattr(scene.broker.monitor, "troubles", broken)
        answer = await scene.http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (500, "internal")
        assert "secret" not in answer.text
        (line,) = [each for each in caplog.records if each.exc_info is not None]
        assert "peer=127.0.0.1:" in line.getMessage()
        assert (await scene.http.get("/healthz")).status_code == 200


@in_loop
async def test_a_stream_whose_token_was_changed_is_told_so_and_to_connect_again(
    tmp_path: Path,
) -> None:
    keys = Keyring(tmp_path)
    headers = _bearer(keys.add("reader", "read:*"))
    async with open_scene(security=keys.settings().security) as scene:
        async with scene.http.stream("GET", "/v1/stream?pattern=a", headers=headers) as answer:
            await until(lambda: scene.listener.server.stream_count == 1)
            keys.change("reader", "read:b")
            scene.clock.advance(SECOND_NS)
            text = (await answer.aread()).decode()
        *_, kind, data = text.strip().splitlines()
        problem = json.loads(data.removeprefix("data: "))
        assert kind == "event: ended"
        assert (problem["code"], problem["retriable"]) == ("closed", True)
        assert problem["title"] == "Connect again"
        assert problem["detail"] == "the rights of token 'reader' were changed; connect again"


@in_loop
async def test_a_token_in_the_query_is_for_streams_alone(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("reader", "read:*")
    async with open_scene(security=keys.settings().security) as scene:
        async with scene.http.stream("GET", f"/v1/stream?pattern=a&access_token={token}") as answer:
            assert answer.status_code == 200
        talker = await Talker.connect(scene.listener.address)
        talker.ask("GET", f"/v1/topics?access_token={token}")
        await until(lambda: scene.broker.metrics.counters.requests == 2)
        scene.clock.advance(10 * SECOND_NS)
        assert (await talker.hear()).status == 401
        talker.vanish()
