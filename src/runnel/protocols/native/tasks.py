"""The tasks of all sessions: each has an owner that waits for it, also when its connection is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Work that requests began. What changes something runs to its end, whoever asked for it and left."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        """Until all have ended, those too that are begun meanwhile."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        # What a request can meet, its task answers: an exception that comes this far is a bug.
        if not task.cancelled() and (failure := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "a task of the native door failed", "exception": failure, "task": task}
            )
