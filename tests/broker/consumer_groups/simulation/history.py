"""One simulated life of a broker with consumer groups, drawn from a seed: disk, power and consumers fail.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The broker runs unchanged on a simulated disk. The checker of subscriptions sees everything that the groups decide, as
it happens. In the end disk and consumers work again for long enough: then every message is acknowledged, a dead letter,
or gone for a reason. `tests/simulation` is the kernel of it.

history      this: processes that begin and end, rest     plan          what the seed draws before the history begins
operations   what may happen                              operators     what operators do
membership   consumers join and leave                     answers       acks, nacks and renewals of consumers
hand         a consumer's end of the connection           troubles      of the disk and the process
recorder     records events, one history for each group   final_checks  everything works again, and nothing is left
stock        what the log has, and may have lost          subject       an observed subscription
recording_classes    the parts of the broker that report  writer        the recorder of one group
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from random import Random

from runnel.broker.broker import Broker, Published
from runnel.broker.fetcher import FetchRequest
from runnel.broker.stores import owned_shard
from runnel.errors import MovedError, RunnelError
from runnel.log.log import ShardId
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies
from tests.broker.consumer_groups.simulation import final_checks, operations
from tests.broker.consumer_groups.simulation.hand import Hand
from tests.broker.consumer_groups.simulation.plan import SECOND_NS, Plan, draw
from tests.broker.consumer_groups.simulation.recorder import Recorder
from tests.broker.consumer_groups.simulation.recording_classes import (
    RecordingConsumerGroup,
    RecordingWork,
    watched,
)
from tests.broker.consumer_groups.simulation.subject import Subject
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.losing_log import LosingDiskLog, is_away, losing_logs
from tests.fakes.power import PowerLoss
from tests.group_rules import history as events
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.process import TURNS_MAX, ProcessHistory
from tests.simulation.shards import shards_by
from tests.simulation.troubles import Trouble

# After so many turns without any work by the workers, everything is at rest.
QUIET_TURNS = 8


def run_history(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    """The history of this seed, from the first opening to the last check; `change` may alter its plan."""
    random = Random(seed)
    history = History(change(draw(random)), random)
    return kernel.run(history, seed, f"bin/soak subscriptions --seed {seed}")


class History(ProcessHistory):
    """A broker, its consumers, and the recorder that checks each subscription."""

    def __init__(self, plan: Plan, random: Random) -> None:
        disk = FakeDisk(Random(random.getrandbits(32)))
        super().__init__(random, disk, timing=random, worker_turns_max=plan.worker_turns_max)
        self.plan = plan
        self.shard_of = shards_by(plan.settings)
        self.clock.advance(SECOND_NS)  # a time of 0 means that the time is unknown
        self.recorder = Recorder(Policies(plan.settings.topics), self.clock)
        self.hands: list[Hand] = []
        self.hand_count = self.message_count = 0
        self.answers: list[asyncio.Future[Published]] = []
        self.settled: dict[str, set[int]] = {}  # dead letters that an operator was told are settled
        self._restarts = 0
        self._broker: Broker | None = None

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def work(self) -> RecordingWork:
        work = self.broker.consumer_groups
        assert isinstance(work, RecordingWork)
        return work

    def say(self, line: str) -> None:
        self.recorder.say(line)

    def transcript(self, violation: Violation | None = None) -> Sequence[str]:
        return [*self.plan.lines(), *self.recorder.transcript(violation)]

    def counts(self) -> Mapping[str, int]:
        seen = self.recorder.events()
        return {
            "messages": sum(map(len, self.recorder.stock.messages.values())),
            "deliveries": sum(isinstance(event, events.Delivered) for event in seen),
            "restarts": self._restarts,
            "dead letters": len(self.recorder.stock.letters),
        }

    def subject(self, name: str) -> Subject | None:
        """The subscription of this name, if there is one."""
        return next((each for each in self.recorder.subjects.values() if each.name == name), None)

    def check_turn(self) -> None:
        self.raise_problems()

    def is_expected_loop_failure(self, message: str, error: BaseException | None) -> bool:
        # What was under way at a power loss keeps its error to itself; the recorder keeps violations.
        is_left = "never retrieved" in message or "destroyed" in message
        return is_left or isinstance(error, (PowerLoss, Violation))

    @property
    def main(self) -> LosingDiskLog:
        log = self.broker._stores.main
        assert isinstance(log, LosingDiskLog)
        return log

    def is_in(self, shard: ShardId, key: TopicPartition) -> bool:
        """Whether a topic-partition lies in a shard."""
        found = self.main.metadata.topics.find(key[0])
        return found is not None and found.shards[key[1]] == shard

    def accept_failure(self, error: BaseException) -> None:
        if isinstance(error, MovedError) and Trouble.LOST_SHARD in self.plan.troubles:
            self.say(f"   {error}")
        else:
            super().accept_failure(error)

    # --- Operations ---

    def run(self) -> None:
        with watched(self.recorder):
            try:
                super().run()
            except (Exception, PowerLoss) as error:
                # The first violation may have come up inside the broker and have led to this error.
                violation = self.recorder.violation
                if violation is None or violation is error:
                    raise
                raise violation from error

    async def live(self) -> None:
        await self._open()
        for operation in (operations.publish, operations.join, operations.join):
            await operation(self)
        for _ in range(self.plan.steps):
            await self._survive(self._step)
        await self._survive(lambda: final_checks.end(self))

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
        operation, is_beside = operations.TABLE.draw(self.random, self.plan.troubles)
        if is_beside:
            self.begin_beside(operation.__name__, operation(self))
        else:
            await operation(self)
        await self.take_turns(self.random.choice((0, 0, 1, 3, 20)))
        await self.finish_some_beside()

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
        self.raise_loop_failures()
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
        await super().take_turns(count)
        self.raise_problems()

    async def come_to_rest(self) -> None:
        """Wait until the broker does nothing by itself."""
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

    # --- Processes: each opens the broker, and closes it or dies ---

    async def _open(self) -> None:
        await self.open_despite_faults(self._open_now)

    async def _open_now(self) -> None:
        # A process without a broker says nothing: opening tells of topics, which are looked at afterwards.
        self.recorder.is_alive = False
        with losing_logs():
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
        self.recorder.is_away = partial(is_away, self.main)
        known = self.broker._stores.main.metadata.topics
        topics = {name: known.policy(name).partitions for name in known.names()}
        self.recorder.process_begins(self.clock, topics)
        for topic, partitions in topics.items():
            for partition in range(partitions):
                await self._discover(topic, partition)
        self.recorder.take_up(self.work.definitions(), self.work.stored_state)

    async def _discover(self, topic: str, partition: int) -> None:
        """Record messages that were stored when the process died, before the recorder saw them."""
        seen = self.recorder.stock.end((topic, partition))
        key = (topic, partition)
        end = owned_shard(self.broker._stores.main, key).next_offset(*key)
        if end < seen:
            raise Violation(f"{topic}[{partition}] went up to {seen}, and now to {end}")
        while seen < end:
            fetched = await self.patiently(
                self.broker.fetch(FetchRequest(topic, partition, offset=seen)), "fetching"
            )
            for batch in fetched.batches:
                self.recorder.published(batch.messages())
            seen = fetched.next_offset

    async def restart(self) -> None:
        """Close and open again, as after an orderly end."""
        await self.finish_beside()
        await operations.regain_shard(self)
        self.say("the broker closes")
        try:
            await self.patiently(self.broker.close(), "close")
        except (OSError, RunnelError) as error:
            self.accept_failure(error)
        else:
            if not self.was_faulty:
                self.recorder.all_is_stored()
        self._look_at_answers()
        await self.end_tasks()
        self.begin_process()
        await self._open()

    async def recover(self) -> None:
        """The power is gone, or the process: begin the next one."""
        self.say("the process is gone")
        await self.end_tasks()
        self.begin_process()
        while True:
            try:
                return await self._open()
            except PowerLoss:
                self.say("gone in recovery")
                await self.end_tasks()
                self.begin_process()

    def begin_process(self) -> None:
        self._restarts += 1
        self.recorder.process_ends()
        self.hands.clear()
        self.answers.clear()
        self.loop_failures.clear()
        super().begin_process()
        self._broker = None
        wall_ns = self.clock.time_ns()
        if self.random.random() < 0.5:  # the machine has started anew, and its clock with it
            self.clock = VirtualClock(wall_ns + 1)  # whose 0 is no time at which anything happened
        self.clock.advance(self.random.choice((1, 1000, 5000)) * SECOND_NS // 1000)

    async def end_tasks(self) -> None:
        self.recorder.is_alive = False
        await super().end_tasks()
