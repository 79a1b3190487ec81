"""One simulated life of a log, all of it drawn from a seed: operations, troubles, recoveries, and the model's checks.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The log runs unchanged on a fake disk, with workers whose timing the seed decides and a clock that only the history
moves. Appends are not waited for, and some operations run beside others, so that interleavings are met.

history     this: the frame, and processes that begin and end      plan      what is drawn before it begins
operations  what it does                                           traffic   batches sent and answered
model       what the log has promised                              checking  reading everything, for the model
clients     named publishers                                       damage    one flipped bit, as the last act
acknowledging   a subscription
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from runnel.errors import RunnelError, Unavailable
from runnel.log.disk_log import DiskLog
from runnel.log.log import ShardId
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.log.simulation import operations
from tests.log.simulation.acknowledging import Subscription, attach
from tests.log.simulation.checking import check_everything
from tests.log.simulation.damage import damage_something
from tests.log.simulation.facts import Violation
from tests.log.simulation.model import Model
from tests.log.simulation.plan import Plan, Trouble, draw
from tests.log.simulation.traffic import Traffic

# More turns of the loop than any operation of these small logs takes.
TURNS_MAX = 20_000

T = TypeVar("T")


class HistoryFailed(AssertionError):
    """A history broke a promise of the log; the text tells all of it."""

    def __init__(self, seed: int, transcript: Sequence[str], problem: str) -> None:
        lines = "\n".join(f"  {line}" for line in transcript)
        super().__init__(
            f"history {seed}: {problem}\n{lines}\n  => {problem}\nreplay: bin/soak log --seed {seed}"
        )
        self.seed = seed
        self.problem = problem

    def __reduce__(self) -> tuple[Callable[..., HistoryFailed], tuple[int, str, str]]:
        return (_failed_elsewhere, (self.seed, self.problem, str(self)))


def _failed_elsewhere(seed: int, problem: str, text: str) -> HistoryFailed:
    """The failure of another process, as it was told there."""
    failure = HistoryFailed(seed, (), problem)
    failure.args = (text,)
    return failure


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    operations: int
    disk_operations: int
    recoveries: int
    messages: int
    transcript: tuple[str, ...]


def run_history(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    """The history of this seed, from opening to its last check; `change` may alter its plan."""
    random = Random(seed)
    history = History(seed, change(draw(random)), random)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(history.run())
    finally:
        loop.close()


class History:
    """See the module's first lines."""

    def __init__(self, seed: int, plan: Plan, random: Random) -> None:
        self.seed = seed
        self.plan = plan
        self.random = random
        self.transcript: list[str] = []
        self.subscription = Subscription(
            plan.covered, lambda topic: ShardId(plan.policies.for_topic(topic).journal)
        )
        self.model = Model(plan.policies, self.subscription)
        self.clock = VirtualClock()
        self.disk = FakeDisk(Random(random.getrandbits(32)))
        self.workers = self._new_workers()
        self.traffic = Traffic(self)
        self.beside: list[tuple[str, asyncio.Future[None]]] = []
        self.has_faults = False  # operations may fail as the disk does
        self.was_faulty = False  # some may have since this process began
        self.is_damaged = False  # a stored bit was flipped
        self._log: DiskLog | None = None
        self._failures: list[str] = []  # what the loop's exception handler was told
        self._recoveries = self._disk_operations = self._operations = 0

    @property
    def log(self) -> DiskLog:
        assert self._log is not None
        return self._log

    @property
    def now_ns(self) -> int:
        return self.clock.time_ns()

    def say(self, line: str) -> None:
        self.transcript.append(line)

    def accept_failure(self, error: BaseException) -> None:
        """An operation failed: that is right only if the disk is made to fail, or is gone."""
        is_disk = isinstance(error, (OSError, Unavailable)) and self.was_faulty
        if isinstance(error, FileNotFoundError) or not (is_disk or isinstance(error, PowerLoss)):
            raise error
        self.say(f"      {type(error).__name__}: {error}")

    # --- The frame ---

    async def run(self) -> Outcome:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_failure)
        try:
            await self._live()
        except Violation as violation:
            raise HistoryFailed(self.seed, self.transcript, str(violation)) from violation
        except (Exception, PowerLoss) as error:
            raise HistoryFailed(
                self.seed, self.transcript, f"unexpected {type(error).__name__}: {error}"
            ) from error
        finally:
            await self._end_tasks()
        return Outcome(
            self.seed,
            self._operations,
            self._disk_operations + len(self.disk.operations),
            self._recoveries,
            len(self.model.at),
            tuple(self.transcript),
        )

    async def _live(self) -> None:
        await self.open()
        for _ in range(self.plan.steps):
            try:
                await self._step()
            except PowerLoss:
                await self._recover()
        while True:
            try:
                await operations.settle(self)
                await check_everything(self)
                await self.close()
            except PowerLoss:
                await self._recover()
            else:
                break
        await self.open()
        await operations.settle(self)
        await check_everything(self)
        if self.plan.ends_in_damage:
            await damage_something(self)
        await self.close()

    async def _step(self) -> None:
        self._operations += 1
        operation, is_beside = operations.draw(self.random, self.plan.troubles)
        if is_beside:
            work = asyncio.ensure_future(operation(self))
            self.beside.append((operation.__name__, work))
        else:
            await operation(self)
        self.traffic.look_at_answers()
        if len(self.beside) > 2 or self.random.random() < 0.4:
            await self.finish_beside()
        if self._failures:
            raise Violation(self._failures[0])

    async def finish_beside(self) -> None:
        """Until nothing runs beside what the history does itself."""
        while self.beside:
            name, work = self.beside.pop(0)
            await self.patiently(work, name)

    async def patiently(self, work: Awaitable[T], what: str) -> T:
        """The result, unless it takes more turns of the loop than anything may."""
        future = asyncio.ensure_future(work)
        try:
            for _ in range(TURNS_MAX):
                if future.done():
                    return future.result()
                if self.workers.power_lost is not None:  # whoever waits for the log waits in vain
                    raise self.workers.power_lost
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            future.cancel()
            raise
        raise Violation(f"{what} hangs: it is not done after {TURNS_MAX} turns of the loop")

    async def sync(self) -> None:
        """Until nothing is queued. Each shard tells once of a batch that was answered and then lost."""
        for _ in range(len(self.log.shards()) + 1):
            try:
                return await self.patiently(self.log.sync(), "sync")
            except Unavailable as error:
                if not self.was_faulty:
                    raise
                self.say(f"   sync tells: {error}")
        raise Violation("sync tells more often than there are shards")

    def _on_loop_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # An operation that was left when the power went keeps its error to itself.
        is_left = "never retrieved" in context["message"]
        if not is_left and not isinstance(error, PowerLoss):
            self._failures.append(f"{context['message']}: {error!r}")

    # --- Processes: each opens the log, and closes it or dies ---

    async def open(self) -> None:
        if (
            Trouble.FAULT in self.plan.troubles
            and not self.is_damaged
            and self.random.random() < 0.1
        ):
            operations.arm_fault(self)
        try:
            await self._open_now()
        except (RunnelError, OSError) as error:
            self.accept_failure(error)
            self.say("opened again, with room and without faults")
            self._begin_process()
            self.disk.capacity_bytes = None
            self.has_faults = self.was_faulty = False
            await self._open_now()

    async def _open_now(self) -> None:
        self._log = await self.patiently(
            DiskLog.open(
                self.plan.settings.data,
                settings=self.plan.settings,
                policies=self.plan.policies,
                disk=self.disk,
                clock=self.clock,
                workers=self.workers,
            ),
            "open",
        )
        recovered = self.log.recovered
        self.say(f"opened: clean={recovered.was_clean} torn={list(recovered.torn)}")
        if recovered.damage and not self.is_damaged:
            raise Violation(f"damage was found that nobody did: {list(recovered.damage)}")
        self.model.check_topics(info.name for info in self.log.topics())
        self.model.check_cursors(self.log.cursors())
        attach(self)

    async def close(self) -> None:
        await self.finish_beside()
        failed_before = self.traffic.failed_batches()
        self.say("close")
        try:
            await self.patiently(self.log.close(), "close")
        except (OSError, RunnelError) as error:
            self.accept_failure(error)
        else:
            if self.traffic.failed_batches() == failed_before and not self.was_faulty:
                self.traffic.all_is_stored()
        self.traffic.look_at_answers()
        self.traffic.check_all_answered()
        self._begin_process()

    async def restart(self) -> None:
        """Close and open again: nothing may be left to recover."""
        was_faulty = self.was_faulty
        await self.close()
        await self.open()
        recovered = self.log.recovered
        is_clean = recovered.was_clean and not recovered.torn and not recovered.damage
        if not is_clean and not was_faulty:
            raise Violation(f"after a clean close: {recovered}")
        await check_everything(self)

    async def kill_quietly(self) -> None:
        """End the process when nothing is under way."""
        await self.sync()
        self.say("kill")
        self.disk.kill()
        await self._end_tasks()
        self._begin_process()

    def _begin_process(self) -> None:
        """The process before is over in whatever way: what it did not answer stays open."""
        self.traffic.process_ended()
        self._disk_operations += len(self.disk.operations)
        self.disk = self.disk.restart()
        self.workers = self._new_workers()
        self.has_faults = self.was_faulty = self.disk.capacity_bytes is not None
        self._log = None

    def _new_workers(self) -> SimulatedWorkers:
        return SimulatedWorkers(self.random, turns_max=self.plan.worker_turns_max)

    async def _end_tasks(self) -> None:
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

    async def _recover(self) -> None:
        """The power is gone, or the process: begin the next one, which may die in recovery too."""
        self.say("  the process is gone")
        for _, work in self.beside:
            error = work.exception() if work.done() and not work.cancelled() else None
            if error is not None and not isinstance(error, PowerLoss):
                raise error
        self._recoveries += 1
        while True:
            await self._end_tasks()
            self._failures.clear()
            self._begin_process()
            if Trouble.RECOVERY in self.plan.troubles and self.random.random() < 0.5:
                self.say("the next recovery may be cut short")
                end = self.random.choice((self.disk.crash_at, self.disk.kill_at))
                end(self.random.randint(1, 12))
            try:
                await self.open()
                self.disk.crash_at(0)
                await check_everything(self)
            except PowerLoss:
                self.say("  gone in recovery")
            else:
                return
