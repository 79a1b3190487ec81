"""Deliveries whose shard moves from one node to another: they stay with the consumer, under another id.

The former owner says `moving`, the new one `held`, over two connections, so either may come first. In between, waiting
messages are parked, and acks and nacks are kept. `held` says which messages the former owner still had as leased. Of
these, the consumer knows:

    waiting, or begun       they go on, leased by the new owner
    acked or nacked         the ack or nack has not come to the former owner: it is sent again, to the new one
    given up, or not known  they go back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from runnel.client.connection import BrokerConnection, Handle, Timers
from runnel.client.consumer.ack_sender import AckSender
from runnel.client.consumer.deliveries import (
    ACKED,
    BEGUN,
    GONE,
    NACKED,
    ON_PARK,
    PARKED,
    RECALLED,
    SENT,
    WAITING,
    HeldDelivery,
    Range,
    SentNack,
)
from runnel.client.consumer.ledger import BegunWork, Ledger, SettledDelivery
from runnel.client.consumer.part import ConsumerPart, PartOwner
from runnel.formats import wire
from runnel.formats.work_heads import DeliveryPart, HeldLease
from runnel.topics.names import TopicPartition

NOT_TAKEN_OVER: Final = "its shard moved to another node, which has not leased it to this consumer"
# How often deliveries are looked at that no new owner has leased yet.
_CHECK_INTERVAL_S: Final = 0.5
# How long the former owner's word is waited for, which comes over another connection.
_OFFERED_NS_MAX: Final = 5_000_000_000
_DEPARTED_MAX: Final = 10_000
# However long `extend` asks for: a new owner says more within seconds, or another consumer gets the message.
_PARKED_NS_MAX: Final = 30_000_000_000


class _Handle(NamedTuple):
    """A delivery as its former owner and the new one both name it."""

    topic: str
    partition: int
    epoch: int
    former: int


class _Offered(NamedTuple):
    """What a new owner has leased, while the former one has not said yet that it moves."""

    part: ConsumerPart
    lease: HeldLease
    since_ns: int


class _NoLink:
    """There is no connection to a node that is not known yet."""

    connection: BrokerConnection | None = None

    def tell(self, head: wire.Head) -> None:
        """Drop it."""


class ParkedPart:
    """Who has leased deliveries while their shard moves: nobody yet. Acks and nacks stay with them."""

    def __init__(self, begun: BegunWork, number: int) -> None:
        self.link = _NoLink()
        self.ledger = Ledger(begun)
        self.ack_sender = AckSender(self.ledger, lambda: self.link, number, lambda _: None)  # type: ignore[arg-type,return-value]

    @property
    def processing_ns_max(self) -> int:
        return _PARKED_NS_MAX

    def hold_back(self, partition: TopicPartition) -> None:
        """Nothing comes of a parked partition."""


class _Departed:
    """A delivery that a former owner has named as moving, and the acks that it has called late since."""

    __slots__ = ("delivery", "late", "settled", "since_ns")

    def __init__(
        self, delivery: HeldDelivery | None, settled: SettledDelivery | None, since_ns: int
    ) -> None:
        self.since_ns = since_ns
        self.delivery = delivery
        self.settled = settled
        self.late: list[DeliveryPart] = []

    @property
    def has_acks(self) -> bool:
        """Whether any of its messages was acked: the former owner may have dropped the shard before it got the ack."""
        if self.delivery is not None and not self.delivery.loss:
            return SENT in self.delivery.states or ACKED in self.delivery.states
        settled = self.settled
        return settled is not None and (settled.acked is None or bool(settled.acked))


class Handover:
    """All deliveries of a consumer that are between two nodes."""

    def __init__(self, owner: PartOwner, timers: Timers, number: int) -> None:
        self.parked: Final = ParkedPart(owner.begun, number)
        self._owner = owner
        self._timers = timers
        self._departed: dict[_Handle, _Departed] = {}
        # By part and its former id: for acks that come too late there.
        self._departed_of: dict[tuple[ConsumerPart, int], _Departed] = {}
        self._offered: dict[_Handle, _Offered] = {}
        self._timer: Handle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is between two nodes."""
        return not self._departed and not self._offered

    @property
    def has_acks(self) -> bool:
        """Whether messages were acked whose new owner is not known yet, or whose former owner may lack the acks."""
        return bool(self.parked.ledger.unsent) or any(
            departed.has_acks for departed in self._departed.values()
        )

    # --- Events ---

    def moving(self, part: ConsumerPart, epoch: int, deliveries: Sequence[int]) -> None:
        """The owner of these deliveries gives up their shard, as planned."""
        for number in deliveries:
            delivery = part.ledger.part_with(number)
            settled = None if delivery is not None else part.ledger.settled(number)
            place = settled if delivery is None else delivery
            if place is None:
                continue  # forgotten, or lost with the connection: the new owner gets it back
            departed = _Departed(delivery, settled, self._timers.monotonic_ns())
            if len(self._departed_of) >= _DEPARTED_MAX:
                self._departed_of.clear()
            self._departed_of[part, number] = departed
            handle = _Handle(place.topic, place.partition, epoch, number)
            if delivery is not None:
                self._park(delivery)
            if (offered := self._offered.pop(handle, None)) is not None:
                self._take_over(departed, offered.part, offered.lease)
            else:
                self._departed[handle] = departed
                self._watch()

    def held(self, part: ConsumerPart, leases: Sequence[HeldLease]) -> None:
        """A new owner has leased these to the consumer."""
        for lease in leases:
            handle = _Handle(lease.topic, lease.partition, lease.epoch, lease.former)
            departed = self._departed.pop(handle, None)
            if departed is not None:
                self._take_over(departed, part, lease)
            else:
                self._offered[handle] = _Offered(part, lease, self._timers.monotonic_ns())
                self._watch()

    def lost(self, part: ConsumerPart) -> None:
        """The connection to a node is lost. What it was about to say is known by what others have said."""
        for handle, (taker, lease, _) in list(self._offered.items()):
            if taker is part:
                del self._offered[handle]
                continue
            delivery = part.ledger.deliveries.get(handle.former)
            place = part.ledger.settled(handle.former) if delivery is None else delivery
            if place is not None and (place.topic, place.partition) == handle[:2]:
                del self._offered[handle]
                if delivery is not None:
                    part.ledger.part_with(handle.former)
                    self._park(delivery)
                settled = None if isinstance(place, HeldDelivery) else place
                departed = _Departed(delivery, settled, self._timers.monotonic_ns())
                self._take_over(departed, taker, lease)
        for known in [known for known in self._departed_of if known[0] is part]:
            del self._departed_of[known]

    def arrived(self, delivery: HeldDelivery) -> None:
        """Messages of a parked delivery that arrive anew were not leased to this consumer in time."""
        if not self._departed:
            return
        for handle, departed in list(self._departed.items()):
            former = departed.delivery
            if (
                former is not None
                and (former.topic, former.partition) == (delivery.topic, delivery.partition)
                and former.begin < delivery.end
                and delivery.begin < former.end
            ):
                self._give_up(handle)

    def late(self, part: ConsumerPart, late: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]:
        """Of what a node has called late: what is to be reported. The rest is between two nodes."""
        if not self._departed_of:
            return late
        told = []
        for each in late:
            departed = self._departed_of.get((part, each.delivery))
            if departed is None:
                told.append(each)
            else:
                departed.late.append(each)
        return told

    def close(self, reason: str) -> None:
        """The consumer is closed: nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._departed.clear()
        self._offered.clear()
        self._owner.queue.drop(self.parked.ledger)
        self.parked.ledger.lose(reason)
        self._owner.report_late(self.parked.ledger)

    # --- Between two nodes ---

    def _park(self, delivery: HeldDelivery) -> None:
        with self.parked.ledger.lock:
            delivery.transition(delivery.begin, delivery.end, ON_PARK)
        delivery.part = self.parked
        self.parked.ledger.take_over(delivery, -delivery.order)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self._timers.call_later(_CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Give up deliveries whose lease is over, and those that the former owner says nothing of."""
        self._timer = None
        now_ns = self._timers.monotonic_ns()
        for handle, departed in list(self._departed.items()):
            delivery = departed.delivery
            until_ns = (
                departed.since_ns + _PARKED_NS_MAX if delivery is None else delivery.deadline_ns
            )
            if until_ns < now_ns:
                self._give_up(handle)
        for handle, offered in list(self._offered.items()):
            if offered.since_ns + _OFFERED_NS_MAX < now_ns:
                del self._offered[handle]
                self._settle(None, offered.part, offered.lease, _mask_of(offered.lease.bits))
        if not self.is_idle:
            self._watch()

    def _give_up(self, handle: _Handle) -> None:
        """No new owner has leased it to this consumer: another one gets it."""
        departed = self._departed.pop(handle)
        delivery = departed.delivery
        for known, each in list(self._departed_of.items()):
            if each is departed:
                del self._departed_of[known]
        ledger = self.parked.ledger
        if delivery is not None and ledger.part_with(delivery.id) is not None:
            ledger.lose_one(delivery, NOT_TAKEN_OVER)
        ledger.reported_late_of(departed.late, delivery or departed.settled)
        self._owner.report_late(ledger)
        self._owner.wake()

    # --- With the new owner ---

    def _take_over(self, departed: _Departed, part: ConsumerPart, lease: HeldLease) -> None:
        outstanding, recalled = _mask_of(lease.bits), _mask_of(lease.recalled)
        delivery, settled = departed.delivery, departed.settled
        ledger = self.parked.ledger
        ledger.take_given_up()  # what `held` names says it
        if delivery is not None and ledger.part_with(delivery.id) is None:
            settled = None if delivery.loss else ledger.settled(delivery.id)
            delivery = None
        if delivery is None:
            self._settle(settled, part, lease, outstanding)
            part.ack_sender.stop(_parts(lease, recalled))
        else:
            self._rehome(delivery, part, lease, outstanding, recalled)
        self._owner.wake()

    def _settle(
        self,
        settled: SettledDelivery | None,
        part: ConsumerPart,
        lease: HeldLease,
        outstanding: int,
    ) -> None:
        """The consumer had finished the delivery: its acks and nacks had not come to the former owner."""
        left = outstanding
        if settled is not None:
            part.ledger.remember(lease.delivery, settled)
            acked = outstanding
            if settled.acked is not None:
                acked = outstanding & _mask(lease.begin, settled.acked)
            nacked = 0
            for nack in settled.nacks:
                nacked |= self._nack_again(part, lease, nack, outstanding)
            acked &= ~nacked
            part.ack_sender.ack_parts(_parts(lease, acked))
            left &= ~(acked | nacked)
        part.ack_sender.give_back(_parts(lease, left))

    def _rehome(
        self,
        delivery: HeldDelivery,
        part: ConsumerPart,
        lease: HeldLease,
        outstanding: int,
        recalled: int,
    ) -> None:
        back = stopped = nacked = resent = 0
        for nack in delivery.nacks:
            nacked |= self._nack_again(part, lease, nack, outstanding)
        states = delivery.states
        with part.ledger.lock:
            for row, state in enumerate(states):
                bit = (
                    1 << (delivery.begin + row - lease.begin)
                    if delivery.begin + row >= lease.begin
                    else 0
                )
                if bit & outstanding:
                    if state == PARKED:
                        states[row] = WAITING
                    elif state == SENT:
                        states[row] = ACKED
                        resent += 1
                    elif state == RECALLED:
                        states[row] = BEGUN
                    elif state == GONE and not bit & nacked:
                        back |= bit
                elif bit & recalled:
                    if state == BEGUN:
                        states[row] = RECALLED
                    elif state != RECALLED:
                        states[row] = GONE
                        stopped |= bit
                elif state in (PARKED, RECALLED, NACKED):
                    states[row] = GONE
                elif state == ACKED:
                    states[row] = SENT
        delivery.left = states.count(WAITING) + states.count(BEGUN) + states.count(RECALLED)
        delivery.is_mixed = True  # of the former lease, only a part goes on
        delivery.part = part
        delivery.deadline_ns = self._timers.monotonic_ns() + part.renewer.lease_ns
        delivery.is_lapsed = False
        part.ledger.take_over(delivery, lease.delivery, resent)
        part.renewer.watch()
        part.ack_sender.give_back(_parts(lease, back))
        part.ack_sender.stop(_parts(lease, stopped))
        part.ack_sender.schedule()
        if WAITING in states:
            self._owner.queue.restore([delivery])

    def _nack_again(
        self, part: ConsumerPart, lease: HeldLease, nack: SentNack, outstanding: int
    ) -> int:
        mask = outstanding & _mask(lease.begin, [(nack.begin, nack.end)])
        if mask:
            part.ack_sender.nack(_parts(lease, mask), nack.delay_ms, nack.reason)
            part.hold_back((lease.topic, lease.partition))
        return mask


def _mask_of(content: bytes) -> int:
    return int.from_bytes(content, "little")


def _mask(base: int, ranges: Iterable[Range]) -> int:
    mask = 0
    for begin, end in ranges:
        first = max(begin - base, 0)
        if end - base > first:
            mask |= ((1 << end - base - first) - 1) << first
    return mask


def _parts(lease: HeldLease, mask: int) -> list[DeliveryPart]:
    return [DeliveryPart(lease.delivery, begin, end) for begin, end in _runs(lease.begin, mask)]


def _runs(base: int, mask: int) -> Iterator[Range]:
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        base += skipped
        width = (~mask & (mask + 1)).bit_length() - 1
        yield base, base + width
        mask >>= width
        base += width
