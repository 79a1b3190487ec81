"""Tasks that belong to an object: it starts them, waits for them, and reports their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks:
    """The running tasks of one owner: a TaskGroup for an object that lives longer than one function.

    A task ends by itself, also when the caller that caused it has gone; the owner waits for all of them before it
    closes.
    """

    __slots__ = ("_failure", "_owner", "_running")

    def __init__(self, owner: str) -> None:
        """`owner` names the owner where a failure is reported, such as "the log"."""
        self._owner = owner
        self._running: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that handles every error it expects: a failure is a bug.

        A failure goes to the loop's exception handler at once, and `finish` raises the first one.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def start_awaited(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task whose result, or failure, the caller awaits."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks that run now."""
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, also those that start meanwhile."""
        while self._running:
            await asyncio.wait(self._running)

    async def finish(self) -> None:
        """Wait until all tasks have ended, and raise the first failure."""
        await self.wait()
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            task.get_loop().call_exception_handler(
                {"message": f"a task of {self._owner} failed", "exception": failure, "task": task}
            )
