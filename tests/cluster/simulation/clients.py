"""Clients of a simulated cluster: they ask any node, follow `moved`, and repeat what they may repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from runnel.broker.broker import Broker, Level, Published
from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery
from runnel.broker.fetcher import FetchRequest, FetchResult
from runnel.errors import (
    BusyError,
    ConnectionLostError,
    MovedError,
    RunnelError,
    Unavailable,
    UnknownTopicError,
)
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Route
from runnel.formats.work_heads import Consume, DeliveryPart
from runnel.topics.names import TopicPartition
from tests.cluster.simulation.model import Place
from tests.cluster.simulation.node import NodeLife
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.cluster.simulation.history import History

KEPT = ("d/1", "d/2", "d/3", "d/4", "d/5")
IN_MEMORY = ("m/1", "m/2")
NOT_KEPT = ("n/1", "n/2")
TRIES_MAX = 400
OWED_TURNS_MAX = 5_000

T = TypeVar("T")


class Publisher:
    """Publishes to one topic, one batch at a time. A named one repeats a batch until it is answered."""

    def __init__(self, number: int, topic: str, *, is_named: bool) -> None:
        self.topic = topic
        self.label = f"p{number}"
        self.name = self.label if is_named else None
        self.term = -1
        self.number = -1
        self.count = 0
        self.place = (0, 0)  # epoch and offset of its last message
        self.work: asyncio.Future[None] | None = None


class Worker:
    """A consumer of the subscription at one node, and what it was leased."""

    connection_id = 1
    peer = "a worker"

    def __init__(self, clients: Clients, life: NodeLife) -> None:
        self.life = life
        self.leased: list[tuple[TopicPartition, int, DeliveryPart]] = []
        self.is_over = False
        self.consumer: WorkConsumer
        self._clients = clients

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        if self.life.is_dead:
            return
        for delivery in deliveries:
            lease = delivery.lease
            for message in delivery.each():
                key = (message.topic, message.partition)
                self._clients.model.delivered(key, message.offset, message.payload)
                part = DeliveryPart(lease.delivery, message.offset, message.offset + 1)
                self.leased.append((key, message.offset, part))

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """It gives nothing back."""

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """It forgets them."""

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        """It forgets them."""

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self.is_over = True


class Reader:
    """Fetches one topic from its first message on."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.next_offset = 1
        self.work: asyncio.Future[None] | None = None


