"""One simulated life of a data directory that several logs serve, drawn from a seed.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

Each log is a process of its own on one machine: a process dies alone, power goes for all of them. The shards go from
log to log by the real `acquire`, `release` and `drop`, while batches are on their way. The logs share their metadata
(`log/metadata/shared_records.py`); the directory, its locks and its marks are those of the simulated disk.

history   this: processes, and the operations on their logs     plan     what the seed draws before the history begins
member    a process with its log                                traffic  batches that are sent and answered
model     what the logs have promised together                  checks   reads a shard and compares it with the model
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeVar

from runnel.errors import MovedError, OffsetGoneError, Unavailable, UnknownTopicError
from runnel.log.group_store import BatchGroup
from runnel.log.log import ShardId
from runnel.log.metadata.shared_records import SharedRecords
from runnel.topics.policies import Policies
from tests.fakes import lossy_store
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.log.owners.checks import check, read_entries
from tests.log.owners.member import Member, follow_tasks
from tests.log.owners.model import Model
from tests.log.owners.plan import KEYS, NAMES, draw_settings
from tests.log.owners.traffic import Traffic
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.operations import OperationTable
from tests.simulation.process import TURNS_MAX, ProcessHistory
from tests.simulation.shards import shards_by
from tests.simulation.troubles import Trouble, draw_troubles

T = TypeVar("T")

_TROUBLES: Final = (Trouble.KILL, Trouble.POWER_LOSS, Trouble.LOST_ANSWER)
_FATES: Final = (lossy_store.Fate.STORED, lossy_store.Fate.LOST_BEFORE, lossy_store.Fate.LOST_AFTER)
# What waits for a group whose outcome is unknown lets time pass, so that the group is stored again.
_TURNS_BETWEEN_ATTEMPTS: Final = 40


class ProcessGone(Exception):
    """The process in which something ran has died: nobody knows how far it came."""


def run_history(seed: int) -> Outcome:
    """The history of this seed, from the first opening to the last check."""
    return kernel.run(History(Random(seed)), seed, f"bin/soak log --seed {seed}")


class History(ProcessHistory):
    """Processes that hand the shards of one directory to each other, and the model of it."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, FakeDisk(Random(random.getrandbits(32))), timing=random)
        self.settings = draw_settings(random)
        self.policies = Policies(self.settings.topics)
        self.shard_of = shards_by(self.settings)
        self.troubles = draw_troubles(random, _TROUBLES, 0.6)
        self.shared = SharedRecords()
        self.model = Model()
        self.members: list[Member] = []
        self.traffic = Traffic(self)
        self._adding: dict[tuple[Member, ShardId], list[asyncio.Future[None]]] = {}
        self._under_way: list[tuple[Member, asyncio.Task[Any]]] = []
        self._newest_term = -1  # of a named publisher
        self._loses_answers = Trouble.LOST_ANSWER in self.troubles
        self._count = self._terms = self._deaths = 0
        self._operations: OperationTable[Callable[[], Coroutine[Any, Any, None]]] = OperationTable(
            plain={
                self.traffic.append: 30,
                self.traffic.append_named: 16,
                self.acquire: 14,
                self.release: 8,
                self.drop: 5,
                self.add_state: 10,
                self.purge: 2,
                self.delete: 2,
                self.trim: 4,
                self.read_beside: 5,
                self.set_cursor: 2,
                self.take_term: 2,
                self.open_one: 4,
                self.check_one: 4,
            },
            troubles={Trouble.KILL: {self.kill: 4}, Trouble.POWER_LOSS: {self.lose_power: 2}},
        )

    def counts(self) -> Mapping[str, int]:
        return {
            "terms": self._terms,
            "deaths": self._deaths,
            "messages": self.model.message_count,
        }

    def check_turn(self) -> None:
        """A process that has died is noticed where it is waited for."""

    def is_expected_loop_failure(self, message: str, error: BaseException | None) -> bool:
        # What was under way in a process that died keeps its error to itself.
        return "never retrieved" in message or isinstance(error, PowerLoss)

    # --- The life ---

    async def live(self) -> None:
        follow_tasks(asyncio.get_running_loop())
        await self._make_directory()
        for name in NAMES:
            await self._open(name)
        for _ in range(self.random.choice((20, 40, 80))):
            operation, _ = self._operations.draw(self.random, self.troubles)
            with suppress(ProcessGone):
                await operation()
            await self.take_turns(self.random.choice((0, 0, 1, 4)))
            await self._bury()
            self.traffic.look_at_answers()
            self._look_at_what_is_under_way()
            self.raise_loop_failures()
        await self._end()

    async def _make_directory(self) -> None:
        """The first opening makes the directory: one log does that alone."""
        alone = Member("alone", self.disk, self.workers, None)
        await self.at(alone, alone.open(self.settings, self.policies, self.clock), "open")
        self.shared.records += alone.log._state.snapshot(0)
        await self.at(alone, alone.log.close(), "close")

    async def _end(self) -> None:
        """Everything is read by one log that takes all shards, and after a restart by another."""
        self._loses_answers = False
        for member in self.members:
            member.disk.crash_at(0)
        await self._finish_what_is_under_way()
        if not self.members:
            await self._open(NAMES[0])
        for _ in range(2):
            for shard in list(self.model.shards):
                await self._give_back(shard)
            for member in list(self.members):
                await self._close(member)
            await self._open(self.random.choice(NAMES))
            [member] = self.members
            for shard in list(self.model.shards):
                await self._acquire(member, shard)
                await check(self, member, shard)
            await self.traffic.repeat_all()

    async def _give_back(self, shard: ShardId) -> None:
        owner = self.model.shard(shard).owner
        if isinstance(owner, Member):
            await self._release(owner, shard)

    # --- Processes ---

    async def at(self, member: Member, work: Coroutine[Any, Any, T], what: str) -> T:
        """The result of work in a process. ProcessGone if the process dies meanwhile."""
        task = member.start(work)
        for turn in range(1, TURNS_MAX):
            if member.is_dead:
                await self._bury()
                raise ProcessGone
            if task.done():
                return task.result()
            await asyncio.sleep(0)
            if turn % _TURNS_BETWEEN_ATTEMPTS == 0 and (wake_ns := self.clock.next_wake_ns):
                self.clock.advance(wake_ns)
        raise Violation(f"{what} hangs at {member}")

    async def _open(self, name: str) -> None:
        living = [each for each in self.members if not each.is_dead]
        self.disk = living[0].disk.beside() if living else self.disk.restart()
        workers = SimulatedWorkers(self.random, turns_max=self.random.choice((0, 1, 4)))
        member = Member(name, self.disk, workers, self.shared)
        self.members.append(member)
        self.say(f"{member} opens")
        opening = member.open(self.settings, self.policies, self.clock, self._draw_fate)
        await self.at(member, opening, "open")

    def _draw_fate(self, group: BatchGroup, is_repeated: bool) -> lossy_store.Fate:
        """What becomes of an attempt to store a group."""
        return self.random.choice(_FATES) if self._loses_answers else lossy_store.Fate.STORED

    async def open_one(self) -> None:
        names = {each.name for each in self.members}
        missing = [name for name in NAMES if name not in names]
        if missing:
            await self._open(self.random.choice(missing))

    async def _close(self, member: Member) -> None:
        self.say(f"{member} closes")
        await self.at(member, member.log.close(), "close")
        self.traffic.look_at_answers()
        self._forget(member)
        await member.end()

    async def _bury(self) -> None:
        """Processes that have died take all that they had along."""
        for member in [each for each in self.members if each.is_dead]:
            self._deaths += 1
            self.say(f"{member} is gone")
            self._forget(member)
            await member.end()

    def _forget(self, member: Member) -> None:
        self.traffic.forget(member)
        self.members.remove(member)
        for shard in self.model.shards.values():
            if shard.owner is member:
                shard.owner = None

    async def kill(self) -> None:
        member = self.some_member()
        if member is None:
            return
        if self.random.random() < 0.5:
            self.say(f"{member} is killed")
            member.disk.kill()
        else:
            operation = len(member.disk.operations) + self.random.randint(1, 20)
            self.say(f"{member} is killed in disk operation {operation}")
            member.disk.kill_at(operation)

    async def lose_power(self) -> None:
        member = self.some_member()
        if member is None:
            return
        if self.random.random() < 0.3:
            self.say("power loss")
            member.disk.crash()
        else:
            operation = len(member.disk.operations) + self.random.randint(1, 30)
            self.say(f"power loss in disk operation {operation} of {member}")
            member.disk.crash_at(operation)

    def some_member(self) -> Member | None:
        return self.random.choice(self.members) if self.members else None

    # --- Ownership ---

    def some_shard(self) -> ShardId:
        return self.shard_of(self.random.choice(KEYS))

    def owner_of(self, shard: ShardId) -> Member | None:
        owner = self.model.shard(shard).owner
        return owner if isinstance(owner, Member) and not owner.is_dead else None

    async def acquire(self) -> None:
        member = self.some_member()
        if member is not None:
            await self._acquire(member, self.some_shard())

    async def _acquire(self, member: Member, shard: ShardId) -> None:
        owner = self.owner_of(shard)
        if owner is member:
            return
        self.say(f"{member} acquires {shard}")
        try:
            view = await self.at(member, member.log.acquire(shard), "acquire")
        except MovedError:
            if owner is None:
                raise Violation(f"nobody serves {shard}, and {member} cannot have it") from None
            return
        self._terms += 1
        if self.owner_of(shard) is None:
            self.model.shard(shard).owner = None  # its process may have died meanwhile
        self.model.acquired(shard, member, view.epoch)
        state = view.state
        self.model.check_contents(shard, state.contents)
        contents = self.model.shard(shard)
        state.contents.clear()
        state.snapshot = lambda: list(contents.stored_contents | contents.open_contents)
        recovered = member.log.statistics().damage
        if recovered:
            raise Violation(f"{member} finds damage that nobody did: {recovered}")

    async def release(self) -> None:
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is not None:
            await self._release(owner, shard)

    async def _release(self, owner: Member, shard: ShardId) -> None:
        self.say(f"{owner} releases {shard}")
        try:
            await self.at(owner, owner.log.release(shard), "release")
        except Unavailable as error:
            if Trouble.LOST_ANSWER not in self.troubles:
                raise
            self.say(f"   {error}")  # an outcome stayed unknown for too long
            self._check_ended(owner, shard)
            self._adding.pop((owner, shard), None)
            return
        self._check_ended(owner, shard)
        for added in self._adding.pop((owner, shard), ()):
            if not added.done() or added.exception() is not None:
                raise Violation(
                    f"{owner} has released {shard} without storing a subscription's state"
                )

    def _check_ended(self, owner: Member, shard: ShardId) -> None:
        """With its term everything in a shard is answered."""
        self.model.shard(shard).owner = None
        self.traffic.check_answered(owner, shard)

    async def drop(self) -> None:
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is not None:
            await self._drop(owner, shard)

    async def _drop(self, owner: Member, shard: ShardId) -> None:
        self.say(f"{owner} drops {shard}")
        await self.at(owner, owner.log.drop(shard), "drop")
        self._check_ended(owner, shard)
        self._adding.pop((owner, shard), None)

    # --- What else belongs to a shard ---

    async def add_state(self) -> None:
        """A subscription records its progress."""
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is None:
            return
        self._count += 1
        known, content = self.model.shard(shard), b"content %d" % self._count
        known.open_contents.add(content)
        self.say(f"{owner} adds {content.decode()} to {shard}")
        state = owner.log.shard(shard).state
        added = owner.run(lambda: state.add(content))
        self._adding.setdefault((owner, shard), []).append(added)
        term = known.epoch

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None and known.epoch == term:
                known.open_contents.discard(content)
                known.stored_contents.add(content)

        added.add_done_callback(done)

    async def purge(self) -> None:
        key = self.random.choice(KEYS[:2])
        owner = self.owner_of(self.shard_of(key))
        if owner is None or owner.log.metadata.topics.find(key[0]) is None:
            return
        floor = 1

        async def look_and_purge() -> None:  # in one go: what is visible now is what goes
            nonlocal floor
            floor = owner.log.shard(self.shard_of(key)).next_offset(*key)
            self.say(f"{owner} purges {key[0]} below {floor}")
            self.model.hiding(key, floor)
            await owner.log.metadata.purge_topic(key[0])

        try:
            await self.at(owner, look_and_purge(), "purge")
        except Unavailable as error:
            self.say(f"   {error}")
        else:
            self.model.hidden(key, floor)

    async def delete(self) -> None:
        key = ("removed", 0)
        owner = self.owner_of(self.shard_of(key))
        if owner is None or owner.log.metadata.topics.find(key[0]) is None:
            return
        if self.random.random() < 0.5:  # what is being stored meanwhile is hidden, too
            self.traffic.give(owner, self.model.sending(key, self.traffic.payloads()))
        self.say(f"{owner} deletes {key[0]}")
        with suppress(Unavailable, UnknownTopicError):
            await self.at(owner, owner.log.metadata.delete_topic(key[0]), "delete")
        if self.random.random() < 0.5:
            await self.purge()
        if self.random.random() < 0.5 and self.owner_of(self.shard_of(key)) is owner:
            await self._drop(owner, self.shard_of(key))

    async def trim(self) -> None:
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is not None:
            self.say(f"{owner} trims {shard}")
            self._begin_at(owner, owner.log.trim_shard(shard))

    async def read_beside(self) -> None:
        """Read a shard to its end, whatever happens to it meanwhile."""
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is not None:
            self.say(f"{owner} reads {shard} …")
            self._begin_at(owner, read_entries(self, owner, shard))

    def _begin_at(self, member: Member, work: Coroutine[Any, Any, Any]) -> None:
        """Start something that its shard may be lost under."""
        self._under_way.append((member, member.start(work)))

    def _look_at_what_is_under_way(self) -> None:
        done = [each for each in self._under_way if each[1].done()]
        self._under_way = [each for each in self._under_way if not each[1].done()]
        for member, task in done:
            if member.is_dead or task.cancelled() or (error := task.exception()) is None:
                continue
            if not isinstance(error, (Unavailable, OffsetGoneError, ProcessGone)):
                raise error

    async def _finish_what_is_under_way(self) -> None:
        for member, task in self._under_way:
            with suppress(ProcessGone, Unavailable, OffsetGoneError):
                await self.at(member, _result_of(task), "what is under way")

    # --- What belongs to none ---

    async def set_cursor(self) -> None:
        member = self.some_member()
        if member is not None:
            await self.at(member, member.log.metadata.set_cursor("c", ()), "set_cursor")
            for each in self.members:
                if each.log.metadata.cursors.find("c") is None:
                    raise Violation(f"{each} does not know the cursor that {member} has set")

    async def take_term(self) -> None:
        member = self.some_member()
        if member is not None:
            term = await self.at(member, member.log.metadata.take_term("p"), "take_term")
            if term <= self._newest_term:
                raise Violation(f"{member} gives p the term {term}, after {self._newest_term}")
            self._newest_term = term

    async def check_one(self) -> None:
        shard = self.some_shard()
        owner = self.owner_of(shard)
        if owner is not None:
            await check(self, owner, shard)


async def _result_of(task: asyncio.Task[Any]) -> Any:
    return await task
