"""`--json`: one JSON document, whose names are documented in docs/cli.md and stay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runnel.cli.main import run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def printed(words: list[str], capfd: pytest.CaptureFixture[str]) -> Any:
    capfd.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def documented(command: str) -> set[str]:
    """The names of a command's fields in the page's table."""
    (row,) = re.findall(rf"^\| `{re.escape(command)}` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return set(re.findall(r"`([a-z_]+)`", row))


def test_topics_are_a_list_of_documented_objects(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "json/a", "x", "y", "-q"]) == 0
    (topic,) = printed(["topics", "json/*"], capfd)
    assert set(topic) == documented("topics")
    assert (topic["name"], topic["messages"]) == ("json/a", 2)
    assert printed(["topics", "none/*"], capfd) == []
    shown = printed(["topics", "show", "json/a"], capfd)
    assert shown["partitions"][0]["next_offset"] == 3


def test_cursors_are_a_list_of_documented_objects(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "json/b", "x", "-q"]) == 0
    assert run(["cursors", "set", "json", "json/b=1"]) == 0
    (cursor,) = printed(["cursors", "list", "json"], capfd)
    assert set(cursor) | set(cursor["places"][0]) == documented("cursors")
    assert cursor["places"][0]["offset"] == 1


def test_subscriptions_are_a_list_of_documented_objects(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "json/c", "x", "-q"]) == 0
    assert run(["subscriptions", "make", "json", "json/c", "--start", "earliest"]) == 0
    (subscription,) = printed(["subscriptions", "list", "json"], capfd)
    assert set(subscription) | set(subscription["members"][0]) == documented("subscriptions")
    assert subscription["members"][0]["backlog"] == 1
    assert printed(["subscriptions", "show", "json"], capfd)["partitions"][0]["topic"] == "json/c"


def test_report_of_a_broker_is_one_document(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    report = printed(["top", "--once"], capfd)
    assert set(report) == documented("top --once")
    assert report["broker"]["node"] == "node-1"
    assert isinstance(report["topics"]["topics"], list)


def test_tokens_are_a_list_of_documented_objects(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path)]
    assert run(["token", "add", "reader", "--allow", "read:json/*", *data]) == 0
    (token,) = printed(["token", "list", *data], capfd)
    assert set(token) == documented("token list")
    assert (token["name"], token["allow"]) == ("reader", ["read:json/*"])


def test_settings_are_an_object_of_documented_objects(capfd: pytest.CaptureFixture[str]) -> None:
    settings = printed(["config", "show", "--set", "limits.tags_max=5"], capfd)
    assert set(settings["limits.tags_max"]) == documented("config show")
    assert settings["limits.tags_max"]["value"] == 5
