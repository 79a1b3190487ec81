"""The event loop of a command: all errors in it become one failure."""

from __future__ import annotations

import asyncio

import pytest

from runnel.cli.connection import run_loop
from runnel.errors import TimeoutExpiredError


def test_result_is_returned() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    assert run_loop(work()) == 5


def test_failure_of_a_task_is_not_wrapped() -> None:
    async def fail() -> None:
        raise TimeoutExpiredError("too late")

    async def work() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(3600))
            inner.create_task(fail())

    with pytest.raises(TimeoutExpiredError, match="too late"):
        run_loop(work())
