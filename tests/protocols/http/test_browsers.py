"""Web pages: which of them a browser may let use the broker, and what the broker tells the browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnel.config import HttpSettings
from runnel.errors import SettingsError
from tests.protocols.http.scene import in_loop, open_scene
from tests.security.keyring import Keyring

UI = "https://ui.example"
CORS = HttpSettings(cors_origins=(UI, "http://localhost:3000"))
ASK = {"origin": UI, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something-new"])
@in_loop
async def test_a_request_that_another_site_caused_is_refused_without_an_origin_too(
    site: str,
) -> None:
    async with open_scene() as scene:
        for method, path in (
            ("POST", "/v1/topics/a/messages"),
            ("PUT", "/v1/subscriptions/s"),
            ("DELETE", "/v1/topics/a"),
            ("GET", "/v1/stream?pattern=a"),
        ):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
            answer = await scene.http.request(method, path, content=b"x", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert "http.cors_origins" in answer.json()["detail"]
        # A user follows a link: reading is allowed, writing (a form) is not.
        followed = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
        assert (await scene.http.get("/v1/topics", headers=followed)).status_code == 200
        form = await scene.http.post("/v1/topics/a/messages", content=b"x", headers=followed)
        assert form.status_code == 403
        assert await scene.broker.topics.list() == ([], True)


@pytest.mark.parametrize("site", ["same-origin", "none"])
@in_loop
async def test_the_brokers_own_pages_and_the_user_are_let_in(site: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.post(
            "/v1/topics/a/messages", content=b"x", headers={"sec-fetch-site": site}
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.example",
        "[::1]:7480evil.example",
        "[::1",
        "127.0.0.1:",
        "127.0.0.1:7480:1",
        "user@localhost",
        "localhost/evil.example",
        "local host",
        "[evil.example]",
    ],
)
@in_loop
async def test_what_is_no_host_is_refused(host: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.get("/v1/topics", headers={"host": host})
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("host", ["[127.0.0.1]", "[1::2::3]", "0x7f.1", "1.2.3"])
@in_loop
async def test_what_only_looks_like_an_address_is_refused(host: str) -> None:
    async with open_scene() as scene:
        answer = await scene.http.get("/v1/topics", headers={"host": host})
        assert answer.status_code == 403


@in_loop
async def test_a_listener_for_others_without_tokens_checks_names_too() -> None:
    http = HttpSettings(allow_remote=True, hosts=("runnel", "*.Internal.example"))
    async with open_scene(http=http) as scene:
        for host in ("runnel:7480", "a.internal.example", "RUNNEL", "10.0.0.1:7480", "localhost"):
            answer = await scene.http.get("/v1/topics", headers={"host": host})
            assert answer.status_code == 200
        for host in ("evil.example", "internal.example", "evilinternal.example"):
            answer = await scene.http.get("/v1/topics", headers={"host": host})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert "http.hosts" in answer.json()["detail"]


@in_loop
async def test_a_setting_lets_any_name_in_and_still_no_other_site() -> None:
    async with open_scene(http=HttpSettings(allow_remote=True, hosts=("*",))) as scene:
        host = {"host": "runnel:7480"}
        assert (await scene.http.get("/v1/topics", headers=host)).status_code == 200
        host["origin"] = "http://evil.example"
        assert (await scene.http.get("/v1/topics", headers=host)).status_code == 403


@pytest.mark.parametrize(
    ("http", "named"),
    [
        (HttpSettings(hosts=("http://a.example",)), 'http.hosts has "http://a.example"'),
        (HttpSettings(hosts=("a.example:80",)), 'http.hosts has "a.example:80"'),
        (HttpSettings(hosts=("a.*",)), 'http.hosts has "a.*"'),
        (HttpSettings(cors_origins=("ui.example",)), 'http.cors_origins has "ui.example"'),
        (HttpSettings(cors_origins=("https://ui.example/",)), 'has "https://ui.example/"'),
        (HttpSettings(cors_origins=("https://UI.example",)), 'has "https://UI.example"'),
        (HttpSettings(cors_origins=("null",)), 'http.cors_origins has "null"'),
        (HttpSettings(cors_origins=("*",)), "nobody is asked for a token"),
    ],
)
@in_loop
async def test_settings_that_are_no_hosts_or_origins_are_refused_at_the_start(
    http: HttpSettings, named: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        async with open_scene(http=http):
            pass
    assert named in str(refused.value)


@in_loop
async def test_without_the_setting_no_page_is_told_that_it_may() -> None:
    async with open_scene() as scene:
        for method, path in (("GET", "/v1/topics"), ("OPTIONS", "/v1/topics/a/messages")):
            headers = {**ASK, "access-control-request-method": "POST"}
            answer = await scene.http.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


@in_loop
async def test_pages_of_listed_origins_may_ask_and_are_told_so() -> None:
    async with open_scene(http=CORS) as scene:
        asked = await scene.http.options(
            "/v1/topics/a/messages",
            headers={
                **ASK,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,runnel-key",
                "access-control-request-private-network": "true",
            },
        )
        assert asked.status_code == 204
        told = asked.headers
        assert told["access-control-allow-origin"] == UI
        assert "POST" in told["access-control-allow-methods"]
        assert told["access-control-allow-headers"] == "authorization,content-type,runnel-key"
        assert told["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in told
        posted = await scene.http.post("/v1/topics/a/messages", content=b"x", headers=ASK)
        missing = await scene.http.get("/v1/topics/b", headers=ASK)
        read = await scene.http.get("/v1/topics/a/messages/1", headers=ASK)
        page = await scene.http.get("/v1/topics/a/messages", headers=ASK)
        assert [each.status_code for each in (posted, missing, read, page)] == [200, 404, 200, 200]
        for answer in (posted, missing, read, page):
            assert answer.headers["access-control-allow-origin"] == UI
            assert answer.headers["access-control-expose-headers"] == "*"
            assert answer.headers["vary"] == "origin"
        async with scene.http.stream("GET", "/v1/stream?pattern=a", headers=ASK) as stream:
            assert stream.headers["access-control-allow-origin"] == UI
        # It opens nothing to other origins.
        for origin in ("https://evil.example", "https://ui.example.evil", f"{UI}:8443", "null"):
            refused = await scene.http.get("/v1/topics", headers={"origin": origin})
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers
        own = await scene.http.get("/v1/topics")
        assert "access-control-allow-origin" not in own.headers


@in_loop
async def test_a_preflight_shows_no_token_and_the_request_after_it_does(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("reader", "read:*")
    http = HttpSettings(cors_origins=("*",))
    async with open_scene(http=http, security=keys.settings().security) as scene:
        asked = await scene.http.options(
            "/v1/topics", headers={**ASK, "access-control-request-method": "GET"}
        )
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == "*"
        without = await scene.http.get("/v1/topics", headers=ASK)
        assert without.status_code == 401
        assert without.headers["access-control-allow-origin"] == "*"  # a page may know why
        shown = {**ASK, "authorization": f"Bearer {token}"}
        assert (await scene.http.get("/v1/topics", headers=shown)).status_code == 200


@in_loop
async def test_a_preflight_cannot_forge_headers() -> None:
    async with open_scene(http=CORS) as scene:
        for wanted in ("a: b", "é", "x" * 2000):
            asked = await scene.http.options(
                "/v1/topics",
                headers=[
                    (b"origin", UI.encode()),
                    (b"access-control-request-method", b"GET"),
                    (b"access-control-request-headers", wanted.encode("latin-1")),
                ],
            )
            assert asked.status_code == 204
            assert "access-control-allow-headers" not in asked.headers
