"""The page at /docs works for a visitor."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from runnel.protocols.http.app import HANDLERS
from runnel.protocols.http.resources.openapi import openapi_document
from runnel.protocols.http.resources.page import _PAGE
from tests.protocols.http.scene import in_loop, open_scene
from tests.security.keyring import Keyring

BROWSER = Path(__file__).with_name("page_in_node.js")
SECONDS_MAX = 60
ANSWER = (
    '{"messages":[{"text":"a, {b}: \\"c\\" \\\\","receive_time_ns":1763280000123456423}],"gaps":[],'
    '"end_offset":9223372036854775807,"is_new":true,"ratio":1.50}'
)
INDENTED = r"""{
  "messages": [
    {
      "text": "a, {b}: \"c\" \\",
      "receive_time_ns": 1763280000123456423
    }
  ],
  "gaps": [],
  "end_offset": 9223372036854775807,
  "is_new": true,
  "ratio": 1.50
}"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """The page after a visitor sends one request, and opens and stops a stream twice."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = re.search(rb"<script>(.*?)</script>", _PAGE, re.DOTALL)
    assert script is not None
    given = {
        "script": script[1].decode(),
        "openapi": openapi_document(HANDLERS).decode(),
        "answer": ANSWER,
    }
    done = subprocess.run(
        ["node", BROWSER],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_answer_is_indented_and_its_numbers_stay_whole(seen: dict[str, Any]) -> None:
    assert seen["answer"] == INDENTED
    assert not seen["isReadStoppable"]


def test_a_second_stream_stops_the_first_and_can_be_stopped(seen: dict[str, Any]) -> None:
    second = seen["afterSecond"]
    assert (second["aborted"], second["isStopThere"]) == ([True, False], True)
    assert "event of stream 2" in second["text"]
    assert "event of stream 1" not in second["text"]
    stopped = seen["afterStop"]
    assert (stopped["aborted"], stopped["isStopThere"]) == ([True, True], False)
    assert stopped["text"].endswith("(stopped)")


def test_what_is_between_backticks_is_shown_as_code(seen: dict[str, Any]) -> None:
    assert "`" not in seen["text"]
    assert {"caught_up", "!system/metrics/broker"} <= {*seen["codes"]}


def test_an_operation_is_named_by_what_it_does(seen: dict[str, Any]) -> None:
    assert seen["summary"].startswith("GET/v1/streamRead messages as they come")


@in_loop
async def test_the_root_is_a_page_for_browsers_and_an_index_for_programs(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    async with open_scene(security=keys.settings().security) as scene:
        await scene.publish("secret/topic", b"x")
        # As a browser asks, and without a token.
        accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
        page = await scene.http.get("/", headers={"accept": accept})
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
        assert "script-src" not in page.headers["content-security-policy"]
        assert "<script" not in page.text
        assert not re.search(r"https?://|\bsrc=", page.text)  # it refers to no other site
        index = await scene.http.get("/")
        assert index.headers["content-type"] == "application/json"
        links = index.json()["links"].values()
        for link in links:
            assert f'href="{link}"' in page.text
            assert (await scene.http.get(link)).status_code in (200, 401)
        # Nothing of this broker is told: neither what it has, nor what it is called.
        for text in (page.text, index.text):
            for secret in ("secret", "node-1", version("runnel")):
                assert secret not in text
        for answer in (page, index):
            assert answer.headers["vary"] == "accept"
