"""One live subscription: its patterns, its credit, and its state in each shard.

In each shard it is *live* (batches are pushed to it as they become visible) or *behind* (a feed reads the log for it).
It falls behind when a batch comes and there is no room. It is live again as soon as its feed has read the last visible
entry. Both happen between two awaits, so no message is missed or sent twice.

Ephemeral topics have no log to fall back to. Batches without room wait in a bounded queue. When the queue overflows,
the client's choice applies: drop the oldest messages, drop all but the newest of each topic, or end the subscription.
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
from runnel.formats.wire import GapState, Owner, PartitionPlace, ShardPlace, ShardTerm, Start
from runnel.log.log import ShardId
from runnel.topics.names import LIVE_JOURNAL, TopicPartition
from runnel.topics.patterns import Pattern

_MATCHES_MAX = 10_000

_BY_CONNECTION: Final = 1
_BY_QUOTA: Final = 2


class Overflow(enum.StrEnum):
    """What happens when the queue of ephemeral messages of a slow subscription overflows."""

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
    """Blocks of one shard, and the entry after them (0: outside the shard's order, as for last values and partitions).

    Without blocks it gives the next entry after a gap; or, with entry 0, it says that all last values were sent.
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


# No last values follow. A client that has received this does not ask for them again after a lost connection.
LAST_SENT: Final = LiveDelivery(ShardId(LIVE_JOURNAL), 0, 0, (), 0, 0)


class LiveSink(Protocol):
    """The session that gets a subscription's messages. Each call only queues; it neither waits nor fails."""

    @property
    def connection_id(self) -> int: ...
    @property
    def peer(self) -> str: ...
    def deliver(self, subscription: int, delivery: LiveDelivery) -> None: ...
    def gap(self, subscription: int, gap: GapState) -> None: ...
    def ended(self, subscription: int, error: RunnelError) -> None: ...


class LivePartSink(Protocol):
    """The session of a reader that merges parts of several nodes: it also hears of the node's shards."""

    def shards_came(self, subscription: int, shards: Sequence[ShardTerm]) -> None: ...
    def shards_left(self, subscription: int, shards: Sequence[ShardTerm]) -> None: ...
    def gap_in(self, subscription: int, shard: ShardId, gap: GapState) -> None:
        """Report a gap that belongs to the next delivery of the shard."""


class OpenSubscription(Protocol):
    """A live subscription as protocols use it: of this broker, or merged from several nodes."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def partitions(self) -> Sequence[PartitionPlace]: ...
    @property
    def shards(self) -> Sequence[ShardPlace]: ...
    @property
    def elsewhere(self) -> Sequence[Owner]: ...
    @property
    def parts(self) -> LivePartSink | None: ...
    def start(self) -> None:
        """Begin to deliver."""

    def grant(self, credit_bytes: int) -> None:
        """Allow so many more bytes to be delivered."""

    def pause(self) -> None:
        """Deliver nothing, whatever the credit."""

    def resume(self) -> None: ...
    def close(self) -> None: ...


class SubscribeRequest(msgspec.Struct, frozen=True):
    """Asks for a live subscription to everything that matches one of the patterns."""

    number: int  # chosen by the client; deliveries carry it
    sink: LiveSink
    patterns: Sequence[str]
    start: Start
    credit_bytes: int
    overflow: str = Overflow.DROP_OLDEST
    # Set: begin without kept topics. The reader says for each shard where to begin, once it hears of the shard.
    parts: LivePartSink | None = None


class Feed(Protocol):
    """Reads stored messages of one shard for a subscription, a page at a time."""

    async def step(self, subscription: LiveSubscription) -> bool:
        """Deliver the next page. True: it has caught up, and has not awaited since it checked."""

    def lag(self, subscription: LiveSubscription) -> int:
        """How much is still to be read: entries, or messages."""


class Prelude(Feed, Protocol):
    """Sends messages before everything else."""

    def ends(self, subscription: LiveSubscription) -> Sequence[LiveDelivery]:
        """What says to the reader that it has sent everything."""


class _HeldFeed:
    """Stands for a shard of which nothing is delivered, until the reader says where to begin."""

    async def step(self, subscription: LiveSubscription) -> bool:
        raise AssertionError(
            f"subscription {subscription.number} reads a shard that it has not begun"
        )

    def lag(self, subscription: LiveSubscription) -> int:  # noqa: ARG002 - it has no place
        return 0


_HELD: Final = _HeldFeed()


class _QueuedDelivery(NamedTuple):
    """A batch of ephemeral topics that waits for room."""

    delivery: LiveDelivery
    envelope: Envelope
    body: bytes | memoryview


class LiveSubscription:
    """A subscription that gets new messages at once. `LiveSubscriptions` creates it and owns the tasks of its feeds."""

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
        "elsewhere",
        "first_new",
        "gaps_at_start",
        "is_closed",
        "is_fed",
        "messages_missed",
        "number",
        "overflow",
        "partitions",
        "parts",
        "patterns",
        "places",
        "preludes",
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
        parts: LivePartSink | None = None,
    ) -> None:
        self.parts = parts
        self.elsewhere: Sequence[
            Owner
        ] = ()  # in parts: matching shards that this node does not serve
        self.number = number
        self.sink = sink
        self.patterns = patterns
        self.overflow = overflow
        self.partitions: Sequence[PartitionPlace] = ()
        self.shards: Sequence[ShardPlace] = ()
        # With literal patterns only: the next offset of each partition to send.
        self.places: dict[TopicPartition, int] | None = (
            {} if all(pattern.is_literal for pattern in patterns) else None
        )
        # While last values are looked up: the first offset of each partition that was published since, by shard.
        self.first_new: dict[ShardId, dict[TopicPartition, int]] | None = None
        self.gaps_at_start: list[GapState] = []
        self.preludes: deque[Prelude] = deque()  # sent before everything else
        self.is_fed = False  # a task runs its feeds
        self.is_closed = False
        self.messages_missed = 0
        self._counters = counters
        self._credit_bytes = credit_bytes
        self._queue_bytes_max = queue_bytes_max
        self._on_behind = on_behind
        self._on_closed = on_closed
        self._is_started = False
        self._pauses = 0  # bits: the reasons to send nothing although there is credit
        self._behind: dict[ShardId, Feed] = {}
        self._queue: deque[_QueuedDelivery] | None = None
        self._queued_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._matches: dict[str, bool] | None = None

    # --- Called by the session ---

    def start(self) -> None:
        """Begin deliveries: the client knows that the subscription exists."""
        self._is_started = True
        for gap in self.gaps_at_start:
            self.report_gap(gap)
        self.gaps_at_start = []
        self._continue()

    def grant(self, credit_bytes: int) -> None:
        self._credit_bytes += credit_bytes
        self._continue()

    def pause(self) -> None:
        self._pauses |= _BY_CONNECTION

    def resume(self) -> None:
        self._pauses &= ~_BY_CONNECTION
        self._continue()

    def slow(self) -> None:
        """Pause deliveries: the token is over a rate."""
        self._pauses |= _BY_QUOTA

    def unslow(self) -> None:
        self._pauses &= ~_BY_QUOTA
        self._continue()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue = None
            self._behind.clear()
            self._wake()
            self._on_closed(self)

    def end(self, error: RunnelError) -> None:
        """End the subscription from the broker's side, with an error for the client."""
        if not self.is_closed:
            self.close()
            self.sink.ended(self.number, error)

    def _continue(self) -> None:
        if not self.has_room or self.is_closed:
            return
        self._wake()
        if self._queue:
            self._send_queued()
        if (self._behind or self.preludes) and not self.is_fed and self.is_behind:
            self._on_behind(self)

    # --- Room ---

    @property
    def has_room(self) -> bool:
        return self._credit_bytes > 0 and self._is_started and not self._pauses

    @property
    def credit_bytes(self) -> int:
        return self._credit_bytes

    async def wait_room(self) -> None:
        """Wait until there is room, or the subscription is closed."""
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
        return bool(self.preludes) or any(feed is not _HELD for feed in self._behind.values())

    @property
    def lag(self) -> int:
        return sum(feed.lag(self) for feed in self._behind.values())

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def behind(self) -> dict[ShardId, Feed]:
        """The feeds that read for it, in the order of their turns. Shards that it has not begun are among them."""
        return self._behind

    def next_feed(self) -> tuple[ShardId, Feed] | None:
        """The feed whose turn it is."""
        for shard, feed in self._behind.items():
            if feed is not _HELD:
                return shard, feed
        return None

    def is_read_by(self, shard: ShardId, feed: Feed) -> bool:
        """Whether this feed still reads the shard: after an await it may have been replaced."""
        return not self.is_closed and self._behind.get(shard) is feed

    # --- In parts ---

    def hold(self, shard: ShardId) -> None:
        """Deliver nothing of a shard that the node serves, until the reader says where to begin."""
        self._behind[shard] = _HELD

    def is_held(self, shard: ShardId) -> bool:
        return self._behind.get(shard) is _HELD

    def begin(self, shard: ShardId, feed: Feed | None) -> None:
        """Begin a shard that was held, with a feed or live."""
        del self._behind[shard]
        if feed is not None:
            self._behind[shard] = feed

    def proceed(self) -> None:
        """Let the feeds of shards read that have just begun."""
        self._continue()

    def leave(self, shard: ShardId) -> None:
        """The node serves the shard no longer."""
        self._behind.pop(shard, None)
        if self.first_new is not None:
            self.first_new.pop(shard, None)

    def fall_behind(self, shard: ShardId, feed: Feed) -> None:
        """Let a feed read this shard from now on, beginning when there is room."""
        self._behind[shard] = feed
        self._continue()

    def matches(self, topic: str) -> bool:
        """Whether one of its patterns matches. Cached, because a feed asks once per run."""
        if self._matches is None or len(self._matches) >= _MATCHES_MAX:
            self._matches = {}
        known = self._matches.get(topic)
        if known is None:
            known = any(pattern.matches(topic) for pattern in self.patterns)
            self._matches[topic] = known
        return known

    # --- Kept topics ---

    def takes(self, shard: ShardId, envelope: Envelope) -> bool:
        """Whether a batch that has just become visible may be delivered at once. Hot path: once per subscriber."""
        if shard in self._behind:
            if self.first_new is not None:
                self._note_first(shard, envelope)
            if self.places is not None:
                self.begin_new(envelope)
            return False
        return self._credit_bytes > 0 and self._is_started and not self._pauses

    def begin_new(self, envelope: Envelope) -> None:
        """Add partitions created since the start: they begin with these messages."""
        assert self.places is not None
        bases = envelope.column64(envelope.base_offsets)
        partitions = envelope.column32(envelope.partitions)
        for topic, number, base in zip(envelope.topics, partitions, bases, strict=True):
            if (topic, number) not in self.places and self.matches(topic):
                self.places[topic, number] = base

    def _note_first(self, shard: ShardId, envelope: Envelope) -> None:
        assert self.first_new is not None
        first_new = self.first_new.get(shard)
        if first_new is None:
            if self.parts is not None:
                return  # its last values are not wanted, or not yet
            first_new = self.first_new[shard] = {}
        bases = envelope.column64(envelope.base_offsets)
        partitions = envelope.column32(envelope.partitions)
        for key, base in zip(zip(envelope.topics, partitions, strict=True), bases, strict=True):
            first_new.setdefault(key, base)

    def deliver(self, delivery: LiveDelivery, envelope: Envelope) -> None:
        """Send a batch that there is room for. `envelope` is the envelope of the delivered batch."""
        if self.places is not None:
            self.advance_places(envelope)
        self.send(delivery)

    def advance_places(self, envelope: Envelope) -> None:
        """Move the places of the batch's partitions behind the batch."""
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
        """Hand a delivery to the sink, and count it."""
        size = delivery.size
        self._credit_bytes -= size
        counters = self._counters
        counters.messages_out += delivery.messages
        counters.bytes_out += size
        counters.deliveries += 1
        self.sink.deliver(self.number, delivery)

    def report_gap(self, gap: GapState, shard: ShardId | None = None) -> None:
        """Tell the reader of a gap. `shard`: the delivery of it that follows moves the reader past the gap."""
        self.messages_missed += gap.missed
        self._counters.gaps += 1
        self._counters.messages_missed += gap.missed
        if self.parts is not None and shard is not None:
            self.parts.gap_in(self.number, shard, gap)
        else:
            self.sink.gap(self.number, gap)

    # --- Ephemeral topics ---

    def push(self, delivery: LiveDelivery, envelope: Envelope, body: bytes | memoryview) -> None:
        """Send a batch of ephemeral topics, or queue it until there is room."""
        if self.has_room and not self._queue and not self.preludes:
            self.send(delivery)
            return
        if self.first_new is not None:
            self._note_first(LAST_SENT.shard, envelope)
        if self._queue is None:
            self._queue = deque()
        # A copy: a queued batch must not keep all bytes alive that arrived together with it.
        body = bytes(body)
        head, _, padding = delivery.buffers
        own = msgspec.structs.replace(delivery, buffers=(head, body, padding))
        self._queue.append(_QueuedDelivery(own, envelope, body))
        self._queued_bytes += delivery.size
        if self._queued_bytes > self._queue_bytes_max:
            self._overflow()

    def end_prelude(self) -> None:
        """All last values of a prelude have been sent: tell the client, and send what waited behind them."""
        prelude = self.preludes.popleft()
        if not self.is_closed:
            for delivery in prelude.ends(self):
                self.send(delivery)
        if not self.preludes:
            self.first_new = None
        self._continue()

    def _send_queued(self) -> None:
        queue = self._queue
        while queue and self.has_room and not self.preludes:
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
            self.report_gap(GapState("overflow", count, topic, partition, first, last, text))

    def _keep_newest(self, missed: dict[TopicPartition, list[int]]) -> None:
        """Drop all but the newest message of each topic-partition."""
        queue = self._queue
        assert queue is not None
        seen: set[TopicPartition] = set()
        kept: deque[_QueuedDelivery] = deque()
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
    """The last row of each partition not seen yet, and what is dropped: topic-partition, count, first offset."""
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


def _queued(delivery: LiveDelivery, batch: Batch) -> _QueuedDelivery:
    """A queued delivery with its batch replaced."""
    buffers = pack(envelopes.encode(batch.envelope), batch.body)
    smaller = msgspec.structs.replace(
        delivery, buffers=buffers, size=sum(map(len, buffers)), messages=len(batch)
    )
    return _QueuedDelivery(smaller, batch.envelope, batch.body)


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
