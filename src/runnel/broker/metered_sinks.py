"""Sinks that charge deliveries to the account of a token, and slow the reader when the token is over its rate."""

from __future__ import annotations

from collections.abc import Sequence

from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery, WorkSink
from runnel.broker.limits.quotas import Account
from runnel.broker.live.subscription import LiveDelivery, LiveSink, LiveSubscription
from runnel.errors import RunnelError
from runnel.formats.wire import GapState
from runnel.formats.work_heads import DeliveryPart


class MeteredLiveSink:
    """A `LiveSink` that charges an account. `reader` is set before anything is delivered."""

    __slots__ = ("_account", "_sink", "connection_id", "peer", "reader")

    def __init__(self, sink: LiveSink, account: Account) -> None:
        self._sink = sink
        self._account = account
        self.connection_id = sink.connection_id
        self.peer = sink.peer
        self.reader: LiveSubscription | None = None

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:
        """Hot: once for every batch and subscriber."""
        self._sink.deliver(subscription, delivery)
        if self._account.outgoing is not None and self.reader is not None:
            self._account.delivered(self.reader, delivery.messages, delivery.size)

    def gap(self, subscription: int, gap: GapState) -> None:
        self._sink.gap(subscription, gap)

    def ended(self, subscription: int, error: RunnelError) -> None:
        self._sink.ended(subscription, error)


class MeteredWorkSink:
    """A `WorkSink` that charges an account. `reader` is set before anything is delivered."""

    __slots__ = ("_account", "_sink", "connection_id", "peer", "reader")

    def __init__(self, sink: WorkSink, account: Account) -> None:
        self._sink = sink
        self._account = account
        self.connection_id = sink.connection_id
        self.peer = sink.peer
        self.reader: WorkConsumer | None = None

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        """Hot: once for every few deliveries."""
        self._sink.deliver_work(consumer, deliveries)
        if self._account.outgoing is not None and self.reader is not None:
            messages = sum(delivery.messages for delivery in deliveries)
            size = sum(delivery.size for delivery in deliveries)
            self._account.delivered(self.reader, messages, size)

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self._sink.recall(consumer, parts)

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        self._sink.late(consumer, parts)

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        self._sink.leases_expired(consumer, deliveries)

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self._sink.consumer_ended(consumer, error)
