"""Keeps keys in order after a failure: what arrives of a partition waits until the broker has heard of the nack.

It may have been on its way already, with later messages of the key that failed. The broker recalls those as it takes
the nack; whatever has not been recalled when it answers what was asked behind the nack may be handed out.
"""

from __future__ import annotations

from typing import TypeAlias

from runnel.client.connection import Link
from runnel.client.consumer.deliveries import HeldDelivery
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.errors import RunnelError
from runnel.formats import wire

_Place: TypeAlias = tuple[str, int]


class _Hold:
    __slots__ = ("deliveries", "unanswered")

    def __init__(self) -> None:
        self.unanswered = 0
        self.deliveries: list[HeldDelivery] = []


class NackBarrier:
    """Deliveries that have arrived, and wait for an answer."""

    def __init__(self, queue: DeliveryQueue) -> None:
        self._queue = queue
        self._holds: dict[_Place, _Hold] = {}

    def add(self, delivery: HeldDelivery) -> None:
        """One has arrived: it waits if it must."""
        if hold := self._holds.get((delivery.topic, delivery.partition)):
            hold.deliveries.append(delivery)
        else:
            self._queue.add(delivery)

    def clear(self) -> None:
        self._holds.clear()

    def hold(self, place: _Place, link: Link) -> None:
        """A nack has been told: ask something behind it."""
        connection = link.connection
        if connection is None:
            return
        hold = self._holds.setdefault(place, _Hold())
        hold.unanswered += 1

        def answered(_answer: wire.Answer | RunnelError, _tail: memoryview) -> None:
            hold.unanswered -= 1
            if not hold.unanswered and self._holds.get(place) is hold:
                del self._holds[place]
                for delivery in hold.deliveries:
                    self._queue.add(delivery)

        number = link.next_number()
        connection.request(number, wire.Ping(number), answered)
