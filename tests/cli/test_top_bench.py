"""`runnel top` and `runnel bench` against a real broker."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

import runnel.cli.commands.bench
from runnel.cli.bench.plan import Received, Sent
from runnel.cli.main import run
from tests.cli.conftest import environment, running

QUICK = ["--clients", "3", "--interval", "0.005", "--duration", "0.3"]


# --- top ---


def test_one_report_has_rates_and_tables(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["pub", "top/a", "x", "-q"]) == 0
    assert run(["cursors", "set", "watched", "top/a=1"]) == 0
    assert run(["consume", "worker", "top/a", "--no-ack", "--count", "1"]) == 0
    # From now on the broker's reports have it.
    words = ["--from", "latest", "--count", "2", "--timeout", "20"]
    assert run(["sub", "!system/metrics/work", *words]) == 0
    capfd.readouterr()
    assert run(["top", "--once"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("node-1  up ")
    assert lines[1].startswith("in   ")
    assert "stored" in lines[3]
    assert any(line.split() == ["watched", "top/a[0]", "1"] for line in lines)
    assert any(line.split()[:4] == ["worker", "top/a", "shared", "1"] for line in lines)


def test_pipe_gets_a_line_at_each_interval(url: str) -> None:
    with running(["top", "--interval", "0.1"], url) as watcher:
        for _ in range(2):
            line = watcher.line()
            assert "messages/s" in line
            assert "connection" in line
        assert watcher.end(signal.SIGINT) == (130, "interrupted\n")


def test_terminal_gets_a_view_that_ctrl_c_clears_away(url: str) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "runnel", "top"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**environment(url), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    ) as watcher:
        os.close(theirs)
        shown = ""
        ends = time.monotonic() + 30
        while "messages/s" not in shown and time.monotonic() < ends:
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 65_536).decode(errors="replace")
        watcher.send_signal(signal.SIGINT)
        _, told = watcher.communicate(timeout=30)
    os.close(ours)
    assert "messages/s" in shown
    assert (watcher.returncode, told) == (130, b"interrupted\n")


# --- bench ---


def test_load_is_measured_and_nothing_is_lost(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *QUICK, "--format", "json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["clients"], report["subscribers"], report["processes"]) == (3, 3, 1)
    assert (report["lost"], report["disordered"]) == (0, 0)
    assert report["messages_in"] > 7
    assert 0 < report["messages_out"] < report["messages_in"]
    assert 0 < report["latency"]["p50_ns"] <= report["latency"]["p99_9_ns"] < 10**10
    assert report["commands_per_s"] == pytest.approx(
        report["messages_in_per_s"] + report["messages_out_per_s"]
    )


@pytest.mark.parametrize("level", ["stored", "received", "none"])
def test_every_level_is_loss_free(level: str, url: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--topics", "x,y", "--subscribe", "x,y", "--batch", "10", "--level", level]
    assert run(["bench", *QUICK, *words]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("3 clients in 1 process, 3 subscribers, ")
    assert lines[-1] == "checked   nothing lost, everything in order"


def test_processes_share_the_clients_of_a_broker_of_their_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--start-broker", "--keep", "memory", "--processes", "2", "--format", "json"]
    assert run(["bench", *QUICK, *words]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["processes"], report["subscribers"], report["lost"]) == (2, 3, 0)


def test_loss_is_reported_and_fails(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def lossy(*_: object) -> tuple[list[Sent], list[Received], int]:
        received = Received(
            subscribers=1,
            messages=9,
            bytes=900,
            disordered=0,
            told_missed=0,
            foreign=0,
            last_ns=2,
            latencies=(9,),
        )
        return [Sent({"a": 10}, 0, 1)], [received], 10

    monkeypatch.setattr(runnel.cli.commands.bench, "run_load", lossy)
    assert run(["bench", *QUICK]) == 1
    assert capfd.readouterr().out.endswith("checked   1 LOST, 0 OUT OF ORDER\n")


def test_publishing_alone_can_be_measured(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *QUICK, "--subscribe", ""]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2:] == ["latency   -", "checked   no subscribers"]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--topics", " , "], 2, "at least one topic is needed"),
        (["--topics", "a,b,a"], 2, "a name is given twice"),
        (["--size", "3"], 2, "Invalid value for '--size'"),
        (["--size", "99999999999"], 2, "Invalid value for '--size'"),
        (["--clients", "99999999999"], 2, "Invalid value for '--clients'"),
        (["--batch", "99999999999"], 2, "Invalid value for '--batch'"),
        (["--processes", "99999999999"], 2, "Invalid value for '--processes'"),
        (["--duration", "inf"], 2, "Invalid value for '--duration'"),
        (["--interval", "1e300"], 2, "Invalid value for '--interval'"),
        (["--interval", "nan"], 2, "Invalid value for '--interval'"),
        (["--keep", "none"], 2, "--keep is for the broker of --start-broker"),
        (["--url", "runnel://127.0.0.1:1"], 3, "cannot connect to 127.0.0.1:1"),
    ],
)
def test_wrong_load_is_refused(
    words: list[str], code: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *words]) == code
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGINT, (130, "interrupted\n")),
        (signal.SIGTERM, (143, "")),
        (signal.SIGHUP, (129, "")),
    ],
)
def test_interrupted_load_ends_all_of_its_processes(
    number: signal.Signals, outcome: tuple[int, str]
) -> None:
    words = ["bench", "--start-broker", "--clients", "2", "--duration", "60"]
    with running(words) as bench:
        ends = time.monotonic() + 30
        while len(started := psutil.Process(bench.process.pid).children()) < 2:
            assert time.monotonic() < ends
            select.select([], [], [], 0.01)
        assert bench.end(number) == outcome
    assert not [process for process in started if process.is_running()]
