"""`runnel topics` and `runnel cursors` against a real broker."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys

import pytest

from runnel.cli.commands.topics import partition_table, topic_lines, topic_table
from runnel.cli.main import run
from runnel.formats.wire import Owner, PartitionState, TopicState
from tests.cli.conftest import environment

STATE = TopicState(
    "sensors/a", "disk", "sensors", 1, 1500, 2, "sensors/*", False, "7d",
    (PartitionState(501, 1501, Owner("sensors", 0, 3)),),
)  # fmt: skip


def test_topic_is_shown_in_lines_and_a_table() -> None:
    assert topic_lines(STATE) == [
        "topic:       sensors/a",
        "keep:        disk",
        "journal:     sensors",
        "rule:        sensors/*",
        "retain:      7d",
        "last value:  no",
        "messages:    1,500 so far",
        "subscribers: 2",
        "partitions:  1 partition",
    ]
    assert partition_table(STATE).lines() == [
        "partition  first  next   kept  shard      epoch  owner",
        "        0    501  1501  1,000  sensors/0      3  this node",
    ]


def test_long_list_has_journal_rule_and_retention() -> None:
    assert topic_table([STATE], is_long=True).lines() == [
        "topic      keep  partitions  messages  subscribers  journal  rule       retain  last value",
        "sensors/a  disk           1     1,500            2  sensors  sensors/*  7d      no",
    ]


@pytest.fixture
def topics(url: str) -> None:
    for topic in ("list/a", "list/b", "memory/list"):
        assert run(["pub", topic, "x", "-q"]) == 0


def test_topics_are_listed_by_pattern(topics: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["topics", "list/*"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "topic   keep  partitions  messages  subscribers"
    assert [line.split()[0] for line in lines[1:]] == ["list/a", "list/b"]
    assert run(["topics", "list", "*list"]) == 0
    assert "memory/list  memory" in capfd.readouterr().out


def test_system_topics_are_listed_when_asked_for(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["topics", "list/a"]) == 0
    assert run(["topics"]) == 0
    assert "!system" not in capfd.readouterr().out
    # Until the broker's first report there is none.
    assert run(["sub", "!system/metrics/broker", "--from", "last", "--count", "1"]) == 0
    assert run(["topics", "!*"]) == 0
    assert "!system/metrics/broker" in capfd.readouterr().out


def test_no_match_is_reported(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["topics", "nothing*"]) == 0
    assert capfd.readouterr() == ("", "no topic matches nothing*\n")
    assert run(["topics", "nothing*", "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == []


def test_json_has_names_for_everything(topics: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["topics", "list/a", "--format", "json"]) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert (listed["name"], listed["keep"], listed["journal"]) == ("list/a", "disk", "main")
    assert run(["topics", "show", "list/a", "--format", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    (partition,) = shown.pop("partitions")
    assert shown == listed
    assert (partition["partition"], partition["first_offset"]) == (0, 1)
    assert partition["owner"]["journal"] == "main"


def test_show_has_the_offsets_of_each_partition(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "split/show", "x", "-q"]) == 0
    assert run(["topics", "show", "split/show"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^rule: +split/\*$", out, re.MULTILINE)
    assert re.search(r"^ +1 +1 +\d", out, re.MULTILINE)


def test_purged_topic_stays_and_deleted_one_is_gone(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "doomed", "1", "2", "-q"]) == 0
    assert run(["topics", "purge", "doomed", "--yes"]) == 0
    assert capfd.readouterr().err == "purged doomed\n"
    assert run(["poll", "doomed"]) == 0
    assert capfd.readouterr() == ("", "next offset: 3\n")
    assert run(["topics", "delete", "doomed", "-y"]) == 0
    assert capfd.readouterr().err == "deleted doomed\n"
    assert run(["topics", "show", "doomed"]) == 2
    assert "doomed" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["delete", "purge"])
def test_nothing_is_lost_without_a_yes(
    verb: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "dear", "1", "-q"]) == 0
    assert run(["topics", verb, "dear"]) == 2
    assert "There is no terminal to ask at: say so with --yes" in capfd.readouterr().err
    assert run(["topics", "show", "dear"]) == 0


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        (b"y\n", 0, "deleted asked"),
        (b"\n", 1, "nothing was changed"),
        (b"\x04", 1, "nothing was changed"),  # the end of input
        (b"\x03", 130, "interrupted"),  # Ctrl-C
    ],
)
def test_terminal_is_asked_first(answer: bytes, code: int, told: str, url: str) -> None:
    assert run(["pub", "asked", "1", "-q"]) == 0
    child, terminal = pty.fork()
    if child == 0:
        words = [sys.executable, "-m", "runnel", "topics", "delete", "asked"]
        os.execve(sys.executable, words, environment(url))
    shown = b""
    try:
        while True:
            assert select.select([terminal], [], [], 30)[0], shown
            shown += os.read(terminal, 4096)
            if answer and shown.endswith(b"[y/N] "):
                os.write(terminal, answer)
                answer = b""
    except OSError:  # no process has the terminal open any more
        os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert b"Delete the topic asked and all of its messages? [y/N] " in shown
    assert shown.decode().splitlines()[-1].endswith(told)
    assert os.waitstatus_to_exitcode(status) == code


def test_cursor_is_set_listed_and_removed(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["pub", "read/a", "1", "2", "3", "-q"]) == 0
    assert run(["pub", "split/read", "x", "--key", "k", "-q"]) == 0
    assert run(["cursors", "set", "reader", "read/a=2", "split/read:1=1"]) == 0
    assert run(["cursors"]) == 0
    lines = [re.split(r" {2,}", line) for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == ["cursor", "place", "next", "lag (messages)", "updated"]
    assert sorted(line[:3] for line in lines[1:]) == [
        ["reader", "read/a[0]", "2"],
        ["reader", "split/read[1]", "1"],
    ]
    assert run(["cursors", "reader", "--format", "json"]) == 0
    (cursor,) = json.loads(capfd.readouterr().out)
    assert {"topic": "read/a", "partition": 0, "offset": 2, "lag": 2} in cursor["places"]
    assert run(["cursors", "remove", "reader"]) == 0
    assert capfd.readouterr().err == "removed reader\n"
    assert run(["cursors"]) == 0
    assert capfd.readouterr().err == "there are no cursors\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["list", "nobody"], "there is no cursor 'nobody'"),
        (["remove", "nobody"], "nobody"),
        (["set", "c", "read/unknown=1"], "read/unknown"),
        (["set", "c", "a"], "write TOPIC=OFFSET or TOPIC:PARTITION=OFFSET"),
        (["set", "c", "a=1", "a:0=2"], "a partition is named twice"),
    ],
)
def test_wrong_cursor_is_refused_in_a_line(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["cursors", *words]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert told.count("\n") == 1
