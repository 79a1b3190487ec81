"""A history of asynchronous code: processes that begin, meet troubles and end, on a simulated disk and clock."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

from runnel.errors import RunnelError, Unavailable
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.simulation.history import Violation

# More turns of the event loop than any operation of these small histories takes.
TURNS_MAX: Final = 20_000

T = TypeVar("T")


class ProcessHistory(ABC):
    """The frame of a history: an event loop, simulated disk, workers and clock, and operations that overlap.

    A subclass implements `live`, which opens the code under test, lets operations happen and checks what they did. The
    code runs unchanged. `timing` decides how long workers take; only the history moves the clock.
    """

    def __init__(
        self, random: Random, disk: FakeDisk, *, timing: Random, worker_turns_max: int = 4
    ) -> None:
        self.random = random
        self.clock = VirtualClock()
        self.disk = disk
        self._timing = timing
        self._worker_turns_max = worker_turns_max
        self.workers = self._new_workers()
        # Operations that run beside what the history does itself, by name.
        self.beside: list[tuple[str, asyncio.Future[None]]] = []
        self.has_faults = False  # disk operations fail
        self.was_faulty = False  # some may have failed since this process began
        self.loop_failures: list[str] = []  # what the event loop's exception handler received
        self._lines: list[str] = []

    # --- What a simulator says ---

    @abstractmethod
    async def live(self) -> None:
        """Everything that happens, from the first opening to the last check."""

    @abstractmethod
    def counts(self) -> Mapping[str, int]:
        """How much happened."""

    def transcript(self, violation: Violation | None = None) -> Sequence[str]:
        return self._lines

    def check_turn(self) -> None:
        """Called at every turn of the loop while the history waits: raises when waiting is in vain."""
        if self.workers.power_lost is not None:
            raise self.workers.power_lost

    def is_expected_loop_failure(self, message: str, error: BaseException | None) -> bool:
        """Whether a failure that asyncio reports is one that the history causes itself."""
        return False

    # --- The frame ---

    def run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._run())
        finally:
            loop.close()

    async def _run(self) -> None:
        self.watch_loop()
        try:
            await self.live()
        finally:
            await self.end_tasks()

    def watch_loop(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_failure)

    def _on_loop_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message, error = context["message"], context.get("exception")
        if not self.is_expected_loop_failure(message, error):
            self.loop_failures.append(f"{message}: {error!r}")

    def raise_loop_failures(self) -> None:
        if self.loop_failures:
            raise Violation(self.loop_failures[0])

    def say(self, line: str) -> None:
        """Add a line to the transcript."""
        self._lines.append(line)

    async def take_turns(self, count: int) -> None:
        """Let everything that runs continue for so many turns of the loop."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def patiently(self, work: Awaitable[T], what: str) -> T:
        """The result. A Violation if it takes more turns of the loop than anything may."""
        future = asyncio.ensure_future(work)
        try:
            for _ in range(TURNS_MAX):
                if future.done():
                    return future.result()
                self.check_turn()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            future.cancel()
            raise
        raise Violation(f"{what} hangs: it is not done after {TURNS_MAX} turns of the loop")

    def begin_beside(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start something that runs beside what follows."""
        self.beside.append((name, asyncio.ensure_future(work)))

    async def finish_beside(self) -> None:
        """Wait until nothing runs beside the history."""
        while self.beside:
            name, work = self.beside.pop(0)
            await self.patiently(work, name)

    async def finish_some_beside(self) -> None:
        """Wait for what runs beside the history when it is much, or now and then."""
        if len(self.beside) > 2 or self.random.random() < 0.4:
            await self.finish_beside()

    # --- Processes ---

    def begin_process(self) -> None:
        """A process has ended in any way; the next one has the same disk."""
        self.disk = self.disk.restart()
        self.workers = self._new_workers()
        self.has_faults = self.was_faulty = self.disk.capacity_bytes is not None

    def _new_workers(self) -> SimulatedWorkers:
        return SimulatedWorkers(self._timing, turns_max=self._worker_turns_max)

    async def end_tasks(self) -> None:
        """A process that dies takes all of its tasks along."""
        if self.workers.power_lost is None:
            self.workers.power_lost = PowerLoss("the process has ended")
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for _ in range(100):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
            tasks = [task for task in tasks if not task.done()]
            if not tasks:
                break
        self.beside.clear()

    async def open_despite_faults(self, open_now: Callable[[], Awaitable[None]]) -> None:
        """Open the code under test. If the disk fails meanwhile, again with room and without faults."""
        try:
            await open_now()
        except (RunnelError, OSError) as error:
            self.accept_failure(error)
            self.say("opened again, with room and without faults")
            self.begin_process()
            self.heal_disk()
            self.was_faulty = False
            await open_now()

    # --- Failures ---

    def accept_failure(self, error: BaseException) -> None:
        """An operation failed. That is right only if the disk fails or the process is gone; otherwise raises it."""
        is_disk = isinstance(error, (OSError, Unavailable)) and self.was_faulty
        if isinstance(error, FileNotFoundError) or not (is_disk or isinstance(error, PowerLoss)):
            raise error
        self.say(f"   {type(error).__name__}: {error}")

    def heal_disk(self) -> None:
        self.disk.heal()
        self.disk.capacity_bytes = None
        self.has_faults = False
