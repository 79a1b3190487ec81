"""What is leased to a consumer, and what it has to tell of that: acks, messages given up, late ones. Pure.

Everything happens on the loop's thread, except that a blocking client begins messages in its own. Whatever takes
messages away that wait holds the lock for that reason, and so does whoever begins one there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from runnel.client.consumer.deliveries import (
    ACKED,
    BEGUN,
    DROPPED,
    GIVEN_UP,
    GONE,
    NACKED,
    ON_ACK,
    ON_BEGIN,
    ON_DROP,
    ON_LOSS,
    ON_NACK,
    ON_RECALL,
    ON_SENT,
    WAITING,
    HeldDelivery,
    LeasedItem,
    Range,
)
from runnel.client.consumer.work import LateWork
from runnel.formats.message import Message
from runnel.formats.work_heads import DeliveryPart, Picked

# Deliveries that were settled and are remembered, to say of late ones where they were.
_REMEMBERED_MAX: Final = 4096
EARLY_ACKS_MIN: Final = 1000  # acks: fewer leave at the end of the wake-up
_SCATTERED_MIN: Final = 512  # of one delivery, on average

RECALLED_MEANWHILE: Final = "it had been recalled, to come again behind a message before it"
LEASE_OVER: Final = "its lease had ended, as the broker says"
CONNECTION_LOST: Final = "the connection was lost, and the lease with it"
CONSUMER_CLOSED: Final = "the consumer was closed before"
CONSUMER_ENDED: Final = "the broker had ended the consumer"


class ConsumerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer has done since it began, in messages; `late` are acks that came too late."""

    received: int
    acked: int
    nacked: int
    recalled: int
    late: int
    leased: int  # now: received, and neither acked nor nacked


class Acks(NamedTuple):
    """Deliveries that were acked whole, and parts of others."""

    deliveries: list[int]
    parts: list[DeliveryPart]
    picked: list[Picked]


class _Place(NamedTuple):
    topic: str
    partition: int
    begin: int
    end: int


