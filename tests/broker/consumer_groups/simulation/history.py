"""One simulated life of a broker with acknowledged work, drawn from a seed: disk, power and consumers fail.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The broker runs unchanged on a fake disk, with workers whose timing the seed decides and a clock that only the history
moves. Everything that its groups decide goes to the checker of subscriptions as it happens. In the end disk and
consumers are well again for long enough: then nothing is owed that was not acknowledged, buried, or gone for a reason.

history     this: the frame, processes that begin and end, rest     plan       what is drawn before it begins
operations  what may happen, one step each                          operators  of it, what operators do
joining     consumers come and go                                   answering  what they say
hand        a consumer's end of the line                            troubles   of the disk and the process
recording   the parts of the broker that are watched                ending     everything works again
recorder    what is made of what they tell                          writer     the same for one group
stock       what the log has, and may have lost                     subject    a subscription as it is watched
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from runnel.broker.broker import Broker, Published
from runnel.errors import RunnelError, Unavailable
from runnel.topics.policies import Policies
from tests.broker.consumer_groups.simulation import ending, operations
from tests.broker.consumer_groups.simulation.hand import Hand
from tests.broker.consumer_groups.simulation.plan import SECOND_NS, Plan, draw
from tests.broker.consumer_groups.simulation.recorder import Recorder
from tests.broker.consumer_groups.simulation.recording import (
    RecordingConsumerGroup,
    RecordingWork,
    watched,
)
from tests.broker.consumer_groups.simulation.subject import Subject
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.group_rules import history as events
from tests.group_rules.telling import Violation

# More turns of the loop than anything takes here.
TURNS_MAX = 20_000
# So many turns without any work by the workers, and everything is at rest.
QUIET_TURNS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a history did, for whoever counts."""

    seed: int
    messages: int
    deliveries: int
    restarts: int
    dead_letters: int
    transcript: tuple[str, ...]


class HistoryFailed(AssertionError):
    """A history broke a promise; the text tells all of it."""

    def __init__(self, seed: int, transcript: Sequence[str], problem: str) -> None:
        lines = "\n".join(f"  {line}" for line in transcript)
        super().__init__(
            f"history {seed}: {problem}\n{lines}\n  => {problem}\nreplay: bin/soak subscriptions --seed {seed}"
        )
        self.seed = seed
        self.transcript = tuple(transcript)
        self.problem = problem

    def __reduce__(self) -> tuple[type[HistoryFailed], tuple[int, tuple[str, ...], str]]:
        return (type(self), (self.seed, self.transcript, self.problem))


