"""One simulated life of a cluster, drawn from a seed: nodes that die, pause, drain and come back, and their clients.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The nodes are real brokers with a real `ClusterNode` each, over one simulated disk. The state of the cluster answers
late or not at all. Clients publish, fetch and acknowledge work beside all that, and follow `moved`. At the end
everything calms down, and then every promise is looked at.

history   this: what happens, one operation after the other     gate             pauses and ends what runs in a node
node      one process of a node                                 troubled_state   the state as a node sees it
clients   publishers, readers and workers                       model            what clients were told, and must find
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import TypeVar

from runnel.broker.broker import Broker
from runnel.cluster.memory import MemoryCluster
from runnel.config import BrokerSettings, Keep, LogSettings, Rotate, Settings, TopicRule
from runnel.errors import ClientFault, ConnectionLostError, RunnelError, Unavailable
from runnel.log.log import ShardId
from runnel.log.metadata.shared_records import SharedRecords
from runnel.topics.names import LIVE_JOURNAL
from tests.cluster.simulation.clients import Clients
from tests.cluster.simulation.gate import watch_tasks
from tests.cluster.simulation.model import Model
from tests.cluster.simulation.node import NodeLife
from tests.cluster.simulation.troubled_state import Trouble
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.operations import OperationTable
from tests.simulation.process import TURNS_MAX, ProcessHistory

MS = 1_000_000
SECOND_NS = 1_000 * MS
NAMES = ("node-1", "node-2", "node-3")
# More than a wish stays open, and than a planner needs to take it back.
CALM_S_MAX = 60

T = TypeVar("T")


def run_history(seed: int) -> Outcome:
    """The history of this seed, from the first opening to the last check."""
    random = Random(seed)
    return kernel.run(History(random), seed, f"bin/soak cluster --seed {seed}")


class History(ProcessHistory):
    """The nodes, their clients, and what the clients must find."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, FakeDisk(random), timing=random)
        self.settings = _settings(random)
        self.cluster = MemoryCluster(self.clock)
        self.records = SharedRecords()
        self.trouble = Trouble(
            random,
            turns_max=random.choice((0, 3, 20, 100)),
            failure_probability=random.choice((0.0, 0.0, 0.05, 0.2)),
        )
        self.observer = self.cluster.state("observer")  # as the parent of several processes
        self.nodes: dict[str, NodeLife] = {}
        self.model = Model()
        self.clients = Clients(self)
        self._moves = self._kills = 0
        self._is_calm = False
        self._operations: OperationTable[Callable[[], Awaitable[None]]] = OperationTable(
            plain={
                self.clients.publish: 40,
                self.clients.fetch: 12,
                self.clients.work: 12,
                self.move: 12,
                self.pause: 6,
                self.resume: 6,
                self.drain: 2,
                self.kill: 3,
                self.stop: 2,
                self.start: 5,
                self.pass_time: 6,
            },
            troubles={},
        )

    def counts(self) -> Mapping[str, int]:
        return {
            "messages": self.model.published,
            "moves": self._moves,
            "kills": self._kills,
            "acks": len(self.model.acked),
        }

    def is_expected_loop_failure(self, message: str, error: BaseException | None) -> bool:
        return isinstance(error, PowerLoss)

    # --- Time and promises that hold always ---

    def check_turn(self) -> None:
        """After each turn of the loop: nobody serves what another serves, and time passes a little."""
        owners: dict[ShardId, NodeLife] = {}
        for life in self.nodes.values():
            for shard in life.served():
                other = owners.setdefault(shard, life)
                if other is not life:
                    raise Violation(f"{other} and {life} both serve {shard}")
        view = self.cluster.view
        for row in view.owners.values():
            if row.wanted and row.wanted == row.owner and view.is_served(row.shard):
                raise Violation(f"{row.shard} is at {row.owner}, and still wanted there")
        if self.model.problems:
            raise Violation(self.model.problems[0])
        if self.random.random() < 0.1:
            self.clock.advance(MS)

    async def take_turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)
            self.check_turn()

    async def patiently(self, work: Awaitable[T], what: str) -> T:
        """As for every history, but a paused node goes on when it is waited for too long."""
        future = asyncio.ensure_future(work)
        for turn in range(3 * TURNS_MAX):
            if future.done():
                return future.result()
            if turn == 300:
                await self._resume_all()
            self.check_turn()
            await asyncio.sleep(0)
        raise Violation(f"{what} hangs")

    # --- A life ---

    async def live(self) -> None:
        watch_tasks(asyncio.get_running_loop())
        await self._make_directory()
        for name in NAMES[: self.random.randint(2, 3)]:
            await self._start(name)
        for _ in range(self.random.randint(20, 70)):
            operation, _ = self._operations.draw(self.random, ())
            await operation()
            await self.take_turns(self.random.choice((0, 1, 3, 20, 60)))
            self.raise_loop_failures()
        await self.calm_down()
        await self.patiently(self.clients.work_everywhere(), "the last workers")
        await self.clients.check_everything()
        await self._check_terms()
        self.raise_loop_failures()
        for life in list(self.nodes.values()):
            await self.patiently(life.stop(), f"the end of {life}")
        self.raise_loop_failures()

    async def end_tasks(self) -> None:
        for life in self.nodes.values():  # a violation leaves them as they are
            life.gate.is_paused = False
            life.is_dead = True
            life.workers.power_lost = PowerLoss("the history has ended")
            life.state.end()
        await super().end_tasks()

    async def _make_directory(self) -> None:
        """The first opening makes the directory; that is done by one broker alone."""
        disk = self.disk.beside()
        workers = self._new_workers()
        broker = await Broker.open(
            self.settings, directory="data", disk=disk, clock=self.clock, workers=workers
        )
        await broker.close()
        self.workers = workers

    async def _start(self, name: str) -> None:
        life = NodeLife(
            name,
            self.settings,
            self.cluster,
            self.records,
            self.disk,
            self.clock,
            self.trouble,
            self.random,
            self.random.choice((0, 500 * MS)),
        )
        self.say(f"{name} starts")
        await self.patiently(life.open(), f"the start of {name}")
        self.nodes[name] = life

    # --- What happens to nodes ---

    def living(self) -> list[NodeLife]:
        return [life for life in self.nodes.values() if not life.is_dead and not life.is_stopping]

    async def move(self) -> None:
        shards = sorted(self.cluster.view.owners)
        living = self.living()
        if shards and living:
            shard, life = self.random.choice(shards), self.random.choice(living)
            self.say(f"{shard} should go to {life}")
            self._moves += 1
            with suppress(ClientFault):  # it is as good as dead
                await self.observer.want(shard, life.name, "the history")

    async def pause(self) -> None:
        if living := self.living():
            life = self.random.choice(living)
            self.say(f"{life} pauses")
            life.gate.is_paused = True

    async def resume(self) -> None:
        paused = [life for life in self.living() if life.gate.is_paused]
        if paused:
            life = self.random.choice(paused)
            self.say(f"{life} goes on")
            life.gate.is_paused = False

    async def _resume_all(self) -> None:
        for life in self.nodes.values():
            life.gate.is_paused = False

    async def drain(self) -> None:
        if living := self.living():
            life = self.random.choice(living)
            is_draining = self.random.random() < 0.6
            self.say(f"{life} {'drains' if is_draining else 'takes shards again'}")
            await self.observer.set_draining(life.name, is_draining=is_draining)

    async def kill(self) -> None:
        if living := self.living():
            life = self.random.choice(living)
            self.say(f"{life} is killed")
            self._kills += 1
            self.model.killed(life)
            await life.kill()
            await self._ended(life)

    async def stop(self) -> None:
        living = self.living()
        if len(living) > 1:
            life = self.random.choice(living)
            self.say(f"{life} stops")
            life.gate.is_paused = False
            await self.patiently(life.stop(), f"the end of {life}")
            await self._ended(life)

    async def _ended(self, life: NodeLife) -> None:
        """The parent of the processes notices that one has ended, in whatever way."""
        await self.take_turns(self.random.choice((0, 5, 50)))
        last = self.cluster.view.nodes[life.name]
        await self.observer.declare_dead(life.name, last.incarnation)
        self.clients.lost(life)
        del self.nodes[life.name]

    async def start(self) -> None:
        missing = [name for name in NAMES if name not in self.nodes]
        if missing:
            await self._start(self.random.choice(missing))

    async def pass_time(self) -> None:
        ms = self.random.choice((5, 100, 1_000, 5_000))
        self.say(f"{ms} ms pass")
        self.clock.advance(ms * MS)

    # --- The end ---

    async def calm_down(self) -> None:
        """No more troubles. Soon every shard is served by somebody, and every client has its answers."""
        self.say("everything calms down")
        self.trouble.heal()
        await self._resume_all()
        if not self.living():
            await self._start(NAMES[0])
        for life in self.living():
            if self.random.random() < 0.8:
                await self.observer.set_draining(life.name, is_draining=False)
        for step in range(CALM_S_MAX * 20):
            if self._is_settled():
                break
            self.clock.advance(50 * MS)
            await self.take_turns(20)
            if step == CALM_S_MAX * 20 - 1:
                raise Violation(f"after {CALM_S_MAX} s of calm: {self._unsettled()}")
        await self.patiently(self.clients.finish(), "the clients' last requests")
        for life in self.living():  # what was only received is not visible before it is stored
            await self.patiently(life.run(life.broker.sync()), f"the last sync of {life}")

    def _is_settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        """Why the cluster is not at rest; empty if it is."""
        served = {shard: life.name for life in self.nodes.values() for shard in life.served()}
        for shard, row in self.cluster.view.owners.items():
            if shard not in served:
                return f"nobody serves {shard}: {row}"
            if row.owner != served[shard]:
                return f"{served[shard]} serves {shard}, and the state says {row}"
            if row.wanted:
                return f"{shard} is still wanted elsewhere: {row}"
        return ""

    async def _check_terms(self) -> None:
        for shard in self.cluster.view.owners:
            terms = await self.observer.terms(shard)
            for one, later in pairwise(terms):
                if later.epoch <= one.epoch:
                    raise Violation(f"the epochs of {shard} do not rise: {one}, {later}")
                is_kept = shard.journal == "main"
                if is_kept and later.first_entry != one.next_entry:
                    raise Violation(f"terms of {shard} leave a hole, or overlap: {one}, {later}")

    def is_kept(self, shard: ShardId) -> bool:
        return shard.journal not in ("memory", LIVE_JOURNAL)

    async def request(self, life: NodeLife, work: Callable[[Broker], Awaitable[T]]) -> T:
        """What a client gets from this process. ConnectionLostError if it dies meanwhile."""

        async def act() -> T:
            return await work(life.broker)

        return await life.run(act())


def is_retriable(error: RunnelError) -> bool:
    return isinstance(error, Unavailable | ConnectionLostError)


def _settings(random: Random) -> Settings:
    return Settings(
        topics=(
            TopicRule(match="m/*", keep=Keep.MEMORY, journal="memory"),
            TopicRule(match="n/*", keep=Keep.NONE, last_value=True),  # so that they exist
            TopicRule(
                match="*", journal="main", rotate=Rotate(bytes_max=random.choice((600, 10**6)))
            ),
        ),
        log=LogSettings(
            allocate_bytes=random.choice((0, 4096)),
            disk_reserve_bytes=0,
            retention_interval_ns=3_600 * SECOND_NS,
            catalogue_log_bytes_max=random.choice((1, 10**6)),
        ),
        broker=BrokerSettings(metrics_interval_ns=3_600 * SECOND_NS),
    )
