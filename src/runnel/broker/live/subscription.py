"""One live subscription: what it wants, what it may be sent now, and where it stands when it may not.

Per shard it is *live* (batches are pushed to it as they become visible) or *behind* (a feed reads the log for it).
It falls behind when a batch comes and there is no room, and is live again at the moment when its feed has read the
last visible entry: both happen between two awaits, so nothing is missed and nothing comes twice.

Topics that are not kept have no log to fall back to. What there is no room for waits in a bounded queue; beyond
that the oldest messages go, or all but the newest of each topic, or the subscription ends, as its owner chose.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from runnel.broker.monitoring.metrics import BrokerCounters
from runnel.errors import ClientFault, RunnelError, SlowReaderError
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.block import pack
from runnel.formats.envelope import Envelope
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.log.log import ShardId
from runnel.topics.names import LIVE_JOURNAL, TopicPartition
from runnel.topics.patterns import Pattern

_MATCHES_MAX = 10_000

_BY_CONNECTION: Final = 1
_BY_QUOTA: Final = 2


class Overflow(enum.StrEnum):
    """What a slow subscription misses of topics that are not kept."""

    DROP_OLDEST = "drop_oldest"
    NEWEST_PER_TOPIC = "newest_per_topic"
    DISCONNECT = "disconnect"

    @classmethod
    def checked(cls, overflow: str) -> Overflow:
        try:
            return cls(overflow)
        except ValueError:
            known = ", ".join(cls)
            raise ClientFault(f"overflow {overflow!r} is none of {known}") from None


class LiveDelivery(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one shard, and the entry after them (0: out of order, as last values and partitions are).

    Without blocks it tells where the shard goes on behind a gap; or, with entry 0, that all last values were sent.
    """

    shard: ShardId
    epoch: int
    next_entry: int
    buffers: Sequence[bytes | memoryview]
    size: int
    messages: int

    @property
    def ends_last_values(self) -> bool:
        return not self.buffers and not self.next_entry


# Without blocks: no last values follow. A client that has seen it does not ask for them after a lost connection.
_LAST_SENT: Final = LiveDelivery(ShardId(LIVE_JOURNAL), 0, 0, (), 0, 0)


class LiveSink(Protocol):
    """Where a subscription's messages go: a session. Each call only queues; it neither waits nor fails."""

    @property
    def connection_id(self) -> int: ...
    @property
    def peer(self) -> str: ...
    def deliver(self, subscription: int, delivery: LiveDelivery) -> None: ...
    def gap(self, subscription: int, gap: GapState) -> None: ...
    def ended(self, subscription: int, error: RunnelError) -> None: ...


class SubscribeRequest(msgspec.Struct, frozen=True):
    """Asks for a live subscription to everything that matches one of the patterns."""

    number: int  # the client's, which deliveries name
    sink: LiveSink
    patterns: Sequence[str]
    start: Start
    credit_bytes: int
    overflow: str = Overflow.DROP_OLDEST


class Feed(Protocol):
    """Reads one shard's past for a subscription, a page at a time."""

    async def step(self, subscription: LiveSubscription) -> bool:
        """Deliver the next page. True: it has caught up, and nothing was awaited since it knew."""

    def lag(self, subscription: LiveSubscription) -> int:
        """How much is still to be read: entries, or messages."""


class _Queued(NamedTuple):
    delivery: LiveDelivery
    envelope: Envelope
    body: bytes | memoryview


