"""One simulated life of a log, drawn from a seed: operations, troubles, recoveries, and the checks of the model.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The log runs unchanged on a simulated disk. Appends are not awaited, and some operations run beside others, so that
histories meet interleavings. `tests/simulation` is the kernel of it.

history     this: processes that begin and end     plan      what the seed draws before the history begins
operations  what the history does                  traffic   batches that are sent and answered
model       what the log has promised              checks    reads everything and compares it with the model
clients     named publishers                       damage    one flipped bit, as the last operation
played_subscription   a subscription that acknowledges
medium      what stores groups, and may lose answers
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final, TypeVar

from runnel.errors import RunnelError, Unavailable
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.group_writer import GroupWriter
from runnel.log.group_store import GroupStore
from runnel.log.log import ShardId
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.log.simulation import operations
from tests.log.simulation.checks import check_everything
from tests.log.simulation.damage import damage_something
from tests.log.simulation.medium import Medium
from tests.log.simulation.model import Model
from tests.log.simulation.plan import Plan, draw
from tests.log.simulation.played_subscription import Subscription, attach
from tests.log.simulation.traffic import Traffic
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.process import ProcessHistory
from tests.simulation.shards import shards_by
from tests.simulation.troubles import Trouble

T = TypeVar("T")
# What may wait for a group whose outcome is unknown: time passes meanwhile, so that the group is stored again.
_WAITS_FOR_GROUPS: Final = {"append", "close", "reopen", "rewrite", "sync", "trim", "wait_room"}
_TURNS_BETWEEN_ATTEMPTS: Final = 40
_TURNS_BEFORE_ROOM: Final = 50 * _TURNS_BETWEEN_ATTEMPTS


def run_history(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    """The history of this seed, from opening to its last check; `change` may alter its plan."""
    random = Random(seed)
    history = History(change(draw(random)), random)
    return kernel.run(history, seed, f"bin/soak log --seed {seed}")


class History(ProcessHistory):
    """A log, its model, and the processes that open the log one after the other."""

    def __init__(self, plan: Plan, random: Random) -> None:
        disk = FakeDisk(Random(random.getrandbits(32)))
        super().__init__(random, disk, timing=random, worker_turns_max=plan.worker_turns_max)
        self.plan = plan
        shard_of = shards_by(plan.settings)
        self.subscription = Subscription(plan.covered, shard_of)
        self.model = Model(plan.policies, self.subscription, shard_of)
        self.traffic = Traffic(self)
        self.medium = None if plan.losses is None else Medium(plan.losses)
        self._waiting: list[str] = []  # what waits, of `_WAITS_FOR_GROUPS`
        self._waited_turns = 0
        self.lost_shards: dict[ShardId, RunnelError] = {}  # dropped by this process, and why
        self.is_damaged = False  # a stored bit was flipped
        self._log: DiskLog | None = None
        self._recoveries = self._disk_operations = 0
        self._has_lost = False  # the process before this one has dropped a shard

    @property
    def log(self) -> DiskLog:
        assert self._log is not None
        return self._log

    @property
    def now_ns(self) -> int:
        return self.clock.time_ns()

    def counts(self) -> Mapping[str, int]:
        return {
            "disk operations": self._disk_operations + len(self.disk.operations),
            "recoveries": self._recoveries,
            "messages": len(self.model.at),
            "unknown outcomes": 0 if self.medium is None else self.medium.unknown_count,
        }

    def is_expected_loop_failure(self, message: str, error: BaseException | None) -> bool:
        # An operation that was under way at a power loss keeps its error to itself.
        return "never retrieved" in message or isinstance(error, PowerLoss)

    # --- Operations ---

    async def live(self) -> None:
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
        if self.medium is not None:
            self.medium.is_well = True
        await self.open()
        await operations.settle(self)
        await check_everything(self)
        if self.plan.ends_in_damage:
            await damage_something(self)
        await self.close()

    async def _step(self) -> None:
        operation, is_beside = operations.TABLE.draw(self.random, self.plan.troubles)
        if is_beside:
            self.begin_beside(operation.__name__, operation(self))
        else:
            await operation(self)
        self.traffic.look_at_answers()
        await self.finish_some_beside()
        self.raise_loop_failures()

    async def sync(self) -> None:
        """Wait until nothing is queued. Each shard reports once a batch that was answered and then lost."""
        for _ in range(len(self.log.shards()) + 1):
            try:
                return await self.patiently(self.log.sync(), "sync")
            except Unavailable as error:
                if not self.was_faulty and not self._is_of_medium(error):
                    raise
                self.say(f"   sync reports: {error}")
        raise Violation("sync reports more errors than there are shards")

    # --- The medium: outcomes that are unknown ---

    async def patiently(self, work: Awaitable[T], what: str) -> T:
        if self.medium is None or what not in _WAITS_FOR_GROUPS:
            return await super().patiently(work, what)
        self._waiting.append(what)
        try:
            return await super().patiently(work, what)
        finally:
            self._waiting.remove(what)

    def check_turn(self) -> None:
        """What waits for a group long enough lets time pass, and heals the medium unless the log is closing.

        A group whose outcome is unknown may need room, or a disk without faults: it gets both in the end.
        """
        super().check_turn()
        if self.medium is None or not self._waiting:
            return
        self._waited_turns += 1
        if self._waited_turns % _TURNS_BETWEEN_ATTEMPTS == 0:
            self.medium.tell(heals="close" not in self._waiting)
            if self._waited_turns % _TURNS_BEFORE_ROOM == 0:
                self.heal_disk()
            if (wake_ns := self.clock.next_wake_ns) is not None:
                self.clock.advance(wake_ns)

    @property
    def may_have_failed(self) -> bool:
        """Whether a batch that was answered before it was stored may have failed in this process."""
        return self.was_faulty or (self.medium is not None and self.medium.has_failures)

    def accept_failure(self, error: BaseException) -> None:
        if self._is_of_medium(error):
            self.say(f"   {type(error).__name__}: {error}")
        else:
            super().accept_failure(error)

    def _is_of_medium(self, error: BaseException) -> bool:
        """Whether it is right that this failed: the medium failed cleanly, or a shard was dropped."""
        if self.medium is None:
            return False
        return self.medium.has_failed(error) or self.is_loss(error) or self.is_unknown_loss(error)

    def is_loss(self, error: BaseException) -> bool:
        """Whether it is the reason why a shard was dropped: nothing of the batch is stored."""
        return any(error is reason for reason in self._losses().values())

    def is_unknown_loss(self, error: BaseException) -> bool:
        """Whether it says that a shard was dropped, and that it is unknown whether the batch is stored."""
        return isinstance(error, Unavailable) and any(
            str(error).startswith(f"shard {shard}: it is unknown") for shard in self._losses()
        )

    def _losses(self) -> Mapping[ShardId, RunnelError]:
        """The shards that were dropped, by the history or by the log when it closed."""
        if self._log is not None:
            for shard_id, shard in self._log._owned.shards.items():
                if shard.writer._dropped is not None:
                    self.lost_shards[shard_id] = shard.writer._dropped
        return self.lost_shards

    def _make_group_store(self, shard: ShardId, writer: GroupWriter) -> GroupStore:
        assert self.medium is not None
        return self.medium.make(shard, writer, self.workers)

    # --- Processes: each opens the log, and closes it or dies ---

    async def open(self) -> None:
        may_fail = Trouble.DISK_FAULT in self.plan.troubles and not self.is_damaged
        if may_fail and self.random.random() < 0.1:
            operations.arm_fault(self)
        await self.open_despite_faults(self._open_now)

    async def _open_now(self) -> None:
        self._log = await self.patiently(
            DiskLog.open(
                self.plan.settings.data,
                settings=self.plan.settings,
                policies=self.plan.policies,
                disk=self.disk,
                clock=self.clock,
                workers=self.workers,
                holds=self.subscription,
                make_group_store=None if self.medium is None else self._make_group_store,
            ),
            "open",
        )
        recovered = self.log.recovered
        self.say(f"opened: clean={recovered.was_clean} torn={list(recovered.torn)}")
        if recovered.damage and not self.is_damaged:
            raise Violation(f"damage was found that nobody did: {list(recovered.damage)}")
        self.model.check_topics(self.log.metadata.topics.names())
        self.model.check_cursors(self.log.metadata.cursors.all())
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
            if self.traffic.failed_batches() == failed_before and not self.may_have_failed:
                self.traffic.all_is_stored()
        self.traffic.look_at_answers()
        self.traffic.check_all_answered()
        self.begin_process()

    async def restart(self) -> None:
        """Close and open again: nothing may be left to recover."""
        was_faulty = self.was_faulty
        await self.close()
        was_faulty = was_faulty or self._has_lost
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
        await self.end_tasks()
        self.begin_process()

    def begin_process(self) -> None:
        """The process before it is over: what it did not answer stays open."""
        self.traffic.process_ended()
        self._disk_operations += len(self.disk.operations)
        self._has_lost = bool(self._losses())
        self.lost_shards = {}
        super().begin_process()
        if self.medium is not None:
            self.medium.begin_process()
        self._log = None

    async def _recover(self) -> None:
        """The power is gone, or the process: begin the next one, which may die in recovery too."""
        self.say("  the process is gone")
        for _, work in self.beside:
            error = work.exception() if work.done() and not work.cancelled() else None
            if error is not None and not isinstance(error, PowerLoss):
                raise error
        self._recoveries += 1
        while True:
            await self.end_tasks()
            self.loop_failures.clear()
            self.begin_process()
            if Trouble.RECOVERY_CRASH in self.plan.troubles and self.random.random() < 0.5:
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
