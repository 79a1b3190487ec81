"""`runnel consume` against a real broker: when it acknowledges messages, and which ones it returns."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runnel.cli.main import run
from tests.cli.conftest import Running, running


def publish(topic: str, *payloads: str) -> None:
    assert run(["pub", topic, *payloads, "-q"]) == 0


def make(name: str, *words: str) -> None:
    """A subscription of the topic of its name, that does not wait long before it tries again."""
    assert run(["subscriptions", "make", name, name, "--retry-delay", "10ms", *words]) == 0


def consumed(name: str, capfd: pytest.CaptureFixture[str], count: int, *words: str) -> list[str]:
    """The payloads of so many messages."""
    capfd.readouterr()
    assert run(["consume", name, "--format", "raw", *words, *upto(count)]) == 0
    return capfd.readouterr().out.split()


def upto(count: int) -> list[str]:
    """Ends after so many messages; the test fails, and does not hang, if they do not come."""
    return ["--count", str(count), "--timeout", "20"]


def attempts(name: str, capfd: pytest.CaptureFixture[str]) -> str:
    """How often the next message has been tried, this time counted."""
    capfd.readouterr()
    assert run(["consume", name, "--exec", "echo $MESSAGE_ATTEMPT", *upto(1)]) == 0
    return capfd.readouterr().out.strip()


def backlog(name: str, capfd: pytest.CaptureFixture[str]) -> int:
    """Messages without an acknowledgement."""
    capfd.readouterr()
    assert run(["subscriptions", "show", name, "--format", "json"]) == 0
    members = json.loads(capfd.readouterr().out)["members"]
    return sum(member["backlog"] for member in members)


def dead_letter(name: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What is said of a message that was given up, once it is."""
    assert run(["sub", f"!dead/{name}", "--from", "earliest", *upto(1)]) == 0
    capfd.readouterr()
    assert run(["dead", name, "--format", "json"]) == 0
    (letter,) = json.loads(capfd.readouterr().out)
    said: dict[str, Any] = letter["dead"]
    return said


# --- Printing ---


