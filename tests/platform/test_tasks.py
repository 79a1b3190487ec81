"""Tests of the tasks that belong to an object."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runnel.platform.tasks import OwnedTasks


async def fail() -> None:
    raise ValueError("a bug")


def test_a_failure_is_reported_at_once_and_raised_in_the_end() -> None:
    async def scenario() -> None:
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        tasks = OwnedTasks("the test")
        tasks.start(fail())
        await tasks.wait()
        (report,) = reports
        assert report["message"] == "a task of the test failed"
        with pytest.raises(ValueError, match="a bug"):
            await tasks.finish()

    asyncio.run(scenario())


def test_a_failure_that_the_caller_awaits_is_not_reported() -> None:
    async def scenario() -> None:
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        tasks = OwnedTasks("the test")
        with pytest.raises(ValueError, match="a bug"):
            await tasks.start_awaited(fail())
        await tasks.finish()
        assert reports == []

    asyncio.run(scenario())


def test_waiting_includes_tasks_that_start_meanwhile_and_cancelling_ends_all() -> None:
    async def scenario() -> None:
        tasks = OwnedTasks("the test")
        ended: list[str] = []

        async def second() -> None:
            await asyncio.sleep(0)
            ended.append("second")

        async def first() -> None:
            tasks.start(second())
            ended.append("first")

        tasks.start(first())
        await tasks.finish()
        assert ended == ["first", "second"]
        forever = tasks.start(asyncio.Event().wait())
        assert len(tasks) == 1
        tasks.cancel()
        await tasks.finish()
        assert forever.cancelled()
        assert not tasks

    asyncio.run(scenario())
