"""Builds the deliveries of one offer, one for each consumer, message by message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from runnel.group_rules.effects import LeasedDelivery
from runnel.group_rules.group_state import GroupState
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

Attempts: TypeAlias = Callable[[Sequence[int]], list[tuple[int, int, int]]]


class DeliveryBuilder:
    """The delivery of one consumer while it is built: its lease, and the offsets added so far."""

    __slots__ = ("lease", "offsets", "room")

    def __init__(self, lease: LeasedRange, room: int) -> None:
        self.lease = lease
        self.room = room
        self.offsets: list[int] = []


class DeliveryBuilders:
    """The deliveries that one offer builds, one for each consumer.

    Windows change when the offer ends. Until then, consumers whose delivery is full are passed over.
    """

    def __init__(
        self, group_state: GroupState, key: TopicPartition, base: int, cost_bytes: int, now_ns: int
    ) -> None:
        self._group_state = group_state
        self._key = key
        self._base = base
        self._cost_bytes = cost_bytes
        self._now_ns = now_ns
        self._delivery_builders: dict[ConsumerWindow, DeliveryBuilder] = {}
        # A consumer's delivery builder, full or not; None if it has none yet.
        self.find = self._delivery_builders.get

    def for_any_consumer(self) -> DeliveryBuilder | None:
        """The delivery builder of the consumer whose turn it is; None if no consumer has room."""
        consumers = self._group_state.consumers
        while (consumer := consumers.next_ready()) is not None:
            delivery_builder = self.for_consumer(consumer)
            if delivery_builder is not None:
                return delivery_builder
            consumers.pass_over(consumer)
        return None

    def for_consumer(self, consumer: ConsumerWindow) -> DeliveryBuilder | None:
        """This consumer's delivery builder; None if it has no room."""
        delivery_builder = self._delivery_builders.get(consumer)
        if delivery_builder is None:
            return self._new(consumer) if consumer.has_room else None
        return delivery_builder if delivery_builder.room else None

    def _new(self, consumer: ConsumerWindow) -> DeliveryBuilder | None:
        group_state = self._group_state
        room = consumer.fits(self._cost_bytes)
        if not room:
            group_state.consumers.mark_stuck(consumer)
            return None
        lease = group_state.open_lease(
            consumer, self._key, self._base, self._cost_bytes, self._now_ns
        )
        delivery_builder = self._delivery_builders[consumer] = DeliveryBuilder(lease, room)
        return delivery_builder

    def put(self, delivery_builder: DeliveryBuilder, *offsets: int) -> None:
        """Add offsets, at most as many as the builder has room for."""
        delivery_builder.offsets += offsets
        delivery_builder.room -= len(offsets)
        if not delivery_builder.room:
            self.on_full(delivery_builder)

    def on_full(self, delivery_builder: DeliveryBuilder) -> None:
        """Give the consumer of a full builder no more turns in this offer."""
        self._group_state.consumers.pass_over(delivery_builder.lease.consumer)

    def deliver(self, attempts: Attempts) -> list[LeasedDelivery]:
        return [
            self._group_state.deliver(
                delivery_builder.lease,
                self._mask(delivery_builder.offsets),
                attempts(delivery_builder.offsets),
            )
            for delivery_builder in self._delivery_builders.values()
        ]

    def _mask(self, offsets: list[int]) -> int:
        # Written as digits and parsed once: setting bit after bit would copy the mask for each of them.
        top = max(offsets)
        digits = bytearray(b"0" * (top - self._base + 1))
        for offset in offsets:
            digits[top - offset] = 49  # "1"
        return int(digits, 2)
