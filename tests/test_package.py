"""What stands at the top: `runnel.connect`, `runnel.Broker`, the errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

import runnel
from runnel import errors


def test_everything_named_at_the_top_is_there() -> None:
    assert runnel.__all__ == sorted(runnel.__all__)
    for name in runnel.__all__:
        assert getattr(runnel, name).__name__ == name
        assert name in dir(runnel)


@pytest.mark.parametrize(
    "name",
    [
        "BusyError",
        "ClientFault",
        "ClosedError",
        "ConnectionLostError",
        "DiskFullError",
        "LimitExceededError",
        "OffsetAheadError",
        "OffsetGoneError",
        "ProducerFencedError",
        "RunnelError",
        "TimeoutExpiredError",
        "Unavailable",
        "UnknownTopicError",
    ],
)
def test_error_at_the_top_is_the_one_that_is_raised(name: str) -> None:
    assert getattr(runnel, name) is getattr(errors, name)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        _ = runnel.conect


def test_parts_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import sys, runnel\n"
        "runnel.OffsetGoneError\n"
        "print(sorted(name for name in sys.modules if name.startswith('runnel')))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert told == "['runnel', 'runnel.errors']\n"
