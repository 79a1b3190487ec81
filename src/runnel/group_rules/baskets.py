"""What one offer gives to whom, while it is looked at message by message: one delivery for each consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from runnel.group_rules.desk import Desk
from runnel.group_rules.effects import Delivery
from runnel.group_rules.leases import Lease
from runnel.group_rules.windows import Consumer
from runnel.topics.names import TopicPartition

Attempts: TypeAlias = Callable[[Sequence[int]], list[tuple[int, int, int]]]


class Basket:
    """Messages for one consumer: offsets of its lease to be."""

    __slots__ = ("lease", "offsets", "room")

    def __init__(self, lease: Lease, room: int) -> None:
        self.lease = lease
        self.room = room
        self.offsets: list[int] = []


class Baskets:
    """The baskets of one offer. Windows are told at its end: until then those whose basket is full are passed over."""

    def __init__(
        self, desk: Desk, key: TopicPartition, base: int, cost_bytes: int, now_ns: int
    ) -> None:
        self._desk = desk
        self._key = key
        self._base = base
        self._cost_bytes = cost_bytes
        self._now_ns = now_ns
        self._baskets: dict[Consumer, Basket] = {}
        self.find = self._baskets.get  # a consumer's, full or not; None if it has none yet

    def of_anybody(self) -> Basket | None:
        """The basket of whoever's turn it is; None if nobody has room."""
        consumers = self._desk.consumers
        while (consumer := consumers.next_ready()) is not None:
            basket = self.of(consumer)
            if basket is not None:
                return basket
            consumers.pass_over(consumer)
        return None

    def of(self, consumer: Consumer) -> Basket | None:
        """A certain consumer's basket; None if it has no room."""
        basket = self._baskets.get(consumer)
        if basket is None:
            return self._new(consumer) if consumer.has_room else None
        return basket if basket.room else None

    def _new(self, consumer: Consumer) -> Basket | None:
        desk = self._desk
        room = consumer.fits(self._cost_bytes)
        if not room:
            desk.consumers.stick(consumer)
            return None
        lease = desk.open_lease(consumer, self._key, self._base, self._cost_bytes, self._now_ns)
        basket = self._baskets[consumer] = Basket(lease, room)
        return basket

    def put(self, basket: Basket, *offsets: int) -> None:
        """No more than it has room for."""
        basket.offsets += offsets
        basket.room -= len(offsets)
        if not basket.room:
            self.full(basket)

    def full(self, basket: Basket) -> None:
        """It takes no more."""
        self._desk.consumers.pass_over(basket.lease.consumer)

    def deliver(self, attempts: Attempts) -> list[Delivery]:
        return [
            self._desk.deliver(basket.lease, self._mask(basket.offsets), attempts(basket.offsets))
            for basket in self._baskets.values()
        ]

    def _mask(self, offsets: list[int]) -> int:
        # Digit by digit, and read once: a mask that grows bit by bit would be copied for each.
        top = max(offsets)
        digits = bytearray(b"0" * (top - self._base + 1))
        for offset in offsets:
            digits[top - offset] = 49  # "1"
        return int(digits, 2)
