"""Commands whose standard streams are closed, or whose reader leaves early."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from runnel.cli.main import run
from tests.cli.conftest import environment, running

RUNNEL = f"exec {sys.executable} -m runnel"


def shell(command: str, url: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        env=environment(url),
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_end_a_command(url: str, closed: str) -> None:
    done = shell(f"{RUNNEL} cursors {closed}", url)
    assert done.returncode == 0, done.stderr
    assert b"Assertion" not in done.stderr


def test_lines_of_a_closed_standard_input_are_refused(url: str) -> None:
    done = shell(f"{RUNNEL} pub closed <&-", url)
    assert done.returncode == 2
    assert b"standard input is closed" in done.stderr


def test_a_command_that_nobody_reads_costs_its_message_no_attempt(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pub", "unheard", *map(str, range(200)), "-q"]) == 0
    with running(
        ["consume", "unheard", "unheard", "--exec", "echo; cat /dev/zero"], url
    ) as consumer:
        assert consumer.line() == ""
        assert consumer.process.stdout is not None
        consumer.process.stdout.close()
        assert consumer.process.wait(30) == 1
        assert consumer.process.stderr is not None
        assert consumer.process.stderr.read() == b""
    capfd.readouterr()
    assert run(["subscriptions", "show", "unheard", "--format", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["redelivered"] == 0
    [member] = shown["members"]
    assert (member["backlog"], member["delayed"]) == (200, 0)


def test_a_command_of_nothing_is_refused(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", "empty", "empty", "--exec", " "]) == 2
    assert "--exec is empty" in capfd.readouterr().err
