"""A fixed life of a log, ended at every single operation of its disk: by power loss, and by a kill."""

from __future__ import annotations

from functools import partial

import pytest

from tests.fakes.disk import FakeDisk
from tests.log.simulation.script import run_script

# More than the script does in each of its two processes; a test makes sure.
OPERATIONS_MAX = 150
CHUNK = 30


def test_script_reaches_every_crash_point() -> None:
    script = run_script()
    assert max(script.lives) <= OPERATIONS_MAX


@pytest.mark.parametrize("first", range(1, OPERATIONS_MAX, CHUNK))
@pytest.mark.parametrize("life", [0, 1])
def test_nothing_is_lost_when_power_goes_in_any_operation(life: int, first: int) -> None:
    for operation in range(first, first + CHUNK):
        run_script(operation, life, partial(FakeDisk.crash_at, operation=operation))


@pytest.mark.parametrize("first", range(1, OPERATIONS_MAX, CHUNK))
def test_nothing_is_lost_when_process_dies_in_any_operation_and_power_goes_later(
    first: int,
) -> None:
    for operation in range(first, first + CHUNK):
        run_script(operation, 0, partial(FakeDisk.kill_at, operation=operation))
