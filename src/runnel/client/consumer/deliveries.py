"""A delivery as its consumer holds it: which of its messages wait, are being processed, or are done. Pure.

The state of each message is one byte, indexed by its offset, so that one step changes the states of many messages:

    WAITING ── handed out ──▶ BEGUN ── acked ──▶ ACKED ── sent ──▶ SENT
       │                        ├───── nacked ─▶ NACKED ─ sent ──▶ GONE
       │ recalled               │ recalled
       ▼                        ▼
    DROPPED ─ sent ─▶ GONE   RECALLED ─ acked or nacked ─▶ GIVEN_UP ─ sent ─▶ GONE

An ack that was sent leaves SENT, which is as good as GONE, except that the shard may be moving to another node: then
the new owner says which acks have not come to the former one. Waiting messages of a moving shard are PARKED.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from runnel.errors import MalformedError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import Attempt, DeliveryPart, Lease, Picked

Range: TypeAlias = tuple[int, int]  # offsets, the second exclusive

GONE: Final = 0  # or never in the delivery: acknowledged before, by any consumer
WAITING: Final = 1
BEGUN: Final = 2
RECALLED: Final = 3
ACKED: Final = 4
NACKED: Final = 5
DROPPED: Final = 6
GIVEN_UP: Final = 7
SENT: Final = 8
PARKED: Final = 9

# A delivery comes from one read of the broker; a longer span is malformed.
_SPAN_MAX: Final = 2**24
# Fewer scattered acks are sent as ranges, which then take no more room than bits.
_PICKED_MIN: Final = 8
_NO_ATTEMPTS: Final[Mapping[int, Attempt]] = {}
_RANGES: Final = {
    state: re.compile(re.escape(bytes((state,))) + b"+")
    for state in (WAITING, BEGUN, RECALLED, ACKED, NACKED, DROPPED, GIVEN_UP, SENT)
}


def _transitions(changes: Mapping[int, int]) -> bytes:
    """A table for `translate`; all other states stay."""
    return bytes(changes.get(state, state) for state in range(256))


ON_ACK: Final = _transitions({WAITING: ACKED, BEGUN: ACKED, RECALLED: GIVEN_UP, PARKED: ACKED})
ON_NACK: Final = _transitions({WAITING: NACKED, BEGUN: NACKED, RECALLED: GIVEN_UP, PARKED: NACKED})
ON_RECALL: Final = _transitions({WAITING: DROPPED, BEGUN: RECALLED})
ON_BEGIN: Final = _transitions({WAITING: BEGUN})
ON_DROP: Final = _transitions({WAITING: DROPPED, PARKED: DROPPED})
ON_STOP: Final = _transitions({RECALLED: GIVEN_UP})
ON_GIVE_BACK: Final = _transitions({WAITING: DROPPED, BEGUN: DROPPED})
ON_SENT: Final = _transitions({ACKED: SENT})
ON_PARK: Final = _transitions({WAITING: PARKED})
_AFTER_ACK: Final = bytes((SENT,))
_AFTER_OTHERS: Final = bytes((GONE,))
_DIGITS: Final = bytes(ord("1") if state == ACKED else ord("0") for state in range(256))
# Without the connection acks cannot be sent: begun messages stay, so that their acks are reported as late.
ON_LOSS: Final = _transitions({WAITING: GONE, PARKED: GONE, RECALLED: BEGUN})


class LeasedRanges(Protocol):
    """Some messages of one delivery."""

    @property
    def delivery(self) -> HeldDelivery: ...

    def ranges(self) -> Sequence[Range]: ...


class LeasedItem(LeasedRanges, Protocol):
    """One message or a batch of one delivery, as users give it to `ack`, `nack` and `extend`."""

    def first_of_keys(self) -> Iterable[Message]: ...

    def ack_in(self, ledger: AckRecorder) -> None: ...


class AckRecorder(Protocol):
    """Records acks; implemented by `Ledger`."""

    def ack_begun(self, delivery: HeldDelivery, offset: int) -> bool:
        """Record the ack of a begun message. False: it is not begun, and nothing is recorded."""

    def ack_range(self, delivery: HeldDelivery, begin: int, end: int) -> None: ...


class LeaseHolder(Protocol):
    """The consumer, as its messages see it."""

    @property
    def thread_id(self) -> int:
        """The thread of its loop. Other threads call `check_loop` before they create a coroutine."""

    def check_loop(self) -> None: ...

    async def ack(self, *items: LeasedItem, stored: bool = False) -> None: ...

    async def nack(
        self, *items: LeasedItem, delay_s: float | None = None, reason: str = ""
    ) -> None: ...

    async def extend(self, item: LeasedItem, seconds: float) -> None: ...


class SentNack(NamedTuple):
    """A nack that was sent. It has to be sent again if the shard has moved before it came."""

    begin: int
    end: int
    delay_ms: int | None
    reason: str


def is_concerned(item: LeasedItem, part: DeliveryPart) -> bool:
    """Whether messages of an item are in a part. A part without offsets is a whole delivery."""
    return part.delivery == item.delivery.id and (
        part.begin >= part.end
        or any(begin < part.end and part.begin < end for begin, end in item.ranges())
    )


class HeldDelivery:
    """A range of one partition, leased to one consumer."""

    __slots__ = (
        "arrived_ns",
        "arrived_time_ns",
        "attempts",
        "batch",
        "begin",
        "begun_ns",
        "begun_together_ns",
        "count",
        "deadline_ns",
        "end",
        "holder",
        "id",
        "is_lapsed",
        "is_mixed",
        "left",
        "loss",
        "nacks",
        "order",
        "part",
        "partition",
        "states",
        "topic",
    )

    def __init__(
        self,
        lease: Lease,
        batch: Batch,
        holder: LeaseHolder,
        part: Any,
        *,
        order: int,
        now_ns: int,
        time_ns: int,
        lease_ns: int,
    ) -> None:
        # Another node has another id for it: both change when its shard moves.
        self.id = lease.delivery
        self.part: Any = part  # a `LeasePart`, which knows ledgers, which know deliveries
        self.order: Final = order  # in which deliveries arrived, over all nodes
        self.topic: Final = lease.topic
        self.partition: Final = lease.partition
        self.begin: Final = lease.begin
        self.end: Final = lease.end
        self.attempts: Final = (
            {attempt.offset: attempt for attempt in lease.attempts}
            if lease.attempts
            else _NO_ATTEMPTS
        )
        self.batch: Final = batch
        self.holder: Final = holder
        self.count: Final = len(batch)
        self.arrived_ns: Final = now_ns
        self.arrived_time_ns: Final = time_ns  # wall clock
        self.deadline_ns = now_ns + lease_ns  # the lease may end a little earlier at the broker
        self.is_lapsed = False  # the lease has ended, by this client's clock
        self.loss = ""  # why acks cannot be sent any more: the connection or the consumer is gone
        self.left = self.count  # neither acked nor nacked nor dropped
        self.is_mixed = False  # some messages ended otherwise than by an ack
        self.nacks: Sequence[SentNack] = ()
        # By offset, in the order in which messages were begun.
        self.begun_ns: Final[dict[int, int]] = {}
        self.begun_together_ns = 0  # when all waiting messages were begun as a batch; 0: never
        self.states: Final = self._initial_states()

    def __repr__(self) -> str:
        return (
            f"<Delivery {self.id} of {self.topic}[{self.partition}]@{self.begin}…{self.end - 1}, "
            f"{self.left} of {self.count} left>"
        )

    def _initial_states(self) -> bytearray:
        if not 0 <= self.end - self.begin <= _SPAN_MAX:
            raise MalformedError("work", f"a delivery from offset {self.begin} to {self.end}")
        states = bytearray(self.end - self.begin)
        head = self.batch.envelope
        if head.run_count > 1 and head.is_one_partition:
            rows = head.offsets() - self.begin
            partition = int.from_bytes(head.partitions, "little")
            is_ours = (head.topics[0], partition) == (self.topic, self.partition)
            if not is_ours or rows.min() < 0 or rows.max() >= len(states):
                raise MalformedError("work", f"{self.batch!r:.200} in {self!r}")
            np.frombuffer(states, np.uint8)[rows] = WAITING
            return states
        for run in self.batch.runs():
            first = run.base_offset - self.begin
            if (run.topic, run.partition) != (self.topic, self.partition) or not (
                0 <= first <= len(states) - run.count
            ):
                raise MalformedError("work", f"{run!r:.200} in {self!r}")
            states[first : first + run.count] = bytes((WAITING,)) * run.count
        return states

    def holder_on_loop(self) -> LeaseHolder:
        """The consumer, for a call on its loop. Raises ClientFault in any other thread than the loop's."""
        holder = self.holder
        if get_ident() != holder.thread_id:
            holder.check_loop()
        return holder

    def state(self, offset: int) -> int:
        return self.states[offset - self.begin]

    def transition(self, begin: int, end: int, table: bytes) -> None:
        """Change the states of these offsets; offsets outside this delivery are ignored."""
        first = max(begin, self.begin) - self.begin
        last = min(end, self.end) - self.begin
        if first < last:
            self.states[first:last] = self.states[first:last].translate(table)

    def take(self, state: int) -> list[DeliveryPart]:
        """Mark all messages in a state as gone, or their acks as sent, and return their ranges, to be sent."""
        if state not in self.states:  # the usual case, and faster than matching
            return []
        found = [match.span() for match in _RANGES[state].finditer(self.states)]
        after = _AFTER_ACK if state == ACKED else _AFTER_OTHERS
        for first, last in found:
            self.states[first:last] = after * (last - first)
        return [
            DeliveryPart(self.id, self.begin + first, self.begin + last) for first, last in found
        ]

    def take_acked(self) -> list[DeliveryPart] | Picked:
        """Mark all acks as sent, and return their ranges; if they are scattered, as bits."""
        states = self.states
        first, last = states.find(ACKED), states.rfind(ACKED) + 1
        acked = states.count(ACKED)
        if last - first == acked:  # none, or one range
            states[first:last] = _AFTER_ACK * acked
            return [DeliveryPart(self.id, self.begin + first, self.begin + last)] if acked else []
        if acked < _PICKED_MIN:
            return self.take(ACKED)
        mask = int(states[first:last].translate(_DIGITS)[::-1], 2)
        states[first:last] = states[first:last].translate(ON_SENT)
        return Picked(self.id, self.begin + first, mask.to_bytes((last - first + 7) // 8, "little"))

    def ranges_in(self, state: int) -> list[Range]:
        """The ranges of offsets whose messages are in a state."""
        return [
            (self.begin + match.start(), self.begin + match.end())
            for match in _RANGES[state].finditer(self.states)
        ]

    def oldest_begun_ns(self, now_ns: int) -> int:
        """When the oldest message in processing was begun; now, if there is none."""
        begun_ns, states = self.begun_ns, self.states
        while begun_ns:
            offset, since_ns = next(iter(begun_ns.items()))
            if states[offset - self.begin] in (BEGUN, RECALLED):
                return since_ns
            del begun_ns[offset]  # acked: `ack_begun` does not remove it
        # After a batch no message waits any more, so messages begun one by one were begun before it.
        if self.begun_together_ns and (BEGUN in states or RECALLED in states):
            return self.begun_together_ns
        return now_ns

    def end_work(self, begin: int, end: int) -> None:
        """Forget when these were begun: they are not in processing any more."""
        if begin <= self.begin and end >= self.end:
            self.begun_ns.clear()
        elif self.begun_ns:
            for offset in range(max(begin, self.begin), min(end, self.end)):
                self.begun_ns.pop(offset, None)
