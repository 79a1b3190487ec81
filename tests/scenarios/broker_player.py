"""Plays scenarios with a whole broker: messages in segments on a disk, subscriptions, retention, crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random

from runnel.broker.broker import Broker
from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.config import LogSettings, Retain, Rotate, Settings, TopicRule, Until
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.heads import Start
from runnel.formats.message import Message
from runnel.formats.work_heads import Consume, DeliveryPart
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers
from tests.group_rules.history import offsets_text

# More turns of the event loop than any command takes.
TURNS = 300
# Each batch has its own segment, and messages that all subscriptions acknowledged are removed.
RULE = TopicRule(match="*", rotate=Rotate(bytes_max=1), retain=Retain(until=Until.ACKED))


class _Worker:
    """The consumer of a subscription, and the messages that it has not settled, by offset."""

    def __init__(self, number: int) -> None:
        self.connection_id = number
        self.peer = "a scenario"
        self.consumer: WorkConsumer
        self.has: dict[int, int] = {}  # the delivery of each
        self.new: list[int] = []

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        for delivery in deliveries:
            for message in Batch.unpack(b"".join(delivery.buffers)):
                self.has[message.offset] = delivery.lease.delivery
                self.new.append(message.offset)

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """Nothing is recalled here."""

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """Nothing is late here."""

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        """No lease ends here."""

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        """Nobody is ended here."""


class BrokerPlayer:
    """One topic, whose messages are removed once all subscriptions have acknowledged them.

    broker TOPIC                  publish PAYLOAD …     (one batch, and so one segment)
    subscribe NAME                join NAME             ack NAME 1-3 7 …      (stored when it is done)
    retain                        (a round of retention, and what is left)
    crash                         (power loss, and another broker on what the disk kept)
    """

    def __init__(self, words: list[str]) -> None:
        self._topic = words[0]
        self._loop = asyncio.new_event_loop()
        self._clock = VirtualClock()
        self._disk = FakeDisk(1)
        self._workers = SimulatedWorkers(Random(1))
        self._settings = Settings(
            topics=(RULE,), log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0)
        )
        self._broker: Broker
        self._hands: dict[str, _Worker] = {}
        self._commands: dict[str, Callable[[list[str]], Awaitable[Iterable[str]]]] = {
            "publish": self._publish,
            "subscribe": self._subscribe,
            "join": self._join,
            "ack": self._ack,
            "retain": self._retain,
            "crash": self._crash,
        }
        self._loop.run_until_complete(self._open())

    def do(self, words: list[str]) -> Iterable[str]:
        return self._loop.run_until_complete(self._do(words))

    async def _do(self, words: list[str]) -> list[str]:
        told = [*await self._commands[words[0]](words[1:])]
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for name, worker in self._hands.items():
            if worker.new:
                told.append(f"{name} gets {_offsets(worker.new)}")
                worker.new = []
        return told

    def close(self) -> None:
        self._loop.run_until_complete(self._broker.close())
        self._loop.run_until_complete(_end_others())
        self._loop.close()

    async def _open(self) -> None:
        self._broker = await Broker.open(
            self._settings,
            directory="data",
            disk=self._disk,
            clock=self._clock,
            workers=self._workers,
        )

    # --- Commands ---

    async def _publish(self, words: list[str]) -> Iterable[str]:
        batch = Batch.from_messages([Message(self._topic, word.encode()) for word in words])
        base = (await self._broker.publish(batch)).base_offsets[0]
        return [f"stored {offsets_text(base, base + len(words))}"]

    async def _subscribe(self, words: list[str]) -> Iterable[str]:
        await self._broker.consumer_groups.make_subscription(
            SubscriptionRequest(words[0], [self._topic], "shared", Start("earliest"))
        )
        return []

    async def _join(self, words: list[str]) -> Iterable[str]:
        worker = self._hands[words[0]] = _Worker(len(self._hands) + 1)
        request = Consume(1, worker.connection_id, words[0])
        worker.consumer = await self._broker.consumer_groups.consume(
            worker.connection_id, worker, request
        )
        worker.consumer.start()
        return []

    async def _ack(self, words: list[str]) -> Iterable[str]:
        worker = self._hands[words[0]]
        offsets: list[int] = []
        for word in words[1:]:
            begin, _, last = word.partition("-")
            offsets += range(int(begin), int(last or begin) + 1)
        parts = [DeliveryPart(worker.has[offset], offset, offset + 1) for offset in offsets]
        late = worker.consumer.ack((), parts)
        await worker.consumer.wait_stored()
        return [f"too late: {late}"] if late else []

    async def _retain(self, words: list[str]) -> Iterable[str]:
        log = self._broker._stores.main
        [shard] = [shard for shard in log.shards() if shard.journal != "main"] or log.shards()
        trimmed = await log.trim_shard(shard)
        left: list[int] = []
        bounds = await log.bounds(self._topic, 0)
        offset = bounds.first_offset
        while offset < bounds.next_offset:
            fetched = await self._broker.fetch(FetchRequest(self._topic, offset=offset))
            left += [message.offset for batch in fetched.batches for message in batch]
            offset = fetched.next_offset
        segments = sum(each.segments for each in log.statistics().shards if each.shard == shard)
        return [
            f"segments removed: {trimmed.segments_removed}, "
            f"rewritten: {trimmed.segments_rewritten}",
            f"left: {_offsets(left)}; segments: {segments}",
        ]

    async def _crash(self, words: list[str]) -> Iterable[str]:
        self._disk.crash()
        await _end_others()
        self._hands.clear()
        self._disk = self._disk.restart()
        self._workers = SimulatedWorkers(Random(1))
        await self._open()
        return ["the broker starts again"]


def _offsets(offsets: Sequence[int]) -> str:
    """Ranges of offsets; neighbours are shown as one."""
    spans: list[list[int]] = []
    for offset in offsets:
        if spans and spans[-1][1] == offset:
            spans[-1][1] += 1
        else:
            spans.append([offset, offset + 1])
    return " ".join(offsets_text(begin, end) for begin, end in spans) or "nothing"


async def _end_others() -> None:
    """End all tasks, as the death of the process does."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