class Ledger:
    """All deliveries of a consumer."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.deliveries: Final[dict[int, HeldDelivery]] = {}
        self.taken_ns = 0  # when a message was last begun
        self.unsent = 0  # messages that were acked, and of which the broker is not told
        self.given_up: list[DeliveryPart] = []  # to be told as recalled
        self.late: list[LateWork] = []  # to be told to the user
        self._received = self._nacked = self._recalled = self._late = 0
        self._acked = 0  # without those that are unsent
        self._touched: dict[int, HeldDelivery] = {}  # have acks that are not sent
        self._remembered: dict[int, _Place] = {}

    @property
    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(
            received=self._received,
            acked=self._acked + self.unsent,
            nacked=self._nacked,
            recalled=self._recalled,
            late=self._late,
            # A copy: other threads may ask.
            leased=sum(delivery.left for delivery in list(self.deliveries.values())),
        )

    @property
    def is_send_due(self) -> bool:
        """Whether acks should leave before the end of the wake-up.

        Those that lie scattered over many deliveries cost the less the more of them leave together.
        """
        return self.unsent >= EARLY_ACKS_MIN and self.unsent >= _SCATTERED_MIN * len(self._touched)

    # --- Coming and being handed out ---

    def add(self, delivery: HeldDelivery) -> None:
        self.deliveries[delivery.id] = delivery
        self._received += delivery.count

    def begin(self, delivery: HeldDelivery, offset: int, now_ns: int) -> bool:
        """A message is handed to the user's code; False: it is not to be worked on any more."""
        row = offset - delivery.begin
        if delivery.states[row] != WAITING:
            return False
        delivery.states[row] = BEGUN
        delivery.begun_ns[offset] = self.taken_ns = now_ns
        return True

    def begin_all(self, delivery: HeldDelivery, now_ns: int) -> list[Range]:
        """Everything of a delivery that waits is handed out: where it is, by offsets."""
        with self.lock:
            begun = delivery.ranges_in(WAITING)
            delivery.transition(delivery.begin, delivery.end, ON_BEGIN)
            if begun:
                delivery.begun_together_ns = self.taken_ns = now_ns
        return begun

    # --- Acking ---

    def ack_begun(self, delivery: HeldDelivery, offset: int) -> bool:
        """The usual case, quickly: a message that is worked on is done. False: it takes the longer way."""
        states, row = delivery.states, offset - delivery.begin
        if states[row] != BEGUN or delivery.loss:
            return False
        states[row] = ACKED
        delivery.left -= 1
        self.unsent += 1
        self._touched[delivery.id] = delivery
        return True

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        for delivery in list(self.deliveries.values()):
            if (delivery.topic, delivery.partition) == (topic, partition):
                self.ack_range(delivery, delivery.begin, offset + 1)

    def ack_range(self, delivery: HeldDelivery, begin: int, end: int) -> None:
        """What is left of these is done. What was acked or nacked before stays so."""
        before = delivery.states.count(ACKED)
        with self.lock:
            delivery.transition(begin, end, ON_ACK)
            delivery.end_work(begin, end)
        acked = delivery.states.count(ACKED) - before
        delivery.left -= acked
        if delivery.loss:
            self._found_late(delivery.take(ACKED), delivery.loss, delivery)
        elif acked:
            self.unsent += acked
            self._touched[delivery.id] = delivery
        self._found_late(self._give_up(delivery), RECALLED_MEANWHILE, delivery)

    def take_acks(self) -> Acks:
        """What the broker is told next."""
        acks = Acks([], [], [])
        touched, self._touched = self._touched, {}
        self._end_unsent()
        for delivery in touched.values():
            if delivery.states.count(ACKED) == delivery.count:
                acks.deliveries.append(delivery.id)
                delivery.transition(delivery.begin, delivery.end, ON_SENT)
            else:
                acked = delivery.take_acked()
                if isinstance(acked, Picked):
                    acks.picked.append(acked)
                else:
                    acks.parts.extend(acked)
            self._forget_if_settled(delivery)
        return acks

    # --- Giving back ---

    def nack(self, item: LeasedItem) -> list[DeliveryPart]:
        """What is left of it failed: the parts to be told."""
        delivery = item.delivery
        with self.lock:
            for begin, end in item.ranges():
                delivery.transition(begin, end, ON_NACK)
                delivery.end_work(begin, end)
            parts = delivery.take(NACKED)
        self._give_up(delivery)
        if delivery.loss:
            return []
        nacked = sum(part.end - part.begin for part in parts)
        delivery.left -= nacked
        self._nacked += nacked
        self._forget_if_settled(delivery)
        return parts

    def recall(self, parts: Iterable[DeliveryPart]) -> None:
        """The broker wants these back. Those that wait are given up at once, others as their work ends."""
        for part in parts:
            if delivery := self.deliveries.get(part.delivery):
                with self.lock:
                    delivery.transition(part.begin, part.end, ON_RECALL)
                self._drop(delivery)

    def drop_later(self, failed: Message) -> None:
        """Later messages of its key that wait are given up at once: the broker is about to recall them.

        Until it has, a reader that goes on would begin them out of order.
        """
        place = (failed.topic, failed.partition)
        for delivery in list(self.deliveries.values()):
            if failed.key is None or (delivery.topic, delivery.partition) != place:
                continue
            if delivery.end <= failed.offset + 1 or WAITING not in delivery.states:
                continue
            batch = delivery.batch
            keys = iter(batch.columns.keys.each(len(batch)))
            with self.lock:
                for run in batch.runs():
                    for offset in range(run.base_offset, run.base_offset + run.count):
                        if next(keys) == failed.key and offset > failed.offset:
                            delivery.transition(offset, offset + 1, ON_DROP)
            self._drop(delivery)

    def _drop(self, delivery: HeldDelivery) -> None:
        parts = delivery.take(DROPPED)
        dropped = sum(part.end - part.begin for part in parts)
        delivery.left -= dropped
        self._recalled += dropped
        self.given_up += parts
        self._forget_if_settled(delivery)

    def _give_up(self, delivery: HeldDelivery) -> list[DeliveryPart]:
        """Work on what had been recalled has ended."""
        parts = delivery.take(GIVEN_UP)
        if parts:
            given_up = sum(part.end - part.begin for part in parts)
            delivery.left -= given_up
            self._recalled += given_up
            self.given_up += parts
            self._forget_if_settled(delivery)
        return parts

    def take_given_up(self) -> list[DeliveryPart]:
        parts, self.given_up = self.given_up, []
        return parts

    # --- Losing ---

    def lapse(self, delivery: HeldDelivery) -> None:
        """Its lease has ended: what waits goes to somebody else."""
        delivery.is_lapsed = True
        with self.lock:
            delivery.left -= delivery.states.count(WAITING)
            delivery.states[:] = delivery.states.replace(bytes((WAITING,)), bytes((GONE,)))
        self._forget_if_settled(delivery)

    def lose(self, reason: str) -> None:
        """Nothing is leased any more. Acks of which the broker was not told are late, as all that follow."""
        for delivery in (self.deliveries | self._touched).values():
            self._found_late(delivery.take(ACKED), reason, delivery)
            delivery.loss = reason
            with self.lock:
                delivery.transition(delivery.begin, delivery.end, ON_LOSS)
        self.deliveries.clear()
        self._touched.clear()
        self._remembered.clear()
        self.given_up.clear()
        self._end_unsent()

    def _end_unsent(self) -> None:
        self._acked += self.unsent
        self.unsent = 0

    def reported_late(self, parts: Iterable[DeliveryPart]) -> None:
        """The broker says that these came too late."""
        for part in parts:
            self._found_late([part], LEASE_OVER, self.deliveries.get(part.delivery))

    def _found_late(
        self, parts: Iterable[DeliveryPart], reason: str, delivery: HeldDelivery | None
    ) -> None:
        for part in parts:
            place = self._remembered.get(part.delivery) if delivery is None else _placed(delivery)
            if place is None:
                late = LateWork("", 0, part.begin, part.end, part.delivery, reason)
            elif part.begin < part.end:
                late = LateWork(
                    place.topic, place.partition, part.begin, part.end, part.delivery, reason
                )
            else:  # the broker does not know the delivery any more, only that it is late
                late = LateWork(*place, part.delivery, reason)
            self._late += late.count
            self.late.append(late)

    def take_late(self) -> list[LateWork]:
        late, self.late = self.late, []
        return late

    def _forget_if_settled(self, delivery: HeldDelivery) -> None:
        if delivery.left or ACKED in delivery.states:
            return
        if self.deliveries.pop(delivery.id, None) is not None:
            self._remembered[delivery.id] = _placed(delivery)
            if len(self._remembered) > _REMEMBERED_MAX:
                for oldest in list(islice(self._remembered, _REMEMBERED_MAX // 4)):
                    del self._remembered[oldest]


def _placed(delivery: HeldDelivery) -> _Place:
    return _Place(delivery.topic, delivery.partition, delivery.begin, delivery.end)
