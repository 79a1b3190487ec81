"""The items that a consumer hands out: leased messages and batches; and reports of late acks."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from runnel.client.consumer.deliveries import BEGUN, WAITING, AckRecorder, HeldDelivery, Range
from runnel.formats.batch import Batch
from runnel.formats.message import Message


class WorkItem(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A leased message, and how often it failed before."""

    # gc=False: nothing that it refers to refers back to it.

    message: Message
    delivery: HeldDelivery

    def __repr__(self) -> str:
        attempt = f", delivery {self.delivery_count}" if self.failures else ""
        return f"<{type(self).__name__} {repr(self.message)[1:-1]}{attempt}>"

    def ranges(self) -> Sequence[Range]:
        return ((self.message.offset, self.message.offset + 1),)

    def first_of_keys(self) -> Iterable[Message]:
        return (self.message,)

    def ack_in(self, ledger: AckRecorder) -> None:
        offset = self.message.offset
        if not ledger.ack_begun(self.delivery, offset):
            ledger.ack_range(self.delivery, offset, offset + 1)

    # --- The message ---

    @property
    def topic(self) -> str:
        return self.message.topic

    @property
    def partition(self) -> int:
        return self.message.partition

    @property
    def offset(self) -> int:
        return self.message.offset

    @property
    def key(self) -> bytes | None:
        return self.message.key

    @property
    def payload(self) -> bytes:
        return self.message.payload

    @property
    def tags(self) -> Mapping[str, str]:
        return self.message.tags

    @property
    def event_time_ns(self) -> int:
        return self.message.event_time_ns

    @property
    def receive_time_ns(self) -> int:
        return self.message.receive_time_ns

    # --- Its deliveries ---

    @property
    def failures(self) -> int:
        """The number of failed deliveries before this one."""
        attempt = self.delivery.attempts.get(self.message.offset)
        return 0 if attempt is None else attempt.failures

    @property
    def delivery_count(self) -> int:
        """The number of deliveries, including this one: 1 the first time."""
        return self.failures + 1

    @property
    def first_delivery_ns(self) -> int:
        """When it was first delivered to any consumer: nanoseconds since 1970."""
        attempt = self.delivery.attempts.get(self.message.offset)
        known_ns = 0 if attempt is None else attempt.first_delivery_ns
        return known_ns or self.delivery.arrived_time_ns

    @property
    def is_late(self) -> bool:
        """Whether an ack would be late now: the message is recalled, its lease is over, or its connection is lost.

        Long processing may check this from time to time, and stop.
        """
        delivery = self.delivery
        state = delivery.state(self.message.offset)
        return state not in (WAITING, BEGUN) or delivery.is_lapsed or bool(delivery.loss)


class Work(WorkItem, frozen=True, eq=False, gc=False):
    """A message to be processed: `ack` it when processing is done, `nack` it when processing failed."""

    def ack(self, *, stored: bool = False) -> Coroutine[Any, Any, None]:
        """Acknowledge it. Waits only while the connection is full; with `stored`, until the ack is stored."""
        return self.delivery.holder_on_loop().ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> Coroutine[Any, Any, None]:
        """Report it as failed: it comes again after `delay_s`, by default the subscription's delay."""
        return self.delivery.holder_on_loop().nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Lease its delivery for `seconds` from now."""
        return self.delivery.holder_on_loop().extend(self, seconds)


class LeasedBatch(Batch):
    """All messages of one delivery that were not begun before."""

    __slots__ = ("delivery",)

    def __init__(self, batch: Batch, delivery: HeldDelivery) -> None:
        super().__init__(batch.envelope, batch.body, batch.columns)
        self.delivery = delivery

    def ranges(self) -> Sequence[Range]:
        return [(run.base_offset, run.base_offset + run.count) for run in self.runs()]

    def first_of_keys(self) -> Iterable[Message]:
        first: dict[bytes | None, Message] = {}
        for message in self:
            first.setdefault(message.key, message)
        return first.values()

    def ack_in(self, ledger: AckRecorder) -> None:
        delivery = self.delivery
        if len(self) == delivery.count:  # the whole delivery: one range, however scattered
            ledger.ack_range(delivery, delivery.begin, delivery.end)
            return
        for begin, end in self.ranges():
            ledger.ack_range(delivery, begin, end)

    @property
    def topic(self) -> str:
        return self.delivery.topic

    @property
    def partition(self) -> int:
        return self.delivery.partition


class WorkBatch(LeasedBatch):
    """A batch to be processed: `ack` the batch, or its `works()` one by one."""

    __slots__ = ()

    def works(self) -> Iterator[Work]:
        """Its messages, each to be acknowledged on its own."""
        return map(Work, self, repeat(self.delivery))

    def ack(self, *, stored: bool = False) -> Coroutine[Any, Any, None]:
        """Acknowledge all its messages."""
        return self.delivery.holder_on_loop().ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> Coroutine[Any, Any, None]:
        """Report all its messages that are not acknowledged as failed."""
        return self.delivery.holder_on_loop().nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Lease its delivery for `seconds` from now."""
        return self.delivery.holder_on_loop().extend(self, seconds)


class LateWork(msgspec.Struct, frozen=True):
    """Messages acknowledged or given back too late: offsets from `begin` to `end` (exclusive) are delivered again.

    `topic` is empty if the delivery was settled so long ago that the consumer has forgotten it.
    """

    topic: str
    partition: int
    begin: int
    end: int
    delivery: int
    reason: str
    order: int = 0
    """The number of the delivery, in the order in which they arrived from all nodes; 0: forgotten."""

    def __str__(self) -> str:
        if not self.count:
            where = f"delivery {self.delivery}"
        elif self.topic:
            where = f"{self.topic}[{self.partition}]@{self.begin}…{self.end - 1}"
        else:
            where = f"offsets {self.begin} to {self.end - 1} of delivery {self.delivery}"
        return f"{where}: {self.reason}"

    @property
    def count(self) -> int:
        """The number of offsets; 0 if the broker only knew the delivery."""
        return max(0, self.end - self.begin)
