"""A consumer's end of the line: it gets what the broker sends, and answers as a client library would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.work_heads import DeliveryPart
from tests.broker.consumer_groups.simulation.recorder import Recorder
from tests.broker.consumer_groups.simulation.recording_classes import RecordingGroup, stretch
from tests.broker.consumer_groups.simulation.writer import Writer
from tests.group_rules.simulation.consumer import SimulatedConsumer
from tests.simulation.history import Violation


class Hand:
    """A `WorkSink` with one consumer; its client knows what it was sent, and not what became of it."""

    def __init__(self, number: int, subscription: str, recorder: Recorder) -> None:
        self.number = number
        self.subscription = subscription
        self.client = SimulatedConsumer(number, subscription)
        self.connection_id = number
        self.peer = f"hand {number}"
        self.error: RunnelError | None = None
        self.consumer: WorkConsumer
        self.writer: Writer
        self._recorder = recorder

    def __str__(self) -> str:
        return f"hand {self.number} of {self.subscription}"

    def begin(self, consumer: WorkConsumer) -> bool:
        """Whether it is in: its subscription may have been deleted just now."""
        self.consumer = consumer
        group = consumer._consumer_group.group
        assert isinstance(group, RecordingGroup)
        if group.writer is None:
            return False
        self.writer = group.writer
        return True

    @property
    def is_at_work(self) -> bool:
        """It has something to answer, and does answer."""
        return bool(self.client.inbox) and not self.client.is_stalled and self.error is None

    def check_on_way(self) -> None:
        """What was decided for it has reached it."""
        consumer_id = self.consumer._consumer_id
        lost = [event for event in self.writer.on_way.values() if event.consumer == consumer_id]
        if lost and self.error is None:
            raise Violation(f"{self} never got this: {lost[0]}")
        if self.error is None:
            for number, part in self.writer.recalls_on_way:
                if number == consumer_id:
                    raise Violation(f"{self} was never told that {part} is recalled")
            for number, delivery in self.writer.expiries_on_way:
                if number == consumer_id:
                    raise Violation(f"{self} was never told that delivery {delivery} expired")

    # --- What the broker says ---

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        if consumer != self.number:
            self._wrong(f"a delivery for {consumer}")
        for delivery in deliveries:
            self._take(delivery)

    def _take(self, delivery: WorkDelivery) -> None:
        lease = delivery.lease
        event = self.writer.on_way.pop(lease.delivery, None)
        if event is None:
            self._wrong(f"{lease}, which nobody decided to deliver")
        key = (lease.topic, lease.partition)
        batch = Batch.unpack(b"".join(delivery.buffers))
        messages = batch.messages()
        offsets = [message.offset for message in messages]
        if (key, offsets) != (event.place, list(event.offsets)) or len(
            messages
        ) != delivery.messages:
            self._wrong(f"{key} {offsets} by {lease}, instead of {event}")
        if offsets[0] < lease.begin or offsets[-1] >= lease.end:
            self._wrong(f"{offsets} by {lease}")
        for message in messages:
            if self._recorder.stock.is_hidden(key, message.offset):
                self._wrong(f"{key} {message.offset}, which was purged before")
            known = self._recorder.stock.messages[key][message.offset]
            if (message.payload, message.key) != (known.payload, known.key):
                self._wrong(f"{message}, which was published as {known}")
        told = {
            (each.offset, each.failures, self._recorder.from_wall(each.first_delivery_ns))
            for each in lease.attempts
        }
        right = {(each.offset, each.failures, each.first_delivery_ns) for each in event.attempts}
        if told != right:
            self._wrong(f"attempts {told} instead of {right}")
        self.client.take(lease.delivery, key, offsets)

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        for part in map(stretch, parts):
            self.writer.recalls_on_way.discard((self.consumer._consumer_id, part))
            self.client.recalled.append(part)

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """Only sessions use this; here the answers to acks report what is late."""

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        for delivery in deliveries:
            self.writer.expiries_on_way.discard((self.consumer._consumer_id, delivery))

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self.error = error

    def _wrong(self, what: str) -> NoReturn:
        self._recorder.violate(Violation(f"{self} got {what}"))
