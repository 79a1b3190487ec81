"""Shell completion finds commands, their options and values, without a broker and in modules loaded on demand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runnel.cli.main import run


def request_of(line: str) -> dict[str, str]:
    """The environment in which bash asks for the completion of the last word."""
    return {
        "_RUNNEL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }


def test_new_process_completes_from_a_module_that_it_loads_on_demand() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "runnel"],
        env={**os.environ, **request_of("runnel topics list --l")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout.split() == ["--long"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("runnel to", ["topics", "top", "token"]),
        ("runnel topics ", ["list", "show", "delete", "purge"]),
        ("runnel cursors s", ["set"]),
        ("runnel sub --fo", ["--format"]),
        ("runnel sub --format ", ["text", "json", "raw"]),
        ("runnel serve --log-format j", ["json"]),
        ("runnel subscriptions re", ["resume", "remove-member"]),
        ("runnel consume --mode ", ["shared", "key_shared", "multicast"]),
    ],
)
def test_shell_completes(
    line: str,
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in request_of(line).items():
        monkeypatch.setenv(name, value)
    assert run([]) == 0
    assert capsys.readouterr().out.split() == found
