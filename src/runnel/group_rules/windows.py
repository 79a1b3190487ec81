"""The windows of consumers: how much each may have leased at once, and whose turn is next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from runnel.group_rules.offset_set import OffsetSet
from runnel.topics.names import TopicPartition


class ConsumerWindow:
    """A consumer's window, and how much of it is used."""

    __slots__ = (
        "bytes_leased",
        "heads",
        "is_stuck",
        "messages_leased",
        "number",
        "room",
        "window_bytes",
        "window_messages",
    )

    def __init__(self, number: int, window_messages: int, window_bytes: int) -> None:
        self.number = number
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self.messages_leased = 0
        self.bytes_leased = 0
        # The next message was too large for the rest of the window. The consumer gets no turn until it gives something
        # back: otherwise the broker would read the same message again and again.
        self.is_stuck = False
        # By partition, the next message of each key that only this consumer may have.
        self.heads: OrderedDict[TopicPartition, OffsetSet] = OrderedDict()
        self.room = (0, 0)  # messages and bytes, as `ConsumerWindows` last counted them

    @property
    def has_room(self) -> bool:
        return (
            not self.is_stuck
            and self.messages_leased < self.window_messages
            and (self.bytes_leased < self.window_bytes or not self.messages_leased)
        )

    def fits(self, cost_bytes: int) -> int:
        """How many messages of this size fit now. With nothing in flight, one always fits."""
        room = self.window_messages - self.messages_leased
        if cost_bytes:
            room = min(room, (self.window_bytes - self.bytes_leased) // cost_bytes)
        if room <= 0 and not self.messages_leased and self.window_messages > 0:
            return 1
        return max(room, 0)


class ConsumerWindows:
    """The consumers of a group, and the turns of those with room and of those with room and heads."""

    def __init__(self) -> None:
        self._all: dict[int, ConsumerWindow] = {}
        self._ready: OrderedDict[ConsumerWindow, None] = OrderedDict()
        self._with_heads: OrderedDict[ConsumerWindow, None] = OrderedDict()  # and with room
        self.room_messages = 0
        self.room_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def get(self, number: int) -> ConsumerWindow | None:
        return self._all.get(number)

    def add(self, consumer: ConsumerWindow) -> None:
        if consumer.number in self._all:
            raise ValueError(f"consumer {consumer.number} is there already")
        self._all[consumer.number] = consumer
        self.update(consumer)

    def remove(self, consumer: ConsumerWindow) -> None:
        del self._all[consumer.number]
        consumer.window_messages = 0  # leases and queues that still refer to it find no room
        self.update(consumer)

    def resize(self, consumer: ConsumerWindow, window_messages: int, window_bytes: int) -> None:
        consumer.window_messages = window_messages
        consumer.window_bytes = window_bytes
        consumer.is_stuck = False
        self.update(consumer)

    # --- Room ---

    def take(self, consumer: ConsumerWindow, messages: int, size_bytes: int) -> None:
        consumer.messages_leased += messages
        consumer.bytes_leased += size_bytes
        self.update(consumer)

    def give_back(self, consumer: ConsumerWindow, messages: int, size_bytes: int) -> None:
        consumer.messages_leased -= messages
        consumer.bytes_leased -= size_bytes
        consumer.is_stuck = False
        self.update(consumer)

    def mark_stuck(self, consumer: ConsumerWindow) -> None:
        """The next message does not fit: give the consumer no turn until it gives something back."""
        consumer.is_stuck = True
        self.update(consumer)

    def update(self, consumer: ConsumerWindow) -> None:
        """Update turns and sums after a consumer has changed."""
        messages, size_bytes = consumer.room
        if consumer.has_room:
            consumer.room = (
                consumer.window_messages - consumer.messages_leased,
                max(consumer.window_bytes - consumer.bytes_leased, 1),
            )
            self._ready.setdefault(consumer)
            if consumer.heads:
                self._with_heads.setdefault(consumer)
            else:
                self._with_heads.pop(consumer, None)
        else:
            consumer.room = (0, 0)
            self._ready.pop(consumer, None)
            self._with_heads.pop(consumer, None)
        self.room_messages += consumer.room[0] - messages
        self.room_bytes += consumer.room[1] - size_bytes

    # --- Turns ---

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    @property
    def is_any_ready(self) -> bool:
        return bool(self._ready)

    def pass_over(self, consumer: ConsumerWindow) -> None:
        """Give the consumer no more turns until it changes."""
        self._ready.pop(consumer, None)

    def next_ready(self) -> ConsumerWindow | None:
        """The consumer with room that has waited longest for its turn. It moves to the end of the line."""
        for consumer in self._ready:
            self._ready.move_to_end(consumer)
            return consumer
        return None

    @property
    def with_heads(self) -> Iterable[ConsumerWindow]:
        """The consumers that have room and heads."""
        return self._with_heads

    def next_with_heads(self) -> ConsumerWindow | None:
        """The consumer with room and heads that has waited longest for its turn. It moves to the end of the line."""
        for consumer in self._with_heads:
            self._with_heads.move_to_end(consumer)
            return consumer
        return None
