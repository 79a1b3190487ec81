"""A process of a history: one log of the directory, which may die while the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar

from runnel.config import Settings
from runnel.log.disk.disk_log import DiskLog
from runnel.log.group_store import BatchGroup
from runnel.log.metadata.shared_records import SharedRecords
from runnel.platform.clock import Clock
from runnel.topics.policies import Policies
from tests.fakes.disk import FakeDisk
from tests.fakes.lossy_store import Fate, lossy
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers

T = TypeVar("T")

Draw = Callable[[BatchGroup, bool], Fate]

_running: ContextVar[Member | None] = ContextVar("running", default=None)


class Member:
    """One life of a process. All its tasks and callbacks run in a context of its own, and die with it."""

    def __init__(
        self, name: str, disk: FakeDisk, workers: SimulatedWorkers, shared: SharedRecords | None
    ) -> None:
        """`shared` None: it has the directory for itself."""
        self.name: Final = name
        self.disk: Final = disk
        self._workers = workers
        self._metadata = None if shared is None else shared.member(name)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context: Context = copy_context()
        self._context.run(_running.set, self)
        self._log: DiskLog | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def log(self) -> DiskLog:
        assert self._log is not None
        return self._log

    @property
    def is_dead(self) -> bool:
        return not self.disk.alive or self._workers.power_lost is not None

    async def open(
        self, settings: Settings, policies: Policies, clock: Clock, draw: Draw | None = None
    ) -> None:
        """Open the log. Its group stores lose answers as `draw` says; None: they lose none."""
        self._log = await DiskLog.open(
            settings.data,
            settings=settings,
            policies=policies,
            disk=self.disk,
            clock=clock,
            workers=self._workers,
            make_group_store=None if draw is None else lossy(self._workers, draw),
            shared=self._metadata,
        )

    def run(self, call: Callable[[], T]) -> T:
        """Call something of the log in this process."""
        return self._context.run(call)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in this process."""
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        return task

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

    async def end(self) -> None:
        """The process has died, or dies now: no code of it continues."""
        self.disk.kill()
        if self._workers.power_lost is None:
            self._workers.power_lost = PowerLoss(f"{self} has died")
        if self._metadata is not None:
            self._metadata.release()
        for _ in range(100):
            tasks = [task for task in self._tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if not tasks:
                break
            await asyncio.sleep(0)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # marks it as retrieved: the process took it along


def follow_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let each process know its tasks, also those that its code starts by itself."""

    def make(
        loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        member = _running.get()
        if member is not None:
            member.add(task)
        return task

    loop.set_task_factory(make)
