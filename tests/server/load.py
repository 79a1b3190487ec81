"""Clients that publish and read while their server is restarted, and record every answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from random import Random
from typing import Final, NamedTuple

from runnel.client import Bus, connect
from runnel.client.consumer import Subscription
from runnel.client.producer import Publisher
from runnel.client.results import Receipt
from runnel.errors import RunnelError, Unavailable

RULES: Final = (
    'topics=[{ match = "parts/*", partitions = 3, journal = "parts", rotate = { bytes = "256KiB" } },'
    ' { match = "own/*", journal = "{topic}", rotate = { bytes = "64KiB" } },'
    ' { match = "*", journal = "rest", rotate = { bytes = "256KiB" } }]'
)
# Small files and snapshots, so that kills also hit rotation and the catalogue.
SMALL: Final = (
    RULES,
    "log.allocate_bytes=64KiB",
    "log.disk_reserve_bytes=0",
    "log.catalogue_log_bytes_max=8KiB",
    "log.last_value_bytes_max=4KiB",
)
TOPICS: Final = ("a", "b", "own/x", "own/y", "parts/p", "parts/q")

# No client gives up while the server is down: a busy machine may need long to start one.
DEADLINE_S: Final = 90.0
_BURST_MESSAGES_MAX: Final = 40
_BUFFER_BYTES: Final = 64 * 1024


class TopicPartition(NamedTuple):
    topic: str
    partition: int


StoredAt = tuple[TopicPartition, int]  # and the offset


class FoundMessage(NamedTuple):
    """A message that a reader found."""

    offset: int
    payload: bytes


@dataclass
class ReaderRecord:
    """The messages that one reader received, by partition and in their order."""

    name: str
    covers: Callable[[TopicPartition], bool]
    found: dict[TopicPartition, list[FoundMessage]] = field(
        default_factory=lambda: defaultdict(list)
    )
    count: int = 0

    def take(self, topic: str, partition: int, offset: int, payload: bytes) -> None:
        self.found[TopicPartition(topic, partition)].append(FoundMessage(offset, payload))
        self.count += 1


@dataclass
class PublishLedger:
    """The answers to publishers: where each payload is stored, and which failed."""

    acknowledged: dict[bytes, StoredAt] = field(default_factory=dict)
    failures: list[RunnelError] = field(default_factory=list)

    def note(self, payload: bytes, receipt: Receipt) -> None:
        place = (TopicPartition(receipt.topic, receipt.partition), receipt.offset)
        assert receipt.level == "stored"
        assert payload not in self.acknowledged, f"{payload!r} was acknowledged twice"
        self.acknowledged[payload] = place


class ClientLoad:
    """Publishers and readers in this event loop. Call `end_publishing` before `end_reading`."""

    def __init__(self, url: str, seed: int) -> None:
        self.named = PublishLedger()
        self.unnamed = PublishLedger()
        self.readings: list[ReaderRecord] = []
        self._url = url
        self._random = Random(seed)
        self._is_ending = False
        self._publishing: list[asyncio.Task[None]] = []
        self._reading: list[asyncio.Task[None]] = []
        self._buses: list[Bus] = []
        self._subscriptions: list[Subscription] = []

    @property
    def acknowledged(self) -> int:
        return len(self.named.acknowledged) + len(self.unnamed.acknowledged)

    def check_running(self) -> None:
        """Raises the error of a publisher or reader that has failed."""
        for task in (*self._publishing, *self._reading):
            if task.done() and not task.cancelled():
                task.result()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or a client has failed."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.check_running()
                await asyncio.sleep(0.001)

    # --- Publishing ---

    async def _bus(self) -> Bus:
        bus = await connect(self._url, deadline_s=DEADLINE_S)
        self._buses.append(bus)
        return bus

    async def publish_named(self, name: str) -> None:
        """A named publisher: none of its messages may fail."""
        publisher = (await self._bus()).publisher(
            name=name, batch_messages_max=16, buffer_bytes_max=_BUFFER_BYTES
        )
        await publisher.open()
        self._start_publisher(name, publisher, self.named)

    async def publish_unnamed(self, name: str) -> None:
        """A publisher without a name: messages under way when the server dies may fail."""
        publisher = (await self._bus()).publisher(
            batch_messages_max=16, buffer_bytes_max=_BUFFER_BYTES
        )
        self._start_publisher(name, publisher, self.unnamed)

    async def publish_singly(self, name: str) -> None:
        """Publishes one message at a time, and waits for each receipt."""
        bus = await self._bus()
        random = self._new_random()

        async def run() -> None:
            number = 0
            while not self._is_ending:
                number += 1
                payload = b"%s:%d" % (name.encode(), number)
                try:
                    receipt = await bus.publish(random.choice(TOPICS), payload, key=b"%d" % number)
                except Unavailable as error:
                    self.unnamed.failures.append(error)
                else:
                    self.unnamed.note(payload, receipt)

        self._publishing.append(asyncio.create_task(run(), name=name))

    def _start_publisher(self, name: str, publisher: Publisher, ledger: PublishLedger) -> None:
        random = self._new_random()
        sent: deque[tuple[bytes, asyncio.Future[Receipt]]] = deque()

        def settle(payload: bytes, future: asyncio.Future[Receipt]) -> None:
            if isinstance(error := future.exception(), RunnelError):
                ledger.failures.append(error)
            else:
                ledger.note(payload, future.result())

        async def run() -> None:
            number = 0
            while not self._is_ending:
                for _ in range(random.randint(1, _BURST_MESSAGES_MAX)):
                    number += 1
                    payload = b"%s:%d" % (name.encode(), number)
                    key = b"%d" % random.randrange(20) if random.random() < 0.8 else None
                    future = publisher.submit(payload, random.choice(TOPICS), key)
                    sent.append((payload, future))
                while sent and sent[0][1].done():
                    settle(*sent.popleft())
                await publisher.ready()
                await asyncio.sleep(0)
            await publisher.flush()
            for payload, future in sent:
                settle(payload, future)
            await publisher.close()

        self._publishing.append(asyncio.create_task(run(), name=name))

    async def end_publishing(self) -> None:
        """Stop, and wait for the answers to all messages that were sent."""
        self._is_ending = True
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._publishing)

    def _new_random(self) -> Random:
        return Random(self._random.getrandbits(64))

    # --- Reading ---

    async def subscribe(self, *patterns: str) -> None:
        """A reader that stays subscribed while the server is restarted."""
        reading = ReaderRecord(
            f"subscription to {' '.join(patterns)}",
            lambda place: any(fnmatchcase(place.topic, pattern) for pattern in patterns),
        )
        self.readings.append(reading)
        subscription = (await self._bus()).subscribe(*patterns)
        await subscription.open()
        self._subscriptions.append(subscription)

        async def run() -> None:
            async for message in subscription:
                reading.take(message.topic, message.partition, message.offset, message.payload)

        self._reading.append(asyncio.create_task(run(), name=reading.name))

    async def fetch(self, topic: str, partition: int) -> None:
        """A reader that keeps its own offset."""
        reading = ReaderRecord(
            f"fetches of {topic}/{partition}", lambda place: place == (topic, partition)
        )
        self.readings.append(reading)
        bus = await self._bus()
        await bus.publish(topic, b"first", partition=partition)  # reading does not create a topic

        async def run() -> None:
            offset = 1
            while True:
                page = await bus.fetch(topic, offset, partition=partition, wait_s=5)
                assert not page.gaps
                for message in page.messages:
                    reading.take(topic, partition, message.offset, message.payload)
                offset = page.next_offset

        self._reading.append(asyncio.create_task(run(), name=reading.name))

    async def end_reading(self, stored: dict[TopicPartition, list[FoundMessage]]) -> None:
        """Wait until every reader has read all that is stored for it, and any surplus has arrived, too."""
        for reading in self.readings:
            expected = sum(len(found) for place, found in stored.items() if reading.covers(place))
            await self.wait_for(lambda: reading.count >= expected)  # noqa: B023 - called here only
        for bus in self._buses:
            await bus.ping()
        gaps = [gap for subscription in self._subscriptions for gap in subscription.gaps]
        assert not gaps, gaps

    async def close(self) -> None:
        for task in (*self._publishing, *self._reading):
            task.cancel()
        await asyncio.gather(*self._publishing, *self._reading, return_exceptions=True)
        for bus in self._buses:
            await bus.close(is_flushing=False)


async def read_stored(
    bus: Bus, topics: Sequence[str] = TOPICS
) -> dict[TopicPartition, list[FoundMessage]]:
    """All messages that the server has stored, read by `fetch`."""
    stored: dict[TopicPartition, list[FoundMessage]] = {}
    for topic in topics:
        state = await bus.topic(topic)
        for partition, bounds in enumerate(state.partitions):
            found = stored[TopicPartition(topic, partition)] = []
            offset = 1
            while offset < bounds.next_offset:
                page = await bus.fetch(topic, offset, partition=partition)
                found += [
                    FoundMessage(message.offset, message.payload) for message in page.messages
                ]
                offset = page.next_offset
    return stored
