"""Keeps keys in order after a failure: new deliveries of a partition wait until the broker has received the nack.

A delivery with later messages of the failed key may be on its way already. The broker recalls these messages when it
receives the nack. A ping follows the nack: messages that are not recalled when its answer arrives may be handed out.
"""

from __future__ import annotations

from runnel.client.connection import Link
from runnel.client.consumer.deliveries import HeldDelivery
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.errors import RunnelError
from runnel.formats import wire
from runnel.topics.names import TopicPartition


class _Hold:
    """The waiting deliveries of one partition, and the number of pings without an answer."""

    __slots__ = ("deliveries", "unanswered")

    def __init__(self) -> None:
        self.unanswered = 0
        self.deliveries: list[HeldDelivery] = []


class NackBarrier:
    """Holds back new deliveries of partitions with a nack that the broker has not confirmed."""

    def __init__(self, queue: DeliveryQueue) -> None:
        self._queue = queue
        self._holds: dict[TopicPartition, _Hold] = {}

    def add(self, delivery: HeldDelivery) -> None:
        """Queue an arrived delivery, or hold it back."""
        if hold := self._holds.get((delivery.topic, delivery.partition)):
            hold.deliveries.append(delivery)
        else:
            self._queue.add(delivery)

    def clear(self) -> None:
        self._holds.clear()

    def hold(self, partition: TopicPartition, link: Link) -> None:
        """Hold a partition back after a nack was sent, until the answer to a ping behind it arrives."""
        connection = link.connection
        if connection is None:
            return
        hold = self._holds.setdefault(partition, _Hold())
        hold.unanswered += 1

        def answered(_answer: wire.Answer | RunnelError, _tail: memoryview) -> None:
            hold.unanswered -= 1
            if not hold.unanswered and self._holds.get(partition) is hold:
                del self._holds[partition]
                for delivery in hold.deliveries:
                    self._queue.add(delivery)

        number = link.next_number()
        connection.request(number, wire.Ping(number), answered)
