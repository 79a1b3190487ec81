"""`runnel serve` as a process: its output, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runnel.cli.main import run
from tests.cli.conftest import ONLY_NATIVE, environment, running, serving


def test_stored_messages_survive_a_clean_end_and_a_new_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path / "data") as (broker, url):
        assert run(["pub", "kept", "1", "2", "-q", "--url", url]) == 0
        code, _ = broker.end(signal.SIGTERM)
        assert code == 0
    with serving(tmp_path / "data") as (broker, url):
        assert run(["poll", "kept", "--format", "raw", "--url", url]) == 0
        assert capfd.readouterr().out == "1\n2\n"
        code, _ = broker.end(signal.SIGINT)
        assert code == 0


def test_json_logs_are_an_object_a_line(tmp_path: Path) -> None:
    more = ("--log-level", "debug")  # standard error is no terminal here
    with serving(tmp_path / "data", *more) as (broker, url):
        assert run(["pub", "made", "1", "-q", "--url", url]) == 0
        code, told = broker.end(signal.SIGTERM)
    assert code == 0
    lines = [json.loads(line) for line in told.splitlines()]
    assert {"event", "level", "timestamp"} <= lines[0].keys()
    (made,) = [line for line in lines if line.get("subject") == "made"]
    del made["timestamp"]
    assert made == {
        "kind": "topic_made",
        "subject": "made",
        "keep": "disk",
        "journal": "main",
        "partitions": 1,
        "event": "topic made",
        "level": "debug",
    }
    assert lines[-1]["event"] == "shutting down"


def test_text_logs_are_a_line_with_fields_for_people(tmp_path: Path) -> None:
    more = ("--log-format", "text", "--log-level", "debug")
    with serving(tmp_path / "data", *more) as (broker, url):
        assert run(["pub", "made", "1", "-q", "--url", url]) == 0
        _, told = broker.end(signal.SIGTERM)
    (made,) = [line for line in told.splitlines() if "subject=made" in line]
    assert re.fullmatch(r"\S+Z \[debug +\] topic made .*kind=topic_made .*subject=made", made)


def test_unclean_end_is_recovered_and_reported(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as (broker, url):
        assert run(["pub", "kept", "1", "-q", "--url", url]) == 0
        broker.process.kill()
        broker.process.wait(timeout=30)
    with serving(tmp_path / "data", "--log-format", "json") as (broker, _):
        _, told = broker.end(signal.SIGTERM)
    recovered = [json.loads(line) for line in told.splitlines()]
    assert any(line.get("kind") == "recovered" for line in recovered)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--set", "nativ.listen=x"], "unknown key nativ.listen"),
        (["--config", "/no/such.toml"], "/no/such.toml (--config): cannot read"),
        (["--data", ""], "data"),
        (["--log-format", "xml"], "'xml' is not one of"),
    ],
)
def test_wrong_settings_are_refused_before_anything_begins(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["serve", *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert problem in captured.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", [["--http", "127.0.0.1:0"], ["--set", "grpc.listen=127.0.0.1:0"]])
def test_listener_that_was_asked_for_needs_its_extra(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runnel.cli.commands.serve.has_extra", lambda name: False)
    assert run(["serve", *words]) == 2
    assert 'listen = "127.0.0.1:0"' in (told := capfd.readouterr().err)
    assert "install Runnel with its extra" in told
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--set", 'topics=[{ match = "a[" }]'], "topics[0].match"),
        (["--listen", "nowhere"], "native.listen"),
        (["--data", "/etc/passwd"], "it is a file, not a directory: '/etc/passwd'"),
    ],
)
def test_what_only_the_broker_can_judge_is_refused_in_a_line(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "runnel", "serve", *ONLY_NATIVE, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert problem in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_directory_and_address_of_another_broker_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as (broker, url):
        address = url.removeprefix("runnel://")
        for words, problem in (
            (["--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"], str(tmp_path / "data")),
            (["--data", str(tmp_path / "other"), "--listen", address], "ddress"),
        ):
            ended = subprocess.run(
                [sys.executable, "-m", "runnel", "serve", *ONLY_NATIVE, *words],
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert ended.returncode in (1, 2, 3)
            assert problem in ended.stderr
            assert ended.stderr.startswith("error: ")
            assert ended.stderr.count("\n") == 1
        assert broker.end(signal.SIGTERM)[0] == 0


def test_terminal_gets_a_banner(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = ["serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *ONLY_NATIVE]
    rule = 'topics=[{ match = "chat/*", keep = "none" }]'
    with subprocess.Popen(
        [sys.executable, "-m", "runnel", *words, "--set", rule],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as broker:
        os.close(theirs)
        shown = ""
        ends = time.monotonic() + 30
        while "Ctrl-C" not in shown and time.monotonic() < ends:
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 65_536).decode()
        broker.send_signal(signal.SIGINT)
        broker.communicate(timeout=30)
    os.close(ours)
    lines = shown.replace("\r", "").splitlines()
    assert lines[0].startswith("Runnel 0.")
    assert lines[1].startswith("listening on runnel://127.0.0.1:")
    assert lines[2] == f"data in {tmp_path / 'data'} (clean)"
    assert "  1. chat/*: not kept" in lines
    assert broker.returncode == 0


def test_whoever_serves_on_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as (broker, url), running(["sub", "a"], url):
        broker.process.send_signal(signal.SIGINT)
        code, _ = broker.end(signal.SIGINT)
        assert code == 0