def test_what_was_printed_is_acknowledged_and_the_rest_comes_next_time(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("print/a", "1", "2", "3")
    assert run(["consume", "printer", "print/*", *upto(2)]) == 0
    assert capfd.readouterr() == ("print/a[0]@1 1\nprint/a[0]@2 2\n", "")
    assert backlog("printer", capfd) == 1
    assert consumed("printer", capfd, 1) == ["3"]
    assert backlog("printer", capfd) == 0


def test_json_has_every_field(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("json", "1")
    assert run(["consume", "json", "json", *upto(1), "--format", "json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["topic"], document["offset"], document["payload"]) == ("json", 1, "1")


def test_subscription_that_is_made_begins_where_it_was_told(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("begin", "1", "2", "3")
    assert run(["consume", "late", "begin", "--start", "latest", "--timeout", "0.1"]) == 0
    assert capfd.readouterr().out == ""
    assert consumed("from-offset", capfd, 2, "begin", "--start", "2") == ["2", "3"]
    assert consumed("from-time", capfd, 3, "begin", "--start", "1h") == ["1", "2", "3"]


def test_only_looking_settles_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("look", "1", "2", "3")
    make("look")
    assert consumed("look", capfd, 2, "--no-ack", "--window", "1") == ["1", "2"]
    assert backlog("look", capfd) == 3
    assert attempts("look", capfd) == "1"


def test_nacked_messages_come_again(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("nacked", "1")
    make("nacked")
    assert consumed("nacked", capfd, 2, "--nack") == ["1", "1"]
    assert attempts("nacked", capfd) == "3"


def test_every_member_of_a_multicast_gets_everything(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("news", "1", "2")
    for member in ("ann", "bob"):
        words = ["news", "--mode", "multicast", "--member", member, "--start", "earliest"]
        assert consumed("readers", capfd, 2, *words) == ["1", "2"]
    assert backlog("readers", capfd) == 0


def test_fewer_messages_than_wanted_are_a_failure(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("few", "1")
    assert run(["consume", "few", "few", "--count", "2", "--timeout", "0.1"]) == 1
    assert capfd.readouterr() == (
        "few[0]@1 1\n",
        "error: 1 message of 2 came; nothing for 0.1 s\n",
    )


def test_ctrl_c_gives_back_what_was_not_acknowledged(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("back", "1")
    make("back")
    with running(["consume", "back", "--no-ack"], url) as consumer:
        assert consumer.line() == "back[0]@1 1"
        assert consumer.end(signal.SIGINT) == (130, "interrupted\n")
    assert attempts("back", capfd) == "1"


def test_messages_that_come_later_are_printed_at_once(url: str) -> None:
    make("flow")
    with running(["consume", "flow"], url) as consumer:
        for payload in ("first", "second"):
            publish("flow", payload)
            assert consumer.line().endswith(payload)
        assert consumer.end(signal.SIGTERM) == (130, "interrupted\n")


# --- Running a command ---


def test_command_gets_the_payload_and_learns_what_it_is(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "told", "21.5", "--key", "k", "--tag", "unit=C", "-q"]) == 0
    said = "$MESSAGE_TOPIC $MESSAGE_PARTITION $MESSAGE_OFFSET $MESSAGE_KEY $MESSAGE_TAGS"
    command = f'cat; echo " {said} $MESSAGE_ATTEMPT"'
    assert run(["consume", "told", "told", "--exec", command, *upto(1)]) == 0
    assert capfd.readouterr() == ('21.5 told 0 1 k {"unit":"C"} 1\n', "")
    assert backlog("told", capfd) == 0


def test_message_without_a_key_leaves_that_variable_unset(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESSAGE_KEY", "of another message")
    publish("keyless", "1")
    command = "echo ${MESSAGE_KEY-none}"
    assert run(["consume", "keyless", "keyless", "--exec", command, *upto(1)]) == 0
    assert capfd.readouterr().out == "none\n"


def test_command_need_not_read_its_payload(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("unread", "x" * 100_000)
    assert run(["consume", "unread", "unread", "--exec", "true", *upto(1)]) == 0
    assert backlog("unread", capfd) == 0


def test_failed_command_gives_its_last_word_as_reason(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("failing", "1")
    make("failing", "--deliveries-max", "2")
    command = "echo looking >&2; echo no such customer >&2; exit 3"
    assert run(["consume", "failing", "--exec", command, *upto(2)]) == 0
    told = capfd.readouterr().err
    assert told.count("looking\nno such customer\n") == 2  # passed on
    assert "failed: failing[0]@1, delivery 1: exit code 3\n" in told
    assert "failed: failing[0]@1, delivery 2: exit code 3\n" in told
    letter = dead_letter("failing", capfd)
    assert (letter["error"], letter["deliveries"]) == ("no such customer", 2)


def test_options_that_are_changed_hold_from_then_on(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("changed", "1", "2")
    make("changed")
    assert consumed("changed", capfd, 1) == ["1"]
    make("changed", "--deliveries-max", "1")
    assert run(["consume", "changed", "--exec", "exit 1", *upto(1)]) == 0
    assert dead_letter("changed", capfd)["deliveries"] == 1


@pytest.mark.parametrize(
    ("command", "reason"), [("exit 4", "exit code 4"), ("kill -9 $$", "ended by signal 9 (Killed)")]
)
def test_silent_failure_is_named_by_how_it_ended(
    command: str, reason: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = command.split()[0]
    publish(name, "1")
    make(name, "--deliveries-max", "1")
    assert run(["consume", name, "--exec", command, *upto(1)]) == 0
    assert dead_letter(name, capfd)["error"] == reason


def test_command_that_cannot_be_run_ends_everything_and_costs_no_attempt(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("misspelt", "1", "2")
    make("misspelt")
    assert run(["consume", "misspelt", "--exec", "no-such-command"]) == 2
    assert "error: --exec 'no-such-command' cannot be run: " in capfd.readouterr().err
    assert attempts("misspelt", capfd) == "1"
    assert consumed("misspelt", capfd, 1) == ["2"]


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_no_more_commands_than_wanted_are_run(
    concurrency: str, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"exactly-{concurrency}"
    publish(name, *map(str, range(9)))
    make(name)
    command = f"cat > {tmp_path}/$MESSAGE_OFFSET"
    words = ["--concurrency", concurrency, "--window", "9", *upto(3)]
    assert run(["consume", name, "--exec", command, *words]) == 0
    assert len(list(tmp_path.iterdir())) == 3
    assert backlog(name, capfd) == 6
    assert attempts(name, capfd) == "1"


def test_commands_of_one_key_run_in_order_and_one_at_a_time(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "keyed", "1", "2", "3", "4", "--key", "k", "-q"]) == 0
    make("keyed", "--mode", "key_shared")
    alone = f"mkdir {tmp_path}/busy && cat && echo && rmdir {tmp_path}/busy"
    words = ["--concurrency", "4", *upto(4)]
    assert run(["consume", "keyed", "--exec", alone, *words]) == 0
    assert capfd.readouterr().out.split() == ["1", "2", "3", "4"]


@contextmanager
def waiting_command(name: str, url: str, authenticator: Path) -> Iterator[Running]:
    """A consumer whose command has begun, and ends when something is written to `authenticator`."""
    publish(name, "1")
    make(name)
    os.mkfifo(authenticator)
    command = f"echo begun; exec cat {authenticator}"
    with running(["consume", name, "--exec", command], url) as consumer:
        assert consumer.line() == "begun"
        yield consumer


def told_to_wait(consumer: Running) -> None:
    assert consumer.process.stderr is not None
    assert select.select([consumer.process.stderr], [], [], 30)[0]
    line = consumer.process.stderr.readline()
    assert line == b"waiting for 1 command; Ctrl-C again ends it\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_that_runs_may_finish(
    number: signal.Signals, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"finish-{number.name}"
    with waiting_command(name, url, tmp_path / "authenticator") as consumer:
        consumer.process.send_signal(number)
        told_to_wait(consumer)
        (tmp_path / "authenticator").write_text("go on\n")
        assert consumer.line() == "go on"
        assert consumer.process.wait(timeout=30) == 130
    assert backlog(name, capfd) == 0


def test_second_ctrl_c_ends_the_command_and_its_message_has_not_failed(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with waiting_command("impatient", url, tmp_path / "authenticator") as consumer:
        consumer.process.send_signal(signal.SIGINT)
        told_to_wait(consumer)
        assert consumer.end(signal.SIGINT) == (130, "interrupted\n")
    assert attempts("impatient", capfd) == "1"


# --- What is wrong ---


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["unknown-subscription"], "'unknown-subscription' does not exist; name its topics"),
        (["wrong", "wrong", "--mode", "key_shared"], "'wrong' is shared, not key_shared"),
        (["wrong", "other"], "'wrong' is over wrong, not over other"),
        (["wrong", "--member", "ann"], "only a multicast has members"),
        (["wrong", "a["], "a["),
        (["wrong", "--exec", "true", "--nack"], "--exec, --no-ack and --nack exclude each other"),
        (["new", "a*", "--start", "5"], "--start 5 is an offset, which needs one topic, not a*"),
        (["new", "a", "--start", "last"], "is no place to begin; write earliest, latest, an off"),
        (["new", "live/x"], "not kept"),
    ],
)
def test_wrong_consumer_is_refused_in_a_line(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make("wrong")
    capfd.readouterr()
    assert run(["consume", *words]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert told.count("\n") == 1
