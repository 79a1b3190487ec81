"""Builds the deliveries of one offer, message by message: one delivery for each consumer."""

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
    """Messages for one consumer: offsets of its lease to be."""

    __slots__ = ("lease", "offsets", "room")

    def __init__(self, lease: LeasedRange, room: int) -> None:
        self.lease = lease
        self.room = room
        self.offsets: list[int] = []


class DeliveryBuilders:
    """The deliveries that one offer builds, one for each consumer.

    Windows change at its end: until then consumers whose delivery is full are passed over.
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
        self.find = (
            self._delivery_builders.get
        )  # a consumer's, full or not; None if it has none yet

    def of_anybody(self) -> DeliveryBuilder | None:
        """The delivery builder of whoever's turn it is; None if nobody has room."""
        consumers = self._group_state.consumers
        while (consumer := consumers.next_ready()) is not None:
            delivery_builder = self.of(consumer)
            if delivery_builder is not None:
                return delivery_builder
            consumers.pass_over(consumer)
        return None

    def of(self, consumer: ConsumerWindow) -> DeliveryBuilder | None:
        """A certain consumer's delivery builder; None if it has no room."""
        delivery_builder = self._delivery_builders.get(consumer)
        if delivery_builder is None:
            return self._new(consumer) if consumer.has_room else None
        return delivery_builder if delivery_builder.room else None

    def _new(self, consumer: ConsumerWindow) -> DeliveryBuilder | None:
        group_state = self._group_state
        room = consumer.fits(self._cost_bytes)
        if not room:
            group_state.consumers.stick(consumer)
            return None
        lease = group_state.open_lease(
            consumer, self._key, self._base, self._cost_bytes, self._now_ns
        )
        delivery_builder = self._delivery_builders[consumer] = DeliveryBuilder(lease, room)
        return delivery_builder

    def put(self, delivery_builder: DeliveryBuilder, *offsets: int) -> None:
        """No more than it has room for."""
        delivery_builder.offsets += offsets
        delivery_builder.room -= len(offsets)
        if not delivery_builder.room:
            self.full(delivery_builder)

    def full(self, delivery_builder: DeliveryBuilder) -> None:
        """It takes no more."""
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
        # Digit by digit, and read once: a mask that grows bit by bit would be copied for each.
        top = max(offsets)
        digits = bytearray(b"0" * (top - self._base + 1))
        for offset in offsets:
            digits[top - offset] = 49  # "1"
        return int(digits, 2)
