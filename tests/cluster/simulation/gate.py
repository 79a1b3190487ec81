"""Pauses all tasks of a simulated node, at whatever they await, and ends them when the node is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_current: ContextVar[Gate | None] = ContextVar("simulated_node", default=None)


class Gate:
    """The tasks of one life of a node: those that `begin` starts, and those that they start."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_over = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context: Context = copy_context()
        self._context.run(_current.set, self)

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start something that runs within the node."""
        return self.call(asyncio.get_running_loop().create_task, work)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something as within the node: the tasks that it starts are the node's."""
        return self._context.copy().run(function, *args)

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def end(self) -> None:
        """Cancel all tasks until none is left: the process has died."""
        self.is_over, self.is_paused = True, False
        for _ in range(200):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"these tasks of a dead node go on: {list(self._tasks)}")


class _Gated(Coroutine[Any, Any, Any]):
    """A coroutine whose steps wait while its node is paused."""

    def __init__(self, work: Coroutine[Any, Any, Any], gate: Gate) -> None:
        self._work = work
        self._gate = gate
        self._thrown: tuple[Any, ...] | None = None

    def send(self, value: Any) -> Any:
        if self._gate.is_paused:
            return None  # the task comes again in the next turn of the loop
        if self._thrown is not None:
            thrown, self._thrown = self._thrown, None
            return self._work.throw(*thrown)
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        if self._gate.is_paused:
            self._thrown = error
            return None
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task runs it")


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on each task of this loop belongs to the node that started it, if one did."""

    def make(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        gate = _current.get()
        if gate is None:
            return asyncio.Task(work, loop=loop, **options)
        task = asyncio.Task(_Gated(work, gate), loop=loop, **options)
        gate.add(task)
        if gate.is_over:
            task.cancel()
        return task

    loop.set_task_factory(make)  # type: ignore[arg-type]
