"""What a consumer hands out: a message, or a batch of them, with the lease they are under."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from runnel.client.consumer.deliveries import BEGUN, WAITING, AckRecorder, HeldDelivery, Range
from runnel.formats.batch import Batch
from runnel.formats.message import Message


class WorkItem(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A message under a lease, and how often it failed before."""

    # gc=False: nothing that it refers to refers to it.

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
        """How often it was delivered and failed before."""
        attempt = self.delivery.attempts.get(self.message.offset)
        return 0 if attempt is None else attempt.failures

    @property
    def delivery_count(self) -> int:
        """This delivery counted: 1 the first time."""
        return self.failures + 1

    @property
    def first_delivery_ns(self) -> int:
        """When it was first delivered, to whomever: nanoseconds since 1970."""
        attempt = self.delivery.attempts.get(self.message.offset)
        known_ns = 0 if attempt is None else attempt.first_delivery_ns
        return known_ns or self.delivery.arrived_time_ns

    @property
    def is_late(self) -> bool:
        """Whether acknowledging it now would be late: recalled, its lease over, or its connection lost.

        Long work may look at it from time to time, and stop.
        """
        delivery = self.delivery
        state = delivery.state(self.message.offset)
        return state not in (WAITING, BEGUN) or delivery.is_lapsed or bool(delivery.loss)


class Work(WorkItem, frozen=True, eq=False, gc=False):
    """A message to be processed: `ack` it when that is done, `nack` it when that failed."""

    def ack(self, *, stored: bool = False) -> Coroutine[Any, Any, None]:
        """It is done. Waits only for room; with `stored`, until the broker has stored it."""
        return self.delivery.holder_on_loop().ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> Coroutine[Any, Any, None]:
        """It failed: it comes again after a delay, this one or the subscription's."""
        return self.delivery.holder_on_loop().nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Lease its delivery for so long from now on."""
        return self.delivery.holder_on_loop().extend(self, seconds)


class LeasedBatch(Batch):
    """Messages of one delivery, all those that nobody has begun."""

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
        if len(self) == delivery.count:  # all of it, however scattered
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
    """A batch to be processed: `ack` it whole, or its `works()` one by one."""

    __slots__ = ()

    def works(self) -> Iterator[Work]:
        """Its messages, each to be acknowledged for itself."""
        return map(Work, self, repeat(self.delivery))

    def ack(self, *, stored: bool = False) -> Coroutine[Any, Any, None]:
        """All of it is done."""
        return self.delivery.holder_on_loop().ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> Coroutine[Any, Any, None]:
        """All of it failed that is not acknowledged."""
        return self.delivery.holder_on_loop().nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Lease it for so long from now on."""
        return self.delivery.holder_on_loop().extend(self, seconds)


class LateWork(msgspec.Struct, frozen=True):
    """Acknowledged or given back too late: the messages from `begin` on, and not `end`, go to somebody again.

    `topic` is empty where the delivery was settled so long ago that it is not remembered.
    """

    topic: str
    partition: int
    begin: int
    end: int
    delivery: int
    reason: str

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
        """How many offsets that are; 0 where the broker only knew the delivery."""
        return max(0, self.end - self.begin)
