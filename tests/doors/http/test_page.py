"""The page at /docs does what it should in the hands of a visitor."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runnel.doors.http.app import HANDLERS
from runnel.doors.http.openapi import openapi_document
from runnel.doors.http.page import _PAGE

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
    """What a visitor sees who sends one request, and opens a stream twice and stops it."""
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