def run_history(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    """The history of this seed, from the first opening to the last check; `change` may alter its plan."""
    random = Random(seed)
    history = History(change(draw(random)), random)
    loop = asyncio.new_event_loop()
    try:
        with watched(history.recorder):
            loop.run_until_complete(history.run())
    except (Exception, PowerLoss) as error:
        violation = history.recorder.violation or (error if isinstance(error, Violation) else None)
        problem = (
            f"unexpected {type(error).__name__}: {error}" if violation is None else str(violation)
        )
        raise HistoryFailed(seed, history.transcript(violation), problem) from error
    finally:
        loop.close()
    seen = history.recorder.events()
    return Outcome(
        seed,
        sum(map(len, history.recorder.stock.messages.values())),
        sum(isinstance(event, events.Delivered) for event in seen),
        history.restarts,
        len(history.recorder.stock.letters),
        tuple(history.transcript()),
    )


class History:
    """See the module's first lines."""

    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan = plan
        self.random = random
        self.clock = VirtualClock()
        self.clock.advance(SECOND_NS)  # a time of 0 means that nobody knows
        self.recorder = Recorder(Policies(plan.settings.topics), self.clock)
        self.disk = FakeDisk(Random(random.getrandbits(32)))
        self.workers = self._new_workers()
        self.hands: list[Hand] = []
        self.hand_count = self.message_count = self.restarts = 0
        self.answers: list[asyncio.Future[Published]] = []
        self.beside: list[tuple[str, asyncio.Future[None]]] = []
        self.settled: dict[str, set[int]] = {}  # dead letters that somebody was told are settled
        self.has_faults = False  # operations may fail as the disk does
        self.was_faulty = False  # some may have since this process began
        self._broker: Broker | None = None
        self._failures: list[str] = []  # what the loop's exception handler was told

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def work(self) -> RecordingWork:
        work = self.broker.work
        assert isinstance(work, RecordingWork)
        return work

    def say(self, line: str) -> None:
        self.recorder.say(line)

    def transcript(self, violation: Violation | None = None) -> list[str]:
        return [*self.plan.lines(), *self.recorder.transcript(violation)]

    def subject(self, name: str) -> Subject | None:
        """The subscription of this name, if there is one."""
        return next((each for each in self.recorder.subjects.values() if each.name == name), None)

    def accept_failure(self, error: BaseException) -> None:
        """Something failed: that is right only if the disk was made to fail, or is gone."""
        is_disk = isinstance(error, (OSError, Unavailable)) and self.was_faulty
        if not (is_disk or isinstance(error, PowerLoss)):
            raise error
        self.say(f"   {type(error).__name__}: {error}")

    # --- The frame ---

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_failure)
        try:
            await self._open()
            for operation in (operations.publish, operations.join, operations.join):
                await operation(self)
            for _ in range(self.plan.steps):
                await self._survive(self._step)
            await self._survive(lambda: ending.end(self))
        finally:
            await self._end_tasks()

    async def _survive(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do something, again in the next process if the power goes meanwhile: but for a single step."""
        while True:
            try:
                await act()
                self.raise_problems()
            except PowerLoss:
                await self.recover()
                if act == self._step:
                    return
            else:
                return

    async def _step(self) -> None:
        operation, is_beside = operations.draw(self)
        if is_beside:
            self.beside.append((operation.__name__, asyncio.ensure_future(operation(self))))
        else:
            await operation(self)
        await self.take_turns(self.random.choice((0, 0, 1, 3, 20)))
        if len(self.beside) > 2 or self.random.random() < 0.4:
            await self.finish_beside()

    def raise_problems(self) -> None:
        if self.recorder.violation is not None:
            raise self.recorder.violation
        if self.workers.power_lost is not None:
            raise self.workers.power_lost
        if not self.disk.alive:
            raise PowerLoss("gone")
        self._look_at_answers()
        for hand in self.hands:
            hand.check_on_way()
        if self._failures:
            raise Violation(self._failures[0])
        if self.broker._is_open and self.work.dead_keepers:
            raise Violation(f"the broker goes on without {self.work.dead_keepers}")

    def _look_at_answers(self) -> None:
        """A publisher that was told `stored` may rely on it: everybody can see the messages by then."""
        done = [answer for answer in self.answers if answer.done()]
        self.answers = [answer for answer in self.answers if not answer.done()]
        for answer in done:
            error = answer.exception()
            if error is not None:
                self.accept_failure(error)

    async def take_turns(self, count: int) -> None:
        """Whatever is under way goes on for so many turns of the loop."""
        for _ in range(count):
            await asyncio.sleep(0)
        self.raise_problems()

    async def patiently(self, work: Awaitable[T], what: str) -> T:
        """The result, unless it takes more turns of the loop than anything may."""
        future = asyncio.ensure_future(work)
        try:
            for _ in range(TURNS_MAX):
                if future.done():
                    return future.result()
                self.raise_problems()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            future.cancel()
            raise
        raise Violation(f"{what} hangs: it is not done after {TURNS_MAX} turns of the loop")

    async def finish_beside(self) -> None:
        while self.beside:
            name, work = self.beside.pop(0)
            await self.patiently(work, name)

    async def come_to_rest(self) -> None:
        """Until nothing goes on by itself any more."""
        quiet, calls = 0, -1
        for _ in range(TURNS_MAX):
            if calls != self.workers.calls_run or self.workers.is_busy or self._is_busy():
                quiet, calls = 0, self.workers.calls_run
            quiet += 1
            if quiet > QUIET_TURNS:
                return
            await asyncio.sleep(0)
            self.raise_problems()
        raise Violation(f"the broker does not come to rest within {TURNS_MAX} turns of the loop")

    def _is_busy(self) -> bool:
        consumer_groups = [
            consumer_group
            for consumer_group in self.work.consumer_groups()
            if isinstance(consumer_group, RecordingConsumerGroup)
        ]
        return self.work.is_busy or any(
            consumer_group.is_busy for consumer_group in consumer_groups
        )

    def _on_loop_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # What was left when the power went keeps its error to itself.
        is_left = "never retrieved" in context["message"] or "destroyed" in context["message"]
        if not is_left and not isinstance(error, (PowerLoss, Violation)):
            self._failures.append(f"{context['message']}: {error!r}")

    # --- Processes: each opens the broker, and closes it or dies ---

    async def _open(self) -> None:
        try:
            await self._open_now()
        except (RunnelError, OSError) as error:
            self.accept_failure(error)
            self.say("opened again, with room and without faults")
            self._begin_process()
            self.heal()
            self.was_faulty = False
            await self._open_now()

    async def _open_now(self) -> None:
        # A process without a broker says nothing: opening tells of topics, which are looked at afterwards.
        self.recorder.is_alive = False
        opening = asyncio.ensure_future(
            Broker.open(
                self.plan.settings,
                directory="data",
                disk=self.disk,
                clock=self.clock,
                workers=self.workers,
            )
        )
        for _ in range(TURNS_MAX):
            if opening.done():
                break
            if self.workers.power_lost is not None:
                raise self.workers.power_lost
            await asyncio.sleep(0)
        else:
            raise Violation("opening hangs")
        self._broker = opening.result()
        log = self.broker._stores.disk
        topics = {info.name: len(info.shards) for info in log.topics()}
        self.recorder.process_begins(self.clock, topics)
        for topic, partitions in topics.items():
            for partition in range(partitions):
                await self._discover(topic, partition)
        self.recorder.take_up(self.work.definitions(), self.work.stored_state)

    async def _discover(self, topic: str, partition: int) -> None:
        """Messages that were stored when the process died, and that nobody had seen."""
        seen = self.recorder.stock.end((topic, partition))
        end = self.broker._stores.disk.next_offset(topic, partition)
        if end < seen:
            raise Violation(f"{topic}[{partition}] went up to {seen}, and now to {end}")
        while seen < end:
            fetched = await self.patiently(
                self.broker.fetch(topic, partition, offset=seen), "fetching"
            )
            for batch in fetched.batches:
                self.recorder.published(batch.messages())
            seen = fetched.next_offset

    async def restart(self) -> None:
        """Close and open again, as after an orderly end."""
        await self.finish_beside()
        self.say("the broker closes")
        try:
            await self.patiently(self.broker.close(), "close")
        except (OSError, RunnelError) as error:
            self.accept_failure(error)
        else:
            if not self.was_faulty:
                self.recorder.all_is_stored()
        self._look_at_answers()
        await self._end_tasks()
        self._begin_process()
        await self._open()

    async def recover(self) -> None:
        """The power is gone, or the process: begin the next one."""
        self.say("the process is gone")
        await self._end_tasks()
        self._begin_process()
        while True:
            try:
                return await self._open()
            except PowerLoss:
                self.say("gone in recovery")
                await self._end_tasks()
                self._begin_process()

    def _begin_process(self) -> None:
        self.restarts += 1
        self.recorder.process_ends()
        self.hands.clear()
        self.answers.clear()
        self._failures.clear()
        self.disk = self.disk.restart()
        self.workers = self._new_workers()
        self.has_faults = self.was_faulty = self.disk.capacity_bytes is not None
        self._broker = None
        wall_ns = self.clock.time_ns()
        if self.random.random() < 0.5:  # the machine has started anew, and its clock with it
            self.clock = VirtualClock(wall_ns + 1)  # whose 0 is no time at which anything happened
        self.clock.advance(self.random.choice((1, 1000, 5000)) * SECOND_NS // 1000)

    def _new_workers(self) -> SimulatedWorkers:
        return SimulatedWorkers(self.random, turns_max=self.plan.worker_turns_max)

    async def _end_tasks(self) -> None:
        """A process that dies takes all of its tasks along."""
        self.recorder.is_alive = False
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

    # --- The disk ---

    def heal(self) -> None:
        self.disk.heal()
        self.disk.capacity_bytes = None
        self.has_faults = False
