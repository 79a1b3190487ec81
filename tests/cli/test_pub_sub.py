"""`runnel pub` and `runnel sub` against a real broker."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runnel.cli.main import run
from runnel.cli.render.message_output import gap_text
from runnel.formats.wire import GapState
from tests.cli.conftest import environment, running, serving

SUMMARY = r"{count} messages?, [\d.]+ [KM]?i?B in \d+\.\d\d s( \([\d,]+ messages/s\))?\n"


def published(count: int) -> re.Pattern[str]:
    return re.compile(SUMMARY.format(count=f"{count:,}"))


def read_back(topic: str, count: int, capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert run(["sub", topic, "--from", "earliest", "--count", str(count), "--timeout", "20"]) == 0
    return capfd.readouterr().out.splitlines()


def command(*words: str, url: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "runnel", *words],
        input=given,
        capture_output=True,
        env=environment(url),
        check=False,
        timeout=60,
    )


# --- pub ---


def test_arguments_are_messages(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["pub", "arguments/a", "one", "zwölf", ""]) == 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert published(3).fullmatch(captured.err)
    assert read_back("arguments/a", 3, capfd) == [
        "arguments/a[0]@1 one",
        "arguments/a[0]@2 zwölf",
        "arguments/a[0]@3 ",
    ]


def test_labels_are_those_of_every_message(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["pub", "labels/a", "1", "2", "--key", "k", "--tag", "unit=C", "--tag", "x=a=b"]
    words += ["--event-time", "2026-05-01T12:30:00.000000007Z", "--level", "received", "-q"]
    assert run(words) == 0
    assert capfd.readouterr().err == ""
    assert run(["sub", "labels/a", "--from", "1", "--count", "2", "--format", "json"]) == 0
    documents = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for number, document in enumerate(documents, 1):
        assert document["payload"] == str(number)
        assert document["offset"] == number
        assert document["key"] == "k"
        assert document["tags"] == {"unit": "C", "x": "a=b"}
        assert document["event_time"] == "2026-05-01T12:30:00.000000007Z"
        assert document["receive_time_ns"] > document["event_time_ns"]


def test_lines_of_standard_input_are_messages(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended = command("pub", "lines/a", "--batch", "2", url=url, given=b"one\n\n\xff\nlast")
    assert ended.returncode == 0
    assert published(4).fullmatch(ended.stderr.decode())
    assert read_back("lines/a", 4, capfd) == [
        "lines/a[0]@1 one",
        "lines/a[0]@2 ",
        r"lines/a[0]@3 \xff",
        "lines/a[0]@4 last",
    ]


def test_raw_input_is_one_message(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("pub", "raw/a", "--raw", url=url, given=b"one\ntwo\n").returncode == 0
    assert read_back("raw/a", 1, capfd) == [r"raw/a[0]@1 one\ntwo\n"]


def test_lines_of_a_file_are_messages_and_come_back_as_they_were(
    url: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    lines = b"".join(b"line %d of a file\n" % number for number in range(20_000))
    file = tmp_path / "lines.txt"
    file.write_bytes(lines)
    assert run(["pub", "file/a", "--file", str(file)]) == 0
    assert published(20_000).fullmatch(capfdbinary.readouterr().err.decode())
    assert run(["sub", "file/a", "--from", "earliest", "--count", "20000", "--format", "raw"]) == 0
    assert capfdbinary.readouterr().out == lines


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a", "x", "--file", "f"], "payloads were given as arguments, so --file has no effect"),
        (["a", "x", "--raw"], "payloads were given as arguments, so --raw has no effect"),
        (["a", "x", "--tag", "unit"], "--tag 'unit': write it as NAME=VALUE"),
        (["a", "x", "--event-time", "soon"], "--event-time: 'soon' is not a time"),
        (["a", "--file", "/no/such/file"], "--file /no/such/file: No such file or directory"),
        (["a", "--file", "/"], "--file /: it is a directory"),
        (["a\x1b", "x"], "topic"),
        (["a", "x", "--url", "http://x"], "'http://x' is not a Runnel URL"),
        (
            ["a", "x", "--level", "often"],
            "--level: 'often' is no level of acknowledgement; none, rec",
        ),
        (["a", "x", "--level", "fsync"], "none, received, stored are; did you mean stored?"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", *words]) == 2
    captured = capfd.readouterr()
    assert problem in captured.err
    assert "\x1b" not in captured.err


def test_message_that_is_too_large_is_refused(url: str) -> None:
    ended = command("pub", "large/a", "--raw", url=url, given=bytes(2 << 20))
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: ")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.parametrize("words", [["pub", "a", "x"], ["sub", "a"], ["topics"], ["top", "--once"]])
def test_without_a_broker_it_is_said_how_to_start_one(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--url", "runnel://127.0.0.1:1"]) == 3
    told = capfd.readouterr().err
    assert told.startswith("error: cannot connect to 127.0.0.1:1: connection refused")
    assert "`runnel serve` starts one" in told
    assert told.count("\n") == 1


# --- sub ---


def test_patterns_choose_topics_and_last_gives_the_newest(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for topic in ("some/a", "some/b", "other"):
        assert run(["pub", topic, "old", f"new of {topic}", "-q"]) == 0
    assert run(["sub", "some/*", "none*", "--from", "last", "--timeout", "0.2"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "some/a[0]@2 new of some/a",
        "some/b[0]@2 new of some/b",
    ]


def test_reading_begins_at_an_offset_or_a_time(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["pub", "begin/a", "1", "2", "3", "-q"]) == 0
    for begin, expected in (("2", ["2", "3"]), ("1h", ["1", "2", "3"]), ("2200-01-01", [])):
        words = ["sub", "begin/a", "--from", begin, "--timeout", "0.2", "--format", "raw"]
        assert run(words) == 0
        assert capfd.readouterr().out.split() == expected


def test_fewer_messages_than_wanted_are_a_failure(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "few/a", "1", "-q"]) == 0
    assert run(["sub", "few/a", "--from", "1", "--count", "2", "--timeout", "0.1"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "few/a[0]@1 1\n"
    assert captured.err == "error: 1 message of 2 came; nothing for 0.1 s\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a[", "b"], "a["),
        (["a", "--from", "begining"], "is no place to begin"),
        (["a", "--from", "newest"], "did you mean latest?"),
        (["a", "--from", "beginning"], "did you mean earliest?"),
        (["a", "b", "--from", "5"], "needs one topic"),
        (["a", "--format", "xml"], "'xml' is not one of"),
        ([], "Missing argument"),
    ],
)
def test_wrong_subscription_is_refused(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["sub", *words]) == 2
    assert problem in capfd.readouterr().err


def test_live_messages_are_printed_at_once_and_ctrl_c_ends_without_a_traceback(url: str) -> None:
    assert run(["pub", "flow/a", "first", "-q"]) == 0
    with running(["sub", "flow/*", "--from", "earliest"], url) as reader:
        assert reader.line() == "flow/a[0]@1 first"
        assert run(["pub", "flow/b", "second", "-q"]) == 0
        assert reader.line() == "flow/b[0]@1 second"
        assert reader.end(signal.SIGINT) == (130, "interrupted\n")


def test_pattern_of_mqtt_is_warned_of_with_the_glob_that_was_meant(url: str) -> None:
    ended = command("sub", "habit/#", "--timeout", "0", url=url)
    assert ended.stderr.decode() == (
        "warning: pattern 'habit/#': no topic has this name, and # stands for itself in a pattern; "
        "did you mean 'habit/*'?\n"
    )


def test_reader_says_that_the_broker_is_gone_and_when_it_is_back(tmp_path: Path) -> None:
    reading = ["sub", "a", "--from", "earliest"]
    with serving(tmp_path) as (broker, url), running(reading, url) as reader:
        assert run(["pub", "a", "before", "-q", "--url", url]) == 0
        assert reader.line() == "a[0]@1 before"
        broker.process.kill()
        broker.process.wait()
        address = url.removeprefix("runnel://")
        with serving(tmp_path, "--listen", address):
            assert run(["pub", "a", "after", "-q", "--url", url]) == 0
            assert reader.line() == "a[0]@2 after"
            code, told = reader.end(signal.SIGINT)
    assert code == 130
    gone, back, ended = told.splitlines()
    assert gone.startswith(f"gone: not connected to {address}: ")
    assert gone.endswith("; trying again")
    assert back == f"back: connected to {address} again"
    assert ended == "interrupted"


def test_lines_typed_one_by_one_leave_one_by_one(url: str) -> None:
    assert run(["pub", "typed/a", "first", "-q"]) == 0
    with (
        running(["sub", "typed/a", "--from", "1", "--format", "raw"], url) as reader,
        running(["pub", "typed/a"], url) as writer,
    ):
        assert reader.line() == "first"
        for word in ("one", "two"):
            writer.write(f"{word}\n")
            assert reader.line() == word
        code, told = writer.end(signal.SIGINT)
    assert (code, told) == (130, "interrupted\n")


def test_reader_that_leaves_early_hears_no_complaint(url: str, tmp_path: Path) -> None:
    file = tmp_path / "many.txt"
    file.write_bytes(b"a line that fills the pipe\n" * 20_000)
    assert run(["pub", "head/a", "--file", str(file), "-q"]) == 0
    ended = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m runnel sub head/a --from 1 | head -n 2"],
        env=environment(url),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.stderr == b""
    assert ended.stdout.count(b"\n") == 2


def test_reader_that_does_not_read_holds_up_only_itself(url: str, tmp_path: Path) -> None:
    """Ctrl-C ends it although no process reads its output."""
    file = tmp_path / "many.txt"
    file.write_bytes(b"a line that fills the pipe\n" * 20_000)
    assert run(["pub", "stuck/a", "--file", str(file), "-q"]) == 0
    with running(["sub", "stuck/a", "--from", "1"], url) as reader:
        assert reader.line() == "stuck/a[0]@1 a line that fills the pipe"
        reader.process.send_signal(signal.SIGINT)
        assert reader.process.wait(timeout=30) == 130


def test_latest_means_what_comes_from_now_on(url: str) -> None:
    assert run(["pub", "now/a", "old", "-q"]) == 0
    with running(["sub", "now/a", "live/now", "--format", "raw"], url) as reader:
        # These are not stored: one that arrives shows that the subscription exists.
        while not reader.has_output(within_s=0.05):
            assert run(["pub", "live/now", "tick", "-q"]) == 0
        assert run(["pub", "now/a", "new", "-q"]) == 0
        while (line := reader.line()) == "tick":
            continue
        assert line == "new"
        reader.end(signal.SIGINT)


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (
            GapState("overflow", 3, "a", 1, 5, 8),
            "3 messages of a[1] missed by overflow, offsets 5 to 7",
        ),
        (
            GapState("restart", 0, text="the shard\x1b began anew"),
            r"an unknown number of messages missed by restart: the shard\x1b began anew",
        ),
    ],
)
def test_gap_is_reported_in_a_line(gap: GapState, text: str) -> None:
    assert gap_text(gap) == text
