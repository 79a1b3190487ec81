"""A live reader as the simulation plays it: a client with little credit that reconnects, and remembers everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runnel.broker.broker import LiveDelivery, LiveSubscription
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.errors import MovedError, RunnelError
from runnel.formats import wire
from runnel.formats.batch import unpack_blocks
from runnel.formats.message import Message
from runnel.formats.wire import GapState, Start
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern

# Of a partition: a topic that is not kept, or kept in memory, counts from 1 again in a new epoch.
Numbered = tuple[int, int]  # epoch, offset


@dataclass
class Seen:
    """What a reader was sent of one partition, or told that it will not be."""

    offsets: list[Numbered] = field(default_factory=list)
    gaps: list[GapState] = field(default_factory=list)


class SimulatedReader:
    """The sink of one subscription after the other: each continues where the last one ended."""

    def __init__(self, number: int, patterns: list[str], start: Start, overflow: str) -> None:
        self.connection_id = 1
        self.peer = f"reader {number}"
        self.number = number
        self.patterns = patterns
        self.start = start
        self.overflow = overflow
        self.is_literal = all(Pattern(pattern).is_literal for pattern in patterns)
        self._parsed = [Pattern(pattern) for pattern in patterns]
        self.position = SubscriptionPosition(patterns, start)
        # By key: the lowest offset that it may begin with, and the first that it must be sent.
        self.begins: dict[TopicPartition, tuple[int, int]] = {}
        self.ends: dict[TopicPartition, int] = {}  # the next offsets when it had begun
        self.live: dict[
            TopicPartition, dict[Numbered, bool]
        ] = {}  # of topics not kept: sent to it for sure?
        self.problems: list[str] = []
        self.on_message: Callable[[SimulatedReader, Message, int], None] | None = None
        self.seen: dict[TopicPartition, Seen] = {}
        self.shard_gaps = 0  # told without a topic
        self.lost: set[TopicPartition] = (
            set()
        )  # what it had read of was in memory, and the broker restarted
        self.subscription: LiveSubscription | None = None
        self.error: RunnelError | None = None
        self.is_moved = False  # a shard has gone: it resumes when all are here
        self.last_asked = 0  # how often it asked for last values
        self.credit_bytes = 0
        self._overdrawn = 0
        self._next_entries: dict[tuple[str, int], int] = {}

    def __repr__(self) -> str:
        return f"reader {self.number} of {' '.join(self.patterns)} from {self.start.kind}"

    def matches(self, topic: str) -> bool:
        return any(pattern.matches(topic) for pattern in self._parsed)

    def of(self, key: TopicPartition) -> Seen:
        return self.seen.setdefault(key, Seen())

    # --- Its subscriptions ---

    def begun(self, subscription: LiveSubscription, credit_bytes: int) -> None:
        self.subscription = subscription
        self.credit_bytes = credit_bytes
        self._overdrawn = 0
        self._next_entries.clear()
        answer = wire.Subscribed(0, self.number, subscription.partitions, subscription.shards)
        self.position.begin(answer)

    def left(self) -> None:
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None

    def grant(self, credit_bytes: int) -> None:
        if self.subscription is not None:
            self.credit_bytes += credit_bytes
            self._overdrawn = 0
            self.subscription.grant(credit_bytes)

    # --- What the broker tells ---

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:
        if self.subscription is None or subscription != self.number:
            self.problems.append("a delivery after it left")
        if self.credit_bytes <= 0 and delivery.size:
            # A page that was being read while other shards' batches used the credit up.
            self._overdrawn += 1
            if self._overdrawn > 1:
                self.problems.append("several deliveries without credit")
        self.credit_bytes -= delivery.size
        batches = unpack_blocks(b"".join(delivery.buffers))
        if sum(map(len, batches)) != delivery.messages:
            self.problems.append(f"{delivery.messages} messages told, {batches} sent")
        shard = delivery.shard
        if delivery.next_entry:
            place = (shard.journal, shard.shard)
            if delivery.next_entry <= self._next_entries.get(place, 0):
                self.problems.append(f"{shard} goes back to entry {delivery.next_entry}")
            self._next_entries[place] = delivery.next_entry
        head = wire.Deliver(
            self.number, shard.journal, shard.shard, delivery.epoch, delivery.next_entry
        )
        for batch in self.position.delivered(head, batches):
            epochs = [run.epoch for run in batch.runs() for _ in range(run.count)]
            for message, epoch in zip(batch.messages(), epochs, strict=True):
                self._take(message, epoch)

    def _take(self, message: Message, epoch: int) -> None:
        key = (message.topic, message.partition)
        if not self.matches(message.topic):
            self.problems.append(f"got a message of {key}")
        seen = self.of(key)
        place = (epoch, message.offset)
        if seen.offsets and place <= seen.offsets[-1]:
            self.problems.append(f"{key} goes from {seen.offsets[-1]} to {place}")
        seen.offsets.append(place)
        if self.on_message is not None:
            self.on_message(self, message, epoch)

    def gap(self, subscription: int, gap: GapState) -> None:
        if self.subscription is None or subscription != self.number:
            self.problems.append("a gap after it left")
        self.position.missed(gap)
        if gap.topic:
            self.of((gap.topic, gap.partition)).gaps.append(gap)
        else:
            self.shard_gaps += 1

    def ended(self, subscription: int, error: RunnelError) -> None:
        self.subscription = None
        if isinstance(error, MovedError):
            self.is_moved = True
        else:
            self.error = error
