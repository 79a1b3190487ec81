"""`runnel poll` against a real broker: offsets, the position to resume from, and cursors that remember it."""

from __future__ import annotations

import json
import signal

import pytest

from runnel.cli.main import run
from tests.cli.conftest import running


def publish(topic: str, *payloads: str) -> None:
    assert run(["pub", topic, *payloads, "-q"]) == 0


def test_messages_come_from_an_offset_on_and_the_next_is_reported(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("poll/a", "1", "2", "3")
    assert run(["poll", "poll/a", "--from", "2"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "poll/a[0]@2 2\npoll/a[0]@3 3\n"
    assert captured.err == "next offset: 4\n"
    assert run(["poll", "poll/a", "--from", "4"]) == 0
    assert capfd.readouterr() == ("", "next offset: 4\n")


def test_count_is_a_limit(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("poll/count", "1", "2", "3")
    assert run(["poll", "poll/count", "--count", "2", "--format", "raw"]) == 0
    assert capfd.readouterr() == ("1\n2\n", "next offset: 3\n")


def test_reading_begins_at_a_time(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("poll/time", "1", "2")
    assert run(["poll", "poll/time", "--from", "2026-01-01", "--format", "raw"]) == 0
    assert capfd.readouterr().out == "1\n2\n"


def test_offset_that_is_gone_is_explained(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("poll/gone", "1", "2")
    assert run(["topics", "purge", "poll/gone", "--yes"]) == 0
    publish("poll/gone", "3")
    capfd.readouterr()
    assert run(["poll", "poll/gone", "--from", "1"]) == 2
    assert capfd.readouterr().err == (
        "error: poll/gone[0] begins at offset 3: 2 messages from offset 1 on are gone; "
        "continue with --from 3\n"
    )
    assert run(["poll", "poll/gone"]) == 0
    assert capfd.readouterr() == ("poll/gone[0]@3 3\n", "next offset: 4\n")


def test_offset_that_is_ahead_is_explained(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("poll/ahead", "1")
    assert run(["poll", "poll/ahead", "--from", "9"]) == 2
    assert capfd.readouterr().err == (
        "error: poll/ahead[0] has not reached offset 9: the next message will be 2; "
        "--from 2 --follow waits for it\n"
    )


def test_topic_of_several_partitions_needs_to_know_which(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "split/poll", "x", "--key", "k", "-q"]) == 0
    assert run(["poll", "split/poll", "--from", "1"]) == 2
    assert "partition" in capfd.readouterr().err
    found = ""
    for partition in ("0", "1"):
        assert run(["poll", "split/poll", "--partition", partition, "--format", "raw"]) == 0
        found += capfd.readouterr().out
    assert found == "x\n"
    assert run(["poll", "split/poll", "--partition", "2"]) == 2
    assert "split/poll" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["poll/unknown"], "poll/unknown"),
        (["a", "--from", "latest"], "write earliest, an offset"),
        (["a", "--from", "0"], "messages are numbered from 1 on"),
    ],
)
def test_wrong_request_is_refused_in_a_line(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["poll", *words]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert told.startswith("error: ")
    assert told.count("\n") == 1


def test_following_waits_for_more(url: str) -> None:
    publish("poll/follow", "1")
    with running(["poll", "poll/follow", "--follow", "--format", "raw"], url) as reader:
        assert reader.line() == "1"
        publish("poll/follow", "2", "3")
        assert [reader.line(), reader.line()] == ["2", "3"]
        assert reader.end(signal.SIGINT) == (130, "next offset: 4\ninterrupted\n")


def test_cursor_goes_on_where_it_was(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("poll/cursor", "1", "2", "3")
    words = ["poll", "poll/cursor", "--cursor", "poller", "--format", "raw"]
    assert run([*words, "--count", "2"]) == 0
    assert capfd.readouterr().out == "1\n2\n"
    assert run(words) == 0
    assert capfd.readouterr().out == "3\n"
    assert run(words) == 0
    assert capfd.readouterr() == ("", "next offset: 4\n")
    assert run([*words, "--from", "earliest", "--count", "1"]) == 0
    assert capfd.readouterr().out == "1\n"
    assert run(words) == 0
    assert capfd.readouterr().out == "2\n3\n"


def test_cursor_keeps_its_places_in_other_topics(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("poll/one", "1")
    publish("poll/two", "1", "2")
    for topic in ("poll/one", "poll/two"):
        assert run(["poll", topic, "--cursor", "both", "--count", "1"]) == 0
    capfd.readouterr()
    assert run(["cursors", "both", "--format", "json"]) == 0
    (cursor,) = json.loads(capfd.readouterr().out)
    assert {(place["topic"], place["offset"], place["lag"]) for place in cursor["places"]} == {
        ("poll/one", 2, 0),
        ("poll/two", 2, 1),
    }