class Clients:
    """All clients. Their requests run beside what the history does."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._random = history.random
        self.model = history.model
        self._publishers = [
            Publisher(number, topic, is_named=number % 2 == 0)
            for number, topic in enumerate((*KEPT, *KEPT, *IN_MEMORY, *NOT_KEPT))
        ]
        self._readers = [Reader(topic) for topic in KEPT]
        self._workers: dict[NodeLife, Worker] = {}
        self._routes: dict[str, Route] = {}

    # --- Requests ---

    def _node_for(self, topic: str) -> NodeLife | None:
        """The owner as far as this client knows, or any node."""
        living = self._history.living()
        route = self._routes.get(topic)
        if route is not None:
            for life in living:
                if life.name == route.owners[0].address:
                    return life
            del self._routes[topic]
        return self._random.choice(living) if living else None

    async def _ask(
        self, topic: str, work: Callable[[Broker], Awaitable[T]], *, is_repeatable: bool
    ) -> tuple[T, NodeLife]:
        """Ask the owner, and follow it when it moves. Raises what leaves the outcome open, if it may not repeat."""
        for attempt in range(TRIES_MAX):
            life = self._node_for(topic)
            if life is not None:
                try:
                    return await self._history.request(life, work), life
                except MovedError as error:
                    self._routes.pop(topic, None)
                    for route in error.routes:
                        assert isinstance(route, Route)
                        self._routes[route.topic] = route
                    if attempt % 5 == 4:  # its view may be old: ask any
                        self._routes.pop(topic, None)
                except ConnectionLostError:
                    self._routes.pop(topic, None)
                    if not is_repeatable:
                        raise
                except Unavailable:
                    if not is_repeatable:
                        raise
            for _ in range(self._random.randint(1, 20)):
                await asyncio.sleep(0)
        raise Violation(f"{topic} cannot be reached in {TRIES_MAX} attempts")

    def _beside(self, work: Awaitable[None]) -> asyncio.Future[None]:
        future = asyncio.ensure_future(work)
        self._history.beside.append(("a client's request", future))
        self._history.beside = [each for each in self._history.beside if not _is_fine(each[1])]
        return future

    def lost(self, life: NodeLife) -> None:
        """A process has ended."""
        self._workers.pop(life, None)

    # --- Publishing ---

    async def publish(self) -> None:
        publisher = self._random.choice(self._publishers)
        if publisher.work is None or publisher.work.done():
            publisher.work = self._beside(self._publish(publisher))

    async def _publish(self, publisher: Publisher) -> None:
        topic, model = publisher.topic, self.model
        messages = []
        for _ in range(self._random.randint(1, 3)):
            publisher.count += 1
            model.published += 1
            payload = f"{publisher.label} {publisher.count}".encode()
            messages.append(Message(topic, payload))
            if publisher.name is not None:
                model.named.add(payload)
        level = self._random.choice((Level.STORED, Level.STORED, Level.RECEIVED))
        is_named = publisher.name is not None and topic in KEPT
        if is_named:
            level = Level.STORED
            if publisher.term < 0 or self._random.random() < 0.1:  # it may have been started again
                publisher.term, publisher.number = await self._new_term(publisher), -1
            publisher.number += 1
        batch = Batch.from_messages(
            messages,
            producer=publisher.name if is_named else None,
            term=publisher.term if is_named else 0,
            number=publisher.number if is_named else 0,
        )
        self._history.say(f"{publisher.label} publishes {messages[0].payload!r}… to {topic}")

        async def publish(broker: Broker) -> Published:
            while True:
                try:
                    return await broker.publish(batch, level)
                except BusyError:
                    await broker.wait_room(topic, 0)

        try:
            answer, life = await self._ask(topic, publish, is_repeatable=is_named)
        except Unavailable as error:
            self._history.say(f"   {messages[0].payload!r}: {error}")
            return
        self._note_answer(publisher, messages, level, answer, life)

    def _note_answer(
        self,
        publisher: Publisher,
        messages: Sequence[Message],
        level: Level,
        answer: Published,
        life: NodeLife,
    ) -> None:
        topic = publisher.topic
        key, model = (topic, 0), self.model
        if not answer.base_offsets or not answer.base_offsets[0]:
            return  # a repetition whose offsets are not known any more, or nobody reads it
        self._history.say(f"   {messages[0].payload!r} is at {answer.base_offsets[0]}, {life}")
        for offset, message in enumerate(messages, answer.base_offsets[0]):
            if topic not in KEPT:
                place = answer.epoch, offset
                if place <= publisher.place:
                    model.problems.append(f"{topic} goes back from {publisher.place} to {place}")
                publisher.place = place
                model.see_in_memory(key, answer.epoch, offset, message.payload, "its publisher")
            elif level is Level.STORED:
                model.see(key, offset, message.payload, "its publisher")
                model.stored[key, offset] = message.payload
            elif not life.is_dead or life.is_stopping:
                model.received[key, offset] = (message.payload, life)

    async def _new_term(self, publisher: Publisher) -> int:
        assert publisher.name is not None
        name = publisher.name
        term, _ = await self._ask(
            publisher.topic, lambda broker: broker.new_term(name), is_repeatable=True
        )
        return term

    # --- Reading ---

    async def fetch(self) -> None:
        reader = self._random.choice(self._readers)
        if reader.work is None or reader.work.done():
            reader.work = self._beside(self._fetch(reader))

    async def _fetch(self, reader: Reader) -> None:
        with suppress(UnknownTopicError):
            await self._fetch_once(reader)

    async def _fetch_once(self, reader: Reader) -> FetchResult:
        offset = reader.next_offset
        request = FetchRequest(reader.topic, 0, offset=offset)
        page, _ = await self._ask(
            reader.topic, lambda broker: broker.fetch(request), is_repeatable=True
        )
        for batch in page.batches:
            for message in batch.messages():
                if message.offset != reader.next_offset:
                    self.model.problems.append(
                        f"a reader of {reader.topic} gets {message.offset} after {reader.next_offset - 1}"
                    )
                self.model.see((reader.topic, 0), message.offset, message.payload, "a reader")
                reader.next_offset = message.offset + 1
        return page

    # --- Acknowledged work ---

    async def work(self) -> None:
        living = [life for life in self._history.living() if not life.gate.is_paused]
        if not living:
            return
        life = self._random.choice(living)
        worker = self._workers.get(life)
        if worker is None or worker.is_over:
            self._beside(self._begin_work(life))
        else:
            self._beside(self._ack(worker))

    async def _begin_work(self, life: NodeLife) -> None:
        worker = Worker(self, life)
        request = Consume(1, 1, "work", ("d/*",), "shared", 1000, 2**24)

        async def consume(broker: Broker) -> WorkConsumer:
            consumer = await broker.consumer_groups.consume(1, worker, request)
            worker.consumer = consumer
            consumer.start()
            return consumer

        try:
            await self._history.request(life, consume)
        except Unavailable as error:
            self._history.say(f"no worker at {life}: {error}")
        else:
            self._history.say(f"a worker begins at {life}")
            self._workers[life] = worker

    async def _ack(self, worker: Worker) -> None:
        count = self._random.randint(1, 4)
        self._random.shuffle(worker.leased)
        chosen, worker.leased = worker.leased[:count], worker.leased[count:]
        if not chosen or worker.is_over:
            return

        async def ack(_: Broker) -> list[tuple[TopicPartition, int]]:
            late = worker.consumer.ack((), [part for _, _, part in chosen])
            await worker.consumer.wait_stored()
            late_parts = {
                (part.delivery, offset) for part in late for offset in range(part.begin, part.end)
            }
            return [
                (key, offset)
                for key, offset, part in chosen
                if (part.delivery, offset) not in late_parts
            ]

        try:
            acked = await self._history.request(worker.life, ack)
        except Unavailable as error:
            self._history.say(f"acks at {worker.life}: {error}")
        else:
            self._history.say(f"acked at {worker.life}: {acked}")
            self.model.acked.update(acked)

    async def work_everywhere(self) -> None:
        """Workers at all nodes are leased everything that is owed."""
        for life in self._history.living():
            worker = self._workers.get(life)
            if worker is None or worker.is_over:
                await self._begin_work(life)
        for _ in range(OWED_TURNS_MAX):
            if not self._owed():
                return
            await asyncio.sleep(0)
        self.model.problems.append(f"nobody is leased {self._owed()}")

    def _owed(self) -> list[Place]:
        """Stored messages that nobody has acknowledged, or was leased."""
        return sorted(self.model.stored.keys() - self.model.acked - self.model.leased)

    # --- The end ---

    async def finish(self) -> None:
        """Wait for all requests under way."""
        while self._history.beside:
            _, work = self._history.beside.pop(0)
            await work

    async def check_everything(self) -> None:
        for reader in self._readers:
            whole = Reader(reader.topic)
            await self._history.patiently(self._read_all(reader), f"reading {reader.topic}")
            await self._history.patiently(self._read_all(whole), f"reading {reader.topic}")
            key = (reader.topic, 0)
            found = sorted(
                (offset, payload)
                for (partition, offset), payload in self.model.seen.items()
                if partition == key and offset < whole.next_offset
            )
            self.model.check_partition(key, found)
            lost = [
                place
                for place in self.model.seen
                if place[0] == key and place[1] >= whole.next_offset
            ]
            if lost:
                self.model.problems.append(f"{lost} were seen before, and are gone")
        if self.model.problems:
            raise Violation(self.model.problems[0])

    async def _read_all(self, reader: Reader) -> None:
        while True:
            try:
                page = await self._fetch_once(reader)
            except UnknownTopicError:
                return
            if not page.batches:
                return


def _is_fine(work: asyncio.Future[None]) -> bool:
    return work.done() and not work.cancelled() and work.exception() is None
