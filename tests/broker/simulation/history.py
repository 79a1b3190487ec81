"""One simulated life of a broker, drawn from a seed: publishers, slow readers, restarts, retention, against a model.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The broker runs unchanged on a simulated disk. Publishes are not awaited and subscriptions begin beside them, so that
histories meet interleavings. Now and then the broker comes to rest: then every reader must have exactly what the model
says. `tests/simulation` is the kernel of it.

history   this: what happens, one operation after the other     plan     what the seed draws before the history begins
traffic   messages that are published and answered              reader   a client that reads live
model     what the broker has to serve                          checks   compares the readers with the model

The operations are the public methods of `History`; in test_machine.py hypothesis chooses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from random import Random

from runnel.broker.broker import Broker
from runnel.broker.fetcher import FetchRequest
from runnel.broker.live.subscription import SubscribeRequest
from runnel.config import Keep
from runnel.errors import MovedError, OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, PartitionPlace, Start
from runnel.log.memory import MemoryLog
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies
from tests.broker.simulation import checks
from tests.broker.simulation.model import Model
from tests.broker.simulation.plan import PATTERNS, SECOND_NS, TOPICS, draw
from tests.broker.simulation.reader import SimulatedReader
from tests.broker.simulation.traffic import Runs, Traffic
from tests.fakes.disk import FakeDisk
from tests.fakes.losing_log import LosingDiskLog, is_away, losing_logs
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.operations import OperationTable
from tests.simulation.process import ProcessHistory
from tests.simulation.shards import shards_by

READERS_MAX = 5


def run_history(seed: int) -> Outcome:
    """The history of this seed, from the first opening to the last check."""
    random = Random(seed)
    return kernel.run(History(random, timing=random), seed, f"bin/soak broker --seed {seed}")


class History(ProcessHistory):
    """A broker, its model and its readers. `random` chooses what happens, `timing` how long disk and workers take."""

    def __init__(self, random: Random, *, timing: Random) -> None:
        super().__init__(random, FakeDisk(timing), timing=timing)
        self.settings = draw(self.random)
        self.shard_of = shards_by(self.settings)
        policies = Policies(self.settings.topics, partitions_max=1024)
        self.model = Model(policies)
        self.readers: list[SimulatedReader] = []
        self.traffic = Traffic(self)
        self.broker: Broker
        self._beginning: set[SimulatedReader] = set()
        self._reader_count = 0
        self._waiting_fetches: dict[asyncio.Future[None], TopicPartition] = {}
        self._restarts = 0
        self._operations: OperationTable[Callable[[], Awaitable[None]]] = OperationTable(
            plain={
                self.traffic.publish: 30,
                self.traffic.send: 8,
                self.traffic.publish_live: 12,
                self.subscribe: 10,
                self.grant: 14,
                self.reconnect: 4,
                self.leave: 2,
                self.pass_time: 6,
                self.set_cursor: 4,
                self.remove_cursor: 2,
                self.purge: 2,
                self.delete: 2,
                self.settle: 3,
                self.restart: 1,
                self.lose_shard: 4,
                self.regain_shard: 5,
                self.traffic.publish_elsewhere: 5,
                self.wait_for_message: 4,
            },
            troubles={},
        )

    @property
    def now_ns(self) -> int:
        return self.clock.time_ns()

    def counts(self) -> Mapping[str, int]:
        return {
            "messages": self.traffic.messages,
            "deliveries": sum(
                len(seen.offsets) for reader in self.readers for seen in reader.seen.values()
            ),
            "restarts": self._restarts,
        }

    # --- Operations ---

    async def live(self) -> None:
        await self.open()
        for _ in range(self.random.randint(10, 50)):
            operation, _ = self._operations.draw(self.random, ())
            await operation()
            await self.take_turns(self.random.choice((0, 0, 1, 3, 20)))
            self.raise_problems()
        await self.end()

    def raise_problems(self) -> None:
        self.traffic.look_at_answers()
        for reader in self.readers:
            if reader.problems:
                raise Violation(f"{reader}: {reader.problems[0]}")
        self.raise_loop_failures()

    # --- Openings ---

    async def open(self) -> None:
        self.watch_loop()
        with losing_logs():
            self.broker = await self.patiently(
                Broker.open(
                    self.settings,
                    directory="data",
                    disk=self.disk,
                    clock=self.clock,
                    workers=self.workers,
                ),
                "open",
            )

    async def end(self) -> None:
        """Everything is compared, before and after a last restart."""
        await self.settle()
        await self.restart()
        await self.settle()
        await self.close()
        self.raise_problems()

    async def close(self) -> None:
        await self.finish_beside()
        for fetching in self._waiting_fetches:
            fetching.cancel()
        self._waiting_fetches.clear()
        await self.patiently(self.broker.close(), "close")
        self.workers.close()
        self.traffic.look_at_answers()

    async def restart(self) -> None:
        self.say("the broker restarts")
        self._restarts += 1
        await self.finish_beside()
        await self.close()
        for reader in self.readers:
            self._left(reader)
            checks.note_lost(self, reader)
            reader.live.clear()
            reader.begins |= {key: (1, 1) for key in reader.begins if self.is_in_memory(key[0])}
            reader.ends = {
                key: end for key, end in reader.ends.items() if not self.is_in_memory(key[0])
            }
        self.model.restart()
        self.clock.advance(SECOND_NS)
        self.model.look(self.now_ns)
        self.begin_process()
        await self.open()
        for reader in list(self.readers):
            if reader.error is None:
                reader.is_moved = False
                await self.patiently(self._begin(reader), "subscribe")

    # --- Shards that go and come ---

    @property
    def main(self) -> LosingDiskLog:
        log = self.broker._stores.main
        assert isinstance(log, LosingDiskLog)
        return log

    @property
    def _memory(self) -> MemoryLog:
        log = self.broker._stores.kept[1]
        assert isinstance(log, MemoryLog)
        return log

    async def lose_shard(self, topic: str = "") -> None:
        """A shard goes, as planned or without warning. It may be that of a topic."""
        places = [(log, shard) for log in (self.main, self._memory) for shard in log.shards()]
        if topic:
            journal = self.model.policy(topic).journal
            places = [place for place in places if place[1].journal == journal]
        if not places:
            return
        log, shard = self.random.choice(places)
        is_planned = self.random.random() < 0.5
        self.say(f"{shard} goes, {'as planned' if is_planned else 'without warning'}")
        losing = log.release(shard) if is_planned else log.drop(shard)
        await self.patiently(losing, "losing a shard")
        if log is self._memory:
            self.model.lose(
                key for key in self.model.keys(self.model.existing) if self.shard_of(key) == shard
            )
        for reader in self.readers:
            if reader.is_moved:
                self._left(reader)
            if log is self._memory:
                checks.note_lost_shard(self, reader, shard)
        for fetching, key in self._waiting_fetches.items():
            if self._is_away(key):
                await self.patiently(fetching, f"a fetch of {key}, which is not here any more,")

    async def regain_shard(self) -> None:
        for log, shards in ((self.main, self.main.away), (self._memory, self._memory._released)):
            if shards and self.random.random() < 0.7:
                shard = self.random.choice(list(shards))
                self.say(f"{shard} is here again")
                await self.patiently(log.acquire(shard), "acquiring a shard")
        self._begin_moved()

    async def _regain_all(self) -> None:
        for log, shards in ((self.main, self.main.away), (self._memory, self._memory._released)):
            for shard in list(shards):
                await self.patiently(log.acquire(shard), "acquiring a shard")
        while any(reader.is_moved for reader in self.readers):
            self._begin_moved()
            await self.finish_beside()

    def _begin_moved(self) -> None:
        for reader in self.readers:
            if reader.is_moved and reader not in self._beginning:
                reader.is_moved = False
                self._begin_beside(reader)

    def _is_away(self, key: TopicPartition) -> bool:
        return any(is_away(log, key) for log in (self.main, self._memory))

    def refused(self, runs: Runs) -> None:
        """A batch was refused because its shard is elsewhere."""
        self.say("   refused")
        if not self._is_away(runs[0][0]):
            raise Violation(f"{runs} were refused, and their shard is here")
        self.model.refused(runs)

    def accepted(self, runs: Runs) -> None:
        if self._is_away(runs[0][0]):
            raise Violation(f"{runs} were taken, and their shard is elsewhere")

    async def wait_for_message(self) -> None:
        """Somebody fetches behind the last message, and waits for the next one."""
        keys = [key for key in self.model.keys(self.model.existing) if not self._is_away(key)]
        if keys:
            key = self.random.choice(keys)
            offset = self.model.partition(key).next_offset
            request = FetchRequest(*key, offset=offset, wait_ns=10 * SECOND_NS)
            self._waiting_fetches[asyncio.ensure_future(self._wait_for_message(request))] = key

    async def _wait_for_message(self, request: FetchRequest) -> None:
        # Behind what is not visible yet there is nothing; topics go; memory loses messages.
        with suppress(MovedError, OffsetAheadError, OffsetGoneError, UnknownTopicError):
            await self.broker.fetch(request)

    def is_in_memory(self, topic: str) -> bool:
        return self.model.policy(topic).keep is not Keep.DISK

    # --- Reading ---

    async def subscribe(self) -> None:
        if len(self.readers) >= READERS_MAX:
            await self.leave()
        self._reader_count += 1
        start, patterns = self._drawn_start()
        overflow = self.random.choice(("drop_oldest", "newest_per_topic", "disconnect"))
        reader = SimulatedReader(self._reader_count, patterns, start, overflow)
        reader.on_message = self._on_message
        self.readers.append(reader)
        self._begin_beside(reader)
        if self.random.random() < 0.5:  # much happens while it begins
            for _ in range(self.random.randint(1, 8)):
                await self.traffic.publish()
                await self.take_turns(self.random.choice((0, 1, 2, 5)))

    def _drawn_start(self) -> tuple[Start, list[str]]:
        literal = self.random.sample(TOPICS, self.random.randint(1, 4))
        if self.random.random() < 0.15:
            keys = self.model.keys(
                topic for topic in literal if self.model.policy(topic).keep is not Keep.NONE
            )
            places = [
                PartitionPlace(*key, self.random.randint(1, self.model.partition(key).stored_next))
                for key in keys
                if key[0] in self.model.existing
            ]
            if places:
                return Start("offsets", places), literal
        kind = self.random.choice(("latest", "last", "earliest", "earliest", "time"))
        time_ns = self.now_ns + self.random.randint(-90, 5) * SECOND_NS
        patterns = literal
        if self.random.random() < 0.6:
            patterns = self.random.sample(PATTERNS, self.random.randint(1, 2))
            patterns += literal[: self.random.randint(0, 1)]
        return Start(kind, time_ns=time_ns if kind == "time" else 0), patterns

    def _begin_beside(self, reader: SimulatedReader) -> None:
        self.begin_beside("subscribing", self._begin(reader))

    async def _begin(self, reader: SimulatedReader) -> None:
        is_new = not reader.position.is_known
        if is_new:
            reader.begins = checks.begins_now(self, reader, is_begun=False)
        start = reader.position.next_start()
        reader.last_asked += start.kind in ("last", "resume_last")
        credit_bytes = self.random.choice((0, 1, 300, 10_000))
        self.say(f"{reader} begins: {start.kind}")
        self._beginning.add(reader)
        try:
            subscription = await self.broker.subscribe(
                SubscribeRequest(
                    reader.number,
                    reader,
                    reader.patterns,
                    start,
                    credit_bytes=credit_bytes,
                    overflow=reader.overflow,
                )
            )
        except MovedError:
            self.say(f"{reader} cannot begin: a shard is elsewhere")
            reader.is_moved = True
            return
        finally:
            self._beginning.discard(reader)
        if is_new:
            later = checks.begins_now(self, reader, is_begun=True)
            reader.ends = {key: self.model.partition(key).next_offset for key in later}
            reader.begins = {
                key: (reader.begins.get(key, later[key])[0], later[key][1]) for key in later
            }
        elif start.kind == "resume_last":
            checks.note_gone_on(self, reader)
        reader.begun(subscription, credit_bytes)
        self.say(f"{reader} has begun")
        if self.random.random() < 0.7:
            subscription.start()

    def _on_message(self, reader: SimulatedReader, message: Message, epoch: int) -> None:
        checks.check_message(self, reader, message)

    async def grant(self) -> None:
        for reader in self.readers:
            if reader.subscription is not None and self.random.random() < 0.6:
                match self.random.randint(0, 4):
                    case 0:
                        reader.subscription.pause()
                    case 1:
                        reader.subscription.resume()
                    case 2:
                        reader.subscription.start()
                    case _:
                        reader.grant(self.random.choice((1, 200, 2000)))

    def _left(self, reader: SimulatedReader) -> None:
        """The reader leaves. Messages of topics not kept that waited for it are lost, and not counted."""
        reader.left()
        for key, live in reader.live.items():
            seen = reader.of(key)
            reader.live[key] = {place: True for place in live if place in set(seen.offsets)}
            seen.gaps = [gap for gap in seen.gaps if gap.reason != "overflow"]

    def _any_reader(self) -> SimulatedReader | None:
        free = [r for r in self.readers if r not in self._beginning and r.subscription is not None]
        return self.random.choice(free) if free else None

    async def reconnect(self) -> None:
        if (reader := self._any_reader()) is not None:
            self.say(f"{reader} reconnects")
            self._left(reader)
            self._begin_beside(reader)

    async def leave(self) -> None:
        if (reader := self._any_reader()) is not None:
            self.say(f"{reader} leaves")
            self.raise_problems()
            self._left(reader)
            self.readers.remove(reader)

    # --- Keeping house ---

    async def pass_time(self) -> None:
        seconds = self.random.choice((0.001, 1, 12, 40, 70))
        self.say(f"{seconds} s pass")
        self.clock.advance(round(seconds * SECOND_NS))
        self.model.look(self.now_ns)

    async def set_cursor(self) -> None:
        topics = [
            name for name in self.model.existing if self.model.policy(name).journal != "sized"
        ]
        keys = self.model.keys(topics)
        if not keys:
            return
        keep = self.model.policy(self.random.choice(keys)[0]).keep
        keys = [key for key in keys if self.model.policy(key[0]).keep is keep]
        chosen = self.random.sample(keys, min(len(keys), self.random.randint(1, 2)))
        places = {
            key: self.random.randint(1, self.model.partition(key).stored_next) for key in chosen
        }
        name = f"c{self.random.randint(1, 3)}"
        if any(map(self._is_away, places)):
            return
        self.say(f"cursor {name} at {places}")
        await self.patiently(
            self.broker.cursors.set(name, [CursorPlace(*key, o) for key, o in places.items()]),
            "setting a cursor",
        )
        self.model.cursors[name] = places
        self.model.look(self.now_ns)

    async def remove_cursor(self, topic: str | None = None) -> None:
        names = [
            name
            for name, places in self.model.cursors.items()
            if topic is None or any(key[0] == topic for key in places)
        ]
        for name in names if topic is not None else names[:1]:
            self.say(f"cursor {name} is removed")
            await self.patiently(self.broker.cursors.remove(name), "removing a cursor")
            del self.model.cursors[name]
        self.model.look(self.now_ns)

    async def purge(self) -> None:
        await self._hide(self.broker.purge_topic, self.model.purge, "purged")

    async def delete(self) -> None:
        await self._hide(self.broker.delete_topic, self.model.delete, "deleted")

    async def _hide(
        self, act: Callable[[str], Awaitable[None]], model: Callable[[str], None], what: str
    ) -> None:
        if not self.model.existing:
            return
        topic = self.random.choice(sorted(self.model.existing))
        if any(map(self._is_away, self.model.keys([topic]))):
            return
        await self.remove_cursor(topic)
        await self._sync()  # what is under way would be hidden or not, as it happens
        self.say(f"{topic} is {what}")
        await self.patiently(act(topic), what)
        model(topic)

    # --- Rest ---

    async def _sync(self) -> None:
        await self.finish_beside()
        await self.patiently(self.broker.sync(), "sync")
        while not self.traffic.is_answered:
            await asyncio.sleep(0)
            self.traffic.look_at_answers()
        for key in self.model.keys(self.model.existing):
            self.model.stored(key, self.model.partition(key).next_offset)

    async def settle(self) -> None:
        """Until everything is stored and every reader has caught up; then all is compared."""
        self.say("all comes to rest")
        await self._regain_all()
        await self._sync()
        for reader in self.readers:
            if reader.subscription is not None:
                reader.subscription.resume()
                reader.subscription.start()
        for reader in self.readers:
            await self.patiently(self._catch_up(reader), f"catching up of {reader}")
        await self.take_turns(10)
        self.raise_problems()
        await checks.check_everything(self)
        for reader in [reader for reader in self.readers if reader.error is not None]:
            self.say(f"{reader} was ended: {reader.error}")
            self.readers.remove(reader)

    async def _catch_up(self, reader: SimulatedReader) -> None:
        while checks.is_behind(reader):
            if reader.credit_bytes <= 0:
                reader.grant(500)
            await asyncio.sleep(0)
