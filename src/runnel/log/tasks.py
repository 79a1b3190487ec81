"""Tasks with an owner: whoever starts them waits for them, and hears of their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class OwnedTasks:
    """Like a TaskGroup for an object that lives longer than one function.

    A task that fails is a bug: everything a task expects, it handles. The failure goes to the loop's
    exception handler at once, and to whoever calls `wait`.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Until all have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            task.get_loop().call_exception_handler(
                {"message": "a task of the log failed", "exception": failure, "task": task}
            )