class LiveSubscription:
    """See the module's first lines. Made by `LiveReading`, which owns the feeds' tasks."""

    __slots__ = (
        "_behind",
        "_counters",
        "_credit_bytes",
        "_is_started",
        "_matches",
        "_on_behind",
        "_on_closed",
        "_pauses",
        "_queue",
        "_queue_bytes_max",
        "_queued_bytes",
        "_room",
        "first_new",
        "gaps_at_start",
        "is_closed",
        "is_fed",
        "messages_missed",
        "number",
        "overflow",
        "partitions",
        "patterns",
        "places",
        "prelude",
        "shards",
        "sink",
    )

    def __init__(
        self,
        number: int,
        sink: LiveSink,
        patterns: Sequence[Pattern],
        *,
        credit_bytes: int,
        overflow: Overflow,
        queue_bytes_max: int,
        counters: BrokerCounters,
        on_behind: Callable[[LiveSubscription], None],
        on_closed: Callable[[LiveSubscription], None],
    ) -> None:
        self.number = number
        self.sink = sink
        self.patterns = patterns
        self.overflow = overflow
        self.partitions: Sequence[PartitionPlace] = ()
        self.shards: Sequence[ShardPlace] = ()
        # With literal patterns alone: the next offset of each partition that it has been sent, or begins at.
        self.places: dict[TopicPartition, int] | None = (
            {} if all(pattern.is_literal for pattern in patterns) else None
        )
        # While last values are looked up: the first offset of each partition that came since.
        self.first_new: dict[TopicPartition, int] | None = None
        self.gaps_at_start: list[GapState] = []
        self.prelude: Feed | None = None  # what comes before everything else
        self.is_fed = False  # a task is at work on what it is behind with
        self.is_closed = False
        self.messages_missed = 0
        self._counters = counters
        self._credit_bytes = credit_bytes
        self._queue_bytes_max = queue_bytes_max
        self._on_behind = on_behind
        self._on_closed = on_closed
        self._is_started = False
        self._pauses = 0  # why nothing may be sent though there is credit: bits
        self._behind: dict[ShardId, Feed] = {}
        self._queue: deque[_Queued] | None = None
        self._queued_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._matches: dict[str, bool] | None = None

    # --- What the session says ---

    def start(self) -> None:
        """Deliveries may begin: the client knows of the subscription."""
        self._is_started = True
        for gap in self.gaps_at_start:
            self.tell_gap(gap)
        self.gaps_at_start = []
        self._go_on()

    def grant(self, credit_bytes: int) -> None:
        self._credit_bytes += credit_bytes
        self._go_on()

    def pause(self) -> None:
        self._pauses |= _BY_CONNECTION

    def resume(self) -> None:
        self._pauses &= ~_BY_CONNECTION
        self._go_on()

    def slow(self) -> None:
        """Its token is over a rate: nothing more for now."""
        self._pauses |= _BY_QUOTA

    def unslow(self) -> None:
        self._pauses &= ~_BY_QUOTA
        self._go_on()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue = None
            self._behind.clear()
            self._wake()
            self._on_closed(self)

    def end(self, error: RunnelError) -> None:
        """The broker ends it."""
        if not self.is_closed:
            self.close()
            self.sink.ended(self.number, error)

    def _go_on(self) -> None:
        if not self.has_room or self.is_closed:
            return
        self._wake()
        if self._queue:
            self._send_queued()
        if (self._behind or self.prelude is not None) and not self.is_fed:
            self._on_behind(self)

    # --- Room ---

    @property
    def has_room(self) -> bool:
        return self._credit_bytes > 0 and self._is_started and not self._pauses

    @property
    def credit_bytes(self) -> int:
        return self._credit_bytes

    async def wait_room(self) -> None:
        """Until there is room, or it is closed."""
        while not self.has_room and not self.is_closed:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # --- Behind ---

    @property
    def is_behind(self) -> bool:
        return bool(self._behind) or self.prelude is not None

    @property
    def lag(self) -> int:
        return sum(feed.lag(self) for feed in self._behind.values())

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def behind(self) -> dict[ShardId, Feed]:
        """The feeds at work, in the order of their turns."""
        return self._behind

    def fall_behind(self, shard: ShardId, feed: Feed) -> None:
        """From here on a feed reads this shard for it, beginning once there is room."""
        self._behind[shard] = feed
        self._go_on()

    def matches(self, topic: str) -> bool:
        """Whether one of its patterns matches. Remembered: a feed asks once a run."""
        if self._matches is None or len(self._matches) >= _MATCHES_MAX:
            self._matches = {}
        known = self._matches.get(topic)
        if known is None:
            known = any(pattern.matches(topic) for pattern in self.patterns)
            self._matches[topic] = known
        return known

    # --- Kept topics ---

    def takes(self, shard: ShardId, envelope: Envelope) -> bool:
        """Whether a batch that has just become visible may be delivered at once. Hot: once a subscriber."""
        if shard in self._behind:
            if self.first_new is not None:
                self._note_first(envelope)
            if self.places is not None:
                self.begin_new(envelope)
            return False
        return self._credit_bytes > 0 and self._is_started and not self._pauses

    def begin_new(self, envelope: Envelope) -> None:
        """Partitions that it has no place in were made since it began: they begin with these messages."""
        assert self.places is not None
        bases = envelope.column64(envelope.base_offsets)
        partitions = envelope.column32(envelope.partitions)
        for topic, number, base in zip(envelope.topics, partitions, bases, strict=True):
            if (topic, number) not in self.places and self.matches(topic):
                self.places[topic, number] = base

    def _note_first(self, envelope: Envelope) -> None:
        assert self.first_new is not None
        bases = envelope.column64(envelope.base_offsets)
        partitions = envelope.column32(envelope.partitions)
        for key, base in zip(zip(envelope.topics, partitions, strict=True), bases, strict=True):
            self.first_new.setdefault(key, base)

    def deliver(self, delivery: LiveDelivery, envelope: Envelope) -> None:
        """Send what there is room for. `envelope` is that of the batch delivered."""
        if self.places is not None:
            self.pass_by(envelope)
        self.send(delivery)

    def pass_by(self, envelope: Envelope) -> None:
        """Its partitions go on behind this batch."""
        assert self.places is not None
        if len(envelope.topics) == 1:
            key = (envelope.topics[0], int.from_bytes(envelope.partitions, "little"))
            base = int.from_bytes(envelope.base_offsets, "little")
            self.places[key] = base + envelope.message_count
            return
        partitions = envelope.column32(envelope.partitions)
        bases = envelope.column64(envelope.base_offsets)
        counts = envelope.column32(envelope.counts)
        for topic, number, base, count in zip(
            envelope.topics, partitions, bases, counts, strict=True
        ):
            self.places[topic, number] = base + count

    def send(self, delivery: LiveDelivery) -> None:
        """Hand over what may be sent, and keep count."""
        size = delivery.size
        self._credit_bytes -= size
        counters = self._counters
        counters.messages_out += delivery.messages
        counters.bytes_out += size
        counters.deliveries += 1
        self.sink.deliver(self.number, delivery)

    def tell_gap(self, gap: GapState) -> None:
        self.messages_missed += gap.missed
        self._counters.gaps += 1
        self._counters.messages_missed += gap.missed
        self.sink.gap(self.number, gap)

    # --- Topics that are not kept ---

    def push(self, delivery: LiveDelivery, envelope: Envelope, body: bytes | memoryview) -> None:
        """Send a batch that nobody keeps, or let it wait for room."""
        if self.has_room and not self._queue and self.prelude is None:
            self.send(delivery)
            return
        if self.first_new is not None:
            self._note_first(envelope)
        if self._queue is None:
            self._queue = deque()
        # What waits owns its bytes: it must not hold on to all that arrived together with it.
        body = bytes(body)
        head, _, padding = delivery.buffers
        own = msgspec.structs.replace(delivery, buffers=(head, body, padding))
        self._queue.append(_Queued(own, envelope, body))
        self._queued_bytes += delivery.size
        if self._queued_bytes > self._queue_bytes_max:
            self._overflow()

    def end_prelude(self) -> None:
        """All last values have been sent: the client is told so, and what waited behind them may go."""
        self.prelude = self.first_new = None
        if not self.is_closed:
            self.send(_LAST_SENT)
        self._go_on()

    def _send_queued(self) -> None:
        queue = self._queue
        while queue and self.has_room and self.prelude is None:
            delivery = queue.popleft().delivery
            self._queued_bytes -= delivery.size
            self.send(delivery)

    def _overflow(self) -> None:
        if self.overflow is Overflow.DISCONNECT:
            self.end(
                SlowReaderError(
                    f"subscription {self.number} had {self._queued_bytes} bytes waiting, more than "
                    f"broker.live_queue_bytes_max = {self._queue_bytes_max}"
                )
            )
            return
        missed: dict[TopicPartition, list[int]] = {}
        if self.overflow is Overflow.NEWEST_PER_TOPIC:
            self._keep_newest(missed)
        queue = self._queue
        assert queue is not None
        while self._queued_bytes > self._queue_bytes_max and len(queue) > 1:
            dropped = queue.popleft()
            self._queued_bytes -= dropped.delivery.size
            _count_missed(missed, dropped.envelope)
        for (topic, partition), (count, first, last) in missed.items():
            text = "the subscription was slower than the topic, which is not kept"
            self.tell_gap(GapState("overflow", count, topic, partition, first, last, text))

    def _keep_newest(self, missed: dict[TopicPartition, list[int]]) -> None:
        """Of each topic's partition only the newest message stays."""
        queue = self._queue
        assert queue is not None
        seen: set[TopicPartition] = set()
        kept: deque[_Queued] = deque()
        while queue:
            queued = queue.pop()
            rows, dropped = _newest_rows(queued.envelope, seen)
            for key, count, first in dropped:
                _add_missed(missed, key, count, first)
            if rows:
                batch = Batch(queued.envelope, queued.body).take(rows)
                kept.appendleft(_queued(queued.delivery, batch))
        self._queue = kept
        self._queued_bytes = sum(item.delivery.size for item in kept)


