"""The messages that one node has leased to a consumer, and those to be reported: acked, given up, late. Pure.

Everything runs in the loop's thread, except that a blocking client begins messages in its own thread. Therefore
beginning a message there takes the lock, and so does every step that removes waiting messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
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
    ON_GIVE_BACK,
    ON_LOSS,
    ON_NACK,
    ON_RECALL,
    ON_SENT,
    ON_STOP,
    SENT,
    WAITING,
    HeldDelivery,
    LeasedRanges,
    Range,
    SentNack,
)
from runnel.client.consumer.work import LateWork
from runnel.formats.message import Message
from runnel.formats.work_heads import DeliveryPart, Picked

# Settled deliveries whose topic and offsets are remembered, for reports of late acks.
_REMEMBERED_MAX: Final = 4096
EARLY_ACKS_MIN: Final = 1000  # fewer acks are sent at the end of the wake-up
_SCATTERED_MIN: Final = 512  # acks per delivery, on average

RECALLED_MEANWHILE: Final = "it had been recalled, to come again behind a message before it"
LEASE_OVER: Final = "its lease had ended, as the broker says"
CONNECTION_LOST: Final = "the connection was lost, and the lease with it"
CONSUMER_CLOSED: Final = "the consumer was closed before"
CONSUMER_ENDED: Final = "the broker had ended the consumer"


class ConsumerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a consumer's messages since it was created; `late` counts acks that came too late."""

    received: int
    acked: int
    nacked: int
    recalled: int
    late: int
    leased: int  # now: received, and neither acked nor nacked

    def plus(self, other: ConsumerStatistics) -> ConsumerStatistics:
        """The sums of both."""
        return ConsumerStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class Acks(NamedTuple):
    """Deliveries that were acked completely, and acked parts of others."""

    deliveries: list[int]
    parts: list[DeliveryPart]
    picked: list[Picked]


class SettledDelivery(NamedTuple):
    """A delivery of the offsets from `begin` to `end` (exclusive), after its last message was settled."""

    topic: str
    partition: int
    begin: int
    end: int
    acked: Sequence[Range] | None = None  # None: all its messages were
    nacks: Sequence[SentNack] = ()
    order: int = 0


class BegunWork:
    """Begins messages: what the ledgers of all parts of a consumer share."""

    __slots__ = ("lock", "taken_ns")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taken_ns = 0  # when a message was last begun

    def begin(self, delivery: HeldDelivery, offset: int, now_ns: int) -> bool:
        """Mark a message as handed to the user's code. False: it does not wait any more."""
        row = offset - delivery.begin
        if delivery.states[row] != WAITING:
            return False
        delivery.states[row] = BEGUN
        delivery.begun_ns[offset] = self.taken_ns = now_ns
        return True

    def begin_all(self, delivery: HeldDelivery, now_ns: int) -> list[Range]:
        """Mark all waiting messages of a delivery as handed out. Returns their offsets."""
        with self.lock:
            begun = delivery.ranges_in(WAITING)
            delivery.transition(delivery.begin, delivery.end, ON_BEGIN)
            if begun:
                delivery.begun_together_ns = self.taken_ns = now_ns
        return begun


