"""Shell completion finds commands, their options and values, without a broker and in modules loaded on demand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def completed(line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "_RUNNEL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "runnel"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("runnel to", ["topics", "top", "token"]),
        ("runnel topics ", ["list", "show", "delete", "purge"]),
        ("runnel cursors s", ["set"]),
        ("runnel sub --fo", ["--format"]),
        ("runnel sub --format ", ["text", "json", "raw"]),
        ("runnel topics list --l", ["--long"]),
        ("runnel serve --log-format j", ["json"]),
        ("runnel subscriptions re", ["resume", "remove-member"]),
        ("runnel consume --mode ", ["shared", "key_shared", "multicast"]),
    ],
)
def test_shell_completes(line: str, found: list[str]) -> None:
    assert completed(line) == found
