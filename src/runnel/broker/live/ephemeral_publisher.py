"""Publishes to ephemeral topics: numbers batches and sends them to their readers, at once or in a queue.

Only a compressed batch of several runs has to wait: a worker decompresses it, because readers may want some of its
runs alone. Batches that come meanwhile queue behind it, to keep the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live.ephemeral_topics import EphemeralTopic, EphemeralTopics
from runnel.broker.live.subscriptions import LiveSubscriptions
from runnel.broker.message_batcher import Published
from runnel.broker.topic_creator import TOPICS_PER_STEP
from runnel.errors import BusyError, MovedError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec, Envelope
from runnel.log.log import Appended, Level, VisibleBatch
from runnel.platform.clock import Clock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers

_QUEUE_BYTES_MAX: Final = 64 * 2**20
_PREPARED_MAX: Final = 100
# Looking up an enum's member takes several times as long.
_PLAIN: Final = Codec.NONE.value
_NONE: Final = Level.NONE
_RECEIVED: Final = Level.RECEIVED


class _Prepared(NamedTuple):
    """The topics of a wide batch, whose readers were looked up in steps; or the error that prevented it."""

    names: Sequence[str]
    topics: list[EphemeralTopic]
    fault: RunnelError | None = None


class _QueuedPublish(NamedTuple):
    """A batch that waits in the queue, and the future of its answer."""

    batch: Batch
    level: Level | None
    answer: asyncio.Future[Published]
    prepared: _Prepared | None


class EphemeralPublisher:
    """Publishes batches of ephemeral topics. Create it within a running loop.

    `count_in` counts accepted batches; `moved` adds routes to an error.
    """

    def __init__(
        self,
        topics: EphemeralTopics,
        subscriptions: LiveSubscriptions,
        clock: Clock,
        workers: Workers,
        share: LoopShare,
        *,
        last_value_bytes_max: int,
        count_in: Callable[[Batch, int], None],
        moved: Callable[[MovedError, Sequence[str]], MovedError],
    ) -> None:
        self._topics = topics
        self._subscriptions = subscriptions
        self._clock = clock
        self._workers = workers
        self._share = share
        self._last_value_bytes_max = last_value_bytes_max
        self._count_in = count_in
        self._moved = moved
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_QueuedPublish] = deque()
        self._queued_bytes = 0
        self._room: list[asyncio.Future[None]] = []
        # Wide batches by their first topic: their topics are being looked up, or wait until the batch is tried again.
        self._preparing: dict[str, asyncio.Future[None]] = {}
        self._prepared: dict[str, _Prepared] = {}
        self.tasks = OwnedTasks("the publisher of ephemeral topics")

    def publish(self, batch: Batch, level: Level | None) -> asyncio.Future[Published]:
        """The future is done when the batch was sent to its readers. BusyError: await `wait_room`, and call again."""
        is_wide = len(batch.envelope.topics) > TOPICS_PER_STEP
        prepared = self._take_prepared(batch.envelope) if is_wide else None
        answer: asyncio.Future[Published] = self._loop.create_future()
        if self._queue or _needs_unpacking(batch):
            if self._queued_bytes > _QUEUE_BYTES_MAX:
                raise BusyError("batches wait to be unpacked; wait for room")
            self._queue.append(_QueuedPublish(batch, level, answer, prepared))
            self._queued_bytes += batch.envelope.body_bytes
            if len(self._queue) == 1:
                self.tasks.start(self._drain_queue())
        else:
            answer.set_result(self._send(batch, level, prepared))
        return answer

    def _take_prepared(self, head: Envelope) -> _Prepared:
        """The topics of a wide batch; BusyError if they have to be looked up first."""
        first = head.topics[0]
        if first not in self._preparing:
            prepared = self._prepared.pop(first, None)
            if prepared is None or prepared.names != head.topics:
                prepared = self._known(head)
            if prepared is not None:
                if prepared.fault is not None:
                    raise prepared.fault
                return prepared
            self._preparing[first] = self._loop.create_future()
            self.tasks.start(self._prepare(head))
        raise BusyError("many topics have to be looked up first; wait for room")

    def _known(self, head: Envelope) -> _Prepared | None:
        """The topics, if all topics and their readers are known already."""
        found = map(self._topics.known, head.topics)
        topics = [
            topic for topic in found if topic is not None and self._subscriptions.is_current(topic)
        ]
        return _Prepared(head.topics, topics) if len(topics) == len(head.topics) else None

    async def _prepare(self, head: Envelope) -> None:
        first = head.topics[0]
        topics: list[EphemeralTopic] = []
        fault = None
        try:
            for begin in range(0, len(head.topics), TOPICS_PER_STEP):
                await self._share.turn(self)
                for run in range(begin, min(begin + TOPICS_PER_STEP, len(head.topics))):
                    await self._subscriptions.look_up(head.topics[run], self)
                    topic = self._topics.learned(head, run)
                    self._topics.check_here((topic,))
                    self._subscriptions.readers_of_ephemeral(
                        topic
                    )  # creates the topic if it has readers
                    topics.append(topic)
            self._topics.check_partitions(head, topics)
        except RunnelError as error:
            fault = error
        if len(self._prepared) >= _PREPARED_MAX:
            del self._prepared[next(iter(self._prepared))]  # its publisher is gone
        self._prepared[first] = _Prepared(head.topics, topics, fault)
        self._preparing.pop(first).set_result(None)

    async def wait_room(self, topic: str) -> None:
        """Wait until the queue has room and no batch that begins with this topic is being prepared."""
        while (preparing := self._preparing.get(topic)) is not None:
            await asyncio.wait({preparing})
        while self._queued_bytes > _QUEUE_BYTES_MAX:
            room: asyncio.Future[None] = self._loop.create_future()
            self._room.append(room)
            await room

    async def _drain_queue(self) -> None:
        """Send the queued batches in order. A worker decompresses them."""
        while self._queue:
            batch, level, answer, prepared = self._queue[0]
            size = batch.envelope.body_bytes
            try:
                if _needs_unpacking(batch):
                    batch = await self._workers.submit(batch.uncompressed)
                published = self._send(batch, level, prepared)
            except RunnelError as error:
                if isinstance(error, MovedError):  # since it was queued
                    error = self._moved(error, batch.envelope.topics)
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(published)
            self._queue.popleft()
            self._queued_bytes -= size
            waiting, self._room = self._room, []
            for room in waiting:
                if not room.done():
                    room.set_result(None)

    def _send(self, batch: Batch, level: Level | None, prepared: _Prepared | None) -> Published:
        head = batch.envelope
        if len(head.topics) == 1:
            return self._send_run(batch, level)
        reached = _NONE if level is _NONE else _RECEIVED
        if prepared is None:
            topics = self._topics.resolve(head)
        else:  # a topic that was forgotten meanwhile may be known again
            topics = [self._topics.known(topic.name) or topic for topic in prepared.topics]
        self._topics.check_here(topics)
        readers = self._subscriptions.ephemeral_readers(topics)
        self._count_in(batch, head.message_count)
        now_ns = self._clock.time_ns()
        if not any(topic.exists for topic in topics):
            return Appended([0] * len(topics), 0, 0, now_ns, reached, receivers=0)
        numbered, encoded = self._topics.number(batch, topics, now_ns)
        stored = VisibleBatch(numbered, batch.body, encoded)
        receivers = self._subscriptions.spread_ephemeral(stored, readers)
        self._topics.keep_last(stored, topics, self._last_value_bytes_max)
        return Appended(
            numbered.column64(numbered.base_offsets),
            numbered.entry,
            int.from_bytes(numbered.epochs[-8:], "little"),
            now_ns,
            reached,
            receivers=receivers,
        )

    def _send_run(self, batch: Batch, level: Level | None) -> Published:
        """Send a batch of one run, as most batches are: no loop over runs, and nothing to cut."""
        head = batch.envelope
        reached = _NONE if level is _NONE else _RECEIVED
        topic = self._topics.resolve_run(head)
        if topic.shard is not None:
            self._topics.check_here((topic,))
        readers = self._subscriptions.readers_of_ephemeral(topic)
        count = head.message_count
        self._count_in(batch, count)
        now_ns = self._clock.time_ns()
        if not topic.exists:
            return Appended((0,), 0, 0, now_ns, reached, receivers=0)
        numbered, encoded = self._topics.number(batch, (topic,), now_ns)
        stored = VisibleBatch(numbered, batch.body, encoded)
        entry = numbered.entry
        if readers:
            self._subscriptions.spread_run(stored, readers, topic.epoch, entry, count, now_ns)
        if topic.keeps_last:
            self._topics.keep_last(stored, (topic,), self._last_value_bytes_max)
        base = int.from_bytes(numbered.base_offsets, "little")
        return Appended((base,), entry, topic.epoch, now_ns, reached, receivers=len(readers))


def _needs_unpacking(batch: Batch) -> bool:
    """Whether runs may have to be cut out of a compressed body."""
    return batch.envelope.codec != _PLAIN and len(batch.envelope.topics) > 1