def _newest_rows(
    envelope: Envelope, seen: set[TopicPartition]
) -> tuple[list[int], list[tuple[TopicPartition, int, int]]]:
    """The last row of each partition not seen yet, and what is dropped of which: key, count, first offset."""
    partitions = envelope.column32(envelope.partitions)
    counts = envelope.column32(envelope.counts)
    bases = envelope.column64(envelope.base_offsets)
    rows: list[int] = []
    dropped: list[tuple[TopicPartition, int, int]] = []
    end = sum(counts)
    for run in range(len(counts) - 1, -1, -1):
        key, count = (envelope.topics[run], partitions[run]), counts[run]
        if key not in seen:
            seen.add(key)
            rows.append(end - 1)
            count -= 1
        if count:
            dropped.append((key, count, bases[run]))
        end -= counts[run]
    rows.reverse()
    return rows, dropped


def _queued(delivery: LiveDelivery, batch: Batch) -> _Queued:
    buffers = pack(envelopes.encode(batch.envelope), batch.body)
    smaller = msgspec.structs.replace(
        delivery, buffers=buffers, size=sum(map(len, buffers)), messages=len(batch)
    )
    return _Queued(smaller, batch.envelope, batch.body)


def _count_missed(missed: dict[TopicPartition, list[int]], envelope: Envelope) -> None:
    partitions = envelope.column32(envelope.partitions)
    counts = envelope.column32(envelope.counts)
    bases = envelope.column64(envelope.base_offsets)
    for topic, number, count, base in zip(envelope.topics, partitions, counts, bases, strict=True):
        _add_missed(missed, (topic, number), count, base)


def _add_missed(
    missed: dict[TopicPartition, list[int]], key: TopicPartition, count: int, first: int
) -> None:
    known = missed.setdefault(key, [0, first, first + count])
    known[0] += count
    known[1] = min(known[1], first)
    known[2] = max(known[2], first + count)