class Ledger:
    """All deliveries that one node has leased to a consumer, and the counts of their messages."""

    def __init__(self, begun: BegunWork) -> None:
        self.lock: Final = begun.lock
        self.deliveries: Final[dict[int, HeldDelivery]] = {}
        self.unsent = 0  # acked messages whose acks are not sent
        self.given_up: list[DeliveryPart] = []  # to be sent as recalled
        self.late: list[LateWork] = []  # to be reported to the user
        self._received = self._nacked = self._recalled = self._late = 0
        self._acked = 0  # without `unsent`
        self._touched: dict[int, HeldDelivery] = {}  # with unsent acks
        self._settled: dict[int, SettledDelivery] = {}

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
        """Whether acks should be sent before the end of the wake-up.

        Acks scattered over many deliveries cost less if more of them are sent together.
        """
        return self.unsent >= EARLY_ACKS_MIN and self.unsent >= _SCATTERED_MIN * len(self._touched)

    # --- Arriving ---

    def add(self, delivery: HeldDelivery) -> None:
        self.deliveries[delivery.id] = delivery
        self._received += delivery.count

    # --- Acking ---

    def ack_begun(self, delivery: HeldDelivery, offset: int) -> bool:
        """The fast path: ack one begun message. False: `ack_range` has to do it."""
        states, row = delivery.states, offset - delivery.begin
        if states[row] != BEGUN or delivery.loss:
            return False
        states[row] = ACKED
        delivery.left -= 1
        self.unsent += 1
        self._touched[delivery.id] = delivery
        return True

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        """Ack all leased messages of a partition up to and including this offset."""
        for delivery in list(self.deliveries.values()):
            if (delivery.topic, delivery.partition) == (topic, partition):
                self.ack_range(delivery, delivery.begin, offset + 1)

    def ack_range(self, delivery: HeldDelivery, begin: int, end: int) -> None:
        """Ack the unsettled messages of a range. Messages acked or nacked before stay so."""
        before = delivery.states.count(ACKED)
        with self.lock:
            delivery.transition(begin, end, ON_ACK)
            delivery.end_work(begin, end)
        acked = delivery.states.count(ACKED) - before
        delivery.left -= acked
        if delivery.loss:
            self._add_late(delivery.take(ACKED), delivery.loss, delivery)
        elif acked:
            self.unsent += acked
            self._touched[delivery.id] = delivery
        self._add_late(self._give_up(delivery), RECALLED_MEANWHILE, delivery)

    def take_acks(self) -> Acks:
        """Take all unsent acks, to be sent."""
        acks = Acks([], [], [])
        touched, self._touched = self._touched, {}
        self._count_unsent_as_acked()
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

    def nack(
        self, item: LeasedRanges, delay_ms: int | None = None, reason: str = ""
    ) -> list[DeliveryPart]:
        """Nack the unsettled messages of an item. Returns the parts to be sent."""
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
        if nacked:
            sent = [SentNack(part.begin, part.end, delay_ms, reason) for part in parts]
            delivery.nacks = [*delivery.nacks, *sent]
            delivery.is_mixed = True
        delivery.left -= nacked
        self._nacked += nacked
        self._forget_if_settled(delivery)
        return parts

    def recall(self, parts: Iterable[DeliveryPart]) -> None:
        """Give these back to the broker: waiting messages at once, begun ones when their processing ends."""
        for part in parts:
            if delivery := self.deliveries.get(part.delivery):
                with self.lock:
                    delivery.transition(part.begin, part.end, ON_RECALL)
                self._drop(delivery)

    def drop_later(self, failed: Message) -> None:
        """Give up waiting messages of the same key behind a failed one: the broker is about to recall them.

        Until the recall arrives, a reader would begin them out of order.
        """
        partition = (failed.topic, failed.partition)
        for delivery in list(self.deliveries.values()):
            if failed.key is None or (delivery.topic, delivery.partition) != partition:
                continue
            if delivery.end <= failed.offset + 1 or WAITING not in delivery.states:
                continue
            with self.lock:
                for offset, key in _keys_of(delivery):
                    if key == failed.key and offset > failed.offset:
                        delivery.transition(offset, offset + 1, ON_DROP)
            self._drop(delivery)

    def recall_later(self, failed: HeldDelivery, begin: int, end: int) -> None:
        """Recall what is leased of the keys of failed messages, behind them, as the broker is about to."""
        first: dict[bytes, int] = {}
        for offset, key in _keys_of(failed):
            if key is not None and begin <= offset < end:
                first.setdefault(key, offset)
        partition = (failed.topic, failed.partition)
        for delivery in list(self.deliveries.values()):
            if (delivery.topic, delivery.partition) != partition or delivery.end <= begin:
                continue
            with self.lock:
                for offset, key in _keys_of(delivery):
                    if key is not None and offset > first.get(key, offset):
                        delivery.transition(offset, offset + 1, ON_RECALL)
            self._drop(delivery)

    def stop_recalled(self, delivery: HeldDelivery, begin: int, end: int) -> None:
        """Work on the recalled messages of a range has ended."""
        with self.lock:
            delivery.transition(begin, end, ON_STOP)
            delivery.end_work(begin, end)
        self._give_up(delivery)

    def give_back(self, delivery: HeldDelivery, begin: int, end: int) -> list[DeliveryPart]:
        """Return messages of a range on which no work has begun. Returns the parts to be sent."""
        with self.lock:
            delivery.transition(begin, end, ON_GIVE_BACK)
            delivery.end_work(begin, end)
        parts = delivery.take(DROPPED)
        delivery.is_mixed |= bool(parts)
        delivery.left -= sum(part.end - part.begin for part in parts)
        self._forget_if_settled(delivery)
        return parts

    def _drop(self, delivery: HeldDelivery) -> None:
        parts = delivery.take(DROPPED)
        dropped = sum(part.end - part.begin for part in parts)
        delivery.is_mixed |= bool(parts)
        delivery.left -= dropped
        self._recalled += dropped
        self.given_up += parts
        self._forget_if_settled(delivery)

    def _give_up(self, delivery: HeldDelivery) -> list[DeliveryPart]:
        """Give up recalled messages whose processing has ended."""
        parts = delivery.take(GIVEN_UP)
        if parts:
            given_up = sum(part.end - part.begin for part in parts)
            delivery.is_mixed = True
            delivery.left -= given_up
            self._recalled += given_up
            self.given_up += parts
            self._forget_if_settled(delivery)
        return parts

    def take_given_up(self) -> list[DeliveryPart]:
        parts, self.given_up = self.given_up, []
        return parts

    # --- Moving to another node, with the shard ---

    def part_with(self, number: int) -> HeldDelivery | None:
        """Remove a delivery whose shard moves, with its acks that are not sent."""
        delivery = self.deliveries.pop(number, None)
        if delivery is not None and self._touched.pop(number, None) is not None:
            self.unsent -= delivery.states.count(ACKED)
        return delivery

    def settled(self, number: int) -> SettledDelivery | None:
        """A delivery of which every message is settled, unless it is forgotten."""
        return self._settled.get(number)

    def remember(self, number: int, settled: SettledDelivery) -> None:
        """Remember a delivery that was settled at its former owner under this id: its shard may move again."""
        self._settled[number] = settled

    def take_over(self, delivery: HeldDelivery, number: int, resent: int = 0) -> None:
        """Add a delivery of another ledger under this id, with its acks that are not sent.

        Some of these were sent once, and are counted.
        """
        self._acked -= resent
        delivery.id = number
        self.deliveries[number] = delivery
        if unsent := delivery.states.count(ACKED):
            self.unsent += unsent
            self._touched[number] = delivery
        else:
            self._forget_if_settled(delivery)

    # --- Losing ---

    def lapse(self, delivery: HeldDelivery) -> None:
        """Remove the waiting messages of a delivery whose lease has ended: another consumer gets them."""
        delivery.is_lapsed = True
        delivery.is_mixed = True
        with self.lock:
            delivery.left -= delivery.states.count(WAITING)
            delivery.states[:] = delivery.states.replace(bytes((WAITING,)), bytes((GONE,)))
        self._forget_if_settled(delivery)

    def lose(self, reason: str) -> None:
        """End all leases. Unsent acks are late, and so are all later acks of these deliveries."""
        for delivery in (self.deliveries | self._touched).values():
            self._add_late(delivery.take(ACKED), reason, delivery)
            delivery.loss = reason
            with self.lock:
                delivery.transition(delivery.begin, delivery.end, ON_LOSS)
        self.deliveries.clear()
        self._touched.clear()
        self._settled.clear()
        self.given_up.clear()
        self._count_unsent_as_acked()

    def expire(self, delivery: HeldDelivery) -> None:
        """Forget a delivery whose lease is over: what is acked of it from now on is late."""
        if self.part_with(delivery.id) is not None:
            self.lose_one(delivery, LEASE_OVER)

    def lose_one(self, delivery: HeldDelivery, reason: str) -> None:
        """End one lease, of a delivery that this ledger has parted with. All acks that were not sent are late."""
        self._add_late(delivery.take(ACKED), reason, delivery)
        delivery.loss = reason
        with self.lock:
            delivery.transition(delivery.begin, delivery.end, ON_LOSS)

    def _count_unsent_as_acked(self) -> None:
        self._acked += self.unsent
        self.unsent = 0

    def reported_late(self, parts: Iterable[DeliveryPart]) -> None:
        """Record acks that came too late, as reported by the broker."""
        for part in parts:
            self._add_late([part], LEASE_OVER, self.deliveries.get(part.delivery))

    def reported_late_of(
        self, parts: Iterable[DeliveryPart], delivery: HeldDelivery | SettledDelivery | None
    ) -> None:
        """Record acks that came too late for a delivery that this ledger does not know under that id."""
        self._add_late(parts, LEASE_OVER, delivery)

    def _add_late(
        self,
        parts: Iterable[DeliveryPart],
        reason: str,
        delivery: HeldDelivery | SettledDelivery | None,
    ) -> None:
        for part in parts:
            place = self._settled.get(part.delivery) if delivery is None else delivery
            if place is None:
                late = LateWork("", 0, part.begin, part.end, part.delivery, reason)
            else:
                # A part without offsets: the broker does not know the delivery any more.
                named = part if part.begin < part.end else place
                late = LateWork(
                    place.topic,
                    place.partition,
                    named.begin,
                    named.end,
                    part.delivery,
                    reason,
                    place.order,
                )
            self._late += late.count
            self.late.append(late)

    def take_late(self) -> list[LateWork]:
        late, self.late = self.late, []
        return late

    def _forget_if_settled(self, delivery: HeldDelivery) -> None:
        if delivery.left or ACKED in delivery.states:
            return
        if self.deliveries.pop(delivery.id, None) is not None:
            self._settled[delivery.id] = _settled_of(delivery)
            if len(self._settled) > _REMEMBERED_MAX:
                for oldest in list(islice(self._settled, _REMEMBERED_MAX // 4)):
                    del self._settled[oldest]


def _keys_of(delivery: HeldDelivery) -> Iterator[tuple[int, bytes | None]]:
    """The offset and the key of each message."""
    batch = delivery.batch
    keys = iter(batch.columns.keys.each(len(batch)))
    for run in batch.runs():
        for offset in range(run.base_offset, run.base_offset + run.count):
            yield offset, next(keys)


def _settled_of(delivery: HeldDelivery) -> SettledDelivery:
    acked = delivery.ranges_in(SENT) if delivery.is_mixed else None
    place = (delivery.topic, delivery.partition, delivery.begin, delivery.end)
    return SettledDelivery(*place, acked, delivery.nacks, delivery.order)
