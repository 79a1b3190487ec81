"""A delivery as its consumer holds it: which of its messages wait, are worked on, or are done. Pure.

Each message has a state, a byte at the place of its offset, so that what concerns many of them is one step:

    WAITING ── handed out ──▶ BEGUN ── acked ──▶ ACKED ── told ──▶ GONE
       │                        ├───── nacked ─▶ NACKED ─ told ──▶ GONE
       │ recalled               │ recalled
       ▼                        ▼
    DROPPED ─ told ─▶ GONE   RECALLED ─ acked or nacked ─▶ GIVEN_UP ─ told ─▶ GONE
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from typing import Final, Protocol, TypeAlias

import numpy as np

from runnel.errors import MalformedError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import Attempt, DeliveryPart, Lease, Picked

Range: TypeAlias = tuple[int, int]  # offsets, the second not included

GONE: Final = 0  # or never there: acknowledged before, by whomever
WAITING: Final = 1
BEGUN: Final = 2
RECALLED: Final = 3
ACKED: Final = 4
NACKED: Final = 5
DROPPED: Final = 6
GIVEN_UP: Final = 7

# One delivery lies in what the broker read at once; a span beyond this is nonsense, not work.
_SPAN_MAX: Final = 2**24
# Fewer messages that lie scattered are told as ranges, which then take no more room than bits.
_PICKED_MIN: Final = 8
_NO_ATTEMPTS: Final[Mapping[int, Attempt]] = {}
_RANGES: Final = {
    state: re.compile(re.escape(bytes((state,))) + b"+")
    for state in (WAITING, ACKED, NACKED, DROPPED, GIVEN_UP)
}


def _transitions(changes: Mapping[int, int]) -> bytes:
    """A table for `translate`: states that are not named stay."""
    return bytes(changes.get(state, state) for state in range(256))


ON_ACK: Final = _transitions({WAITING: ACKED, BEGUN: ACKED, RECALLED: GIVEN_UP})
ON_NACK: Final = _transitions({WAITING: NACKED, BEGUN: NACKED, RECALLED: GIVEN_UP})
ON_RECALL: Final = _transitions({WAITING: DROPPED, BEGUN: RECALLED})
ON_BEGIN: Final = _transitions({WAITING: BEGUN})
ON_DROP: Final = _transitions({WAITING: DROPPED})
ON_SENT: Final = _transitions({ACKED: GONE})
_DIGITS: Final = bytes(ord("1") if state == ACKED else ord("0") for state in range(256))
# Whoever is not connected any more cannot be told: what is worked on stays, to be late.
ON_LOSS: Final = _transitions({WAITING: GONE, RECALLED: BEGUN})


class LeasedItem(Protocol):
    """Messages of one delivery, as consumers give them back: one, or a batch of them."""

    @property
    def delivery(self) -> HeldDelivery: ...

    def ranges(self) -> Sequence[Range]: ...

    def first_of_keys(self) -> Iterable[Message]: ...

    def ack_in(self, ledger: AckRecorder) -> None: ...


class AckRecorder(Protocol):
    """Where acks are written down. The first is for a message that is worked on, and says if it was one."""

    def ack_begun(self, delivery: HeldDelivery, offset: int) -> bool: ...

    def ack_range(self, delivery: HeldDelivery, begin: int, end: int) -> None: ...


class LeaseHolder(Protocol):
    """The consumer, as its work sees it."""

    @property
    def thread_id(self) -> int:
        """Where its loop ran when it was made. From elsewhere ask `check_loop` before making a coroutine."""

    def check_loop(self) -> None: ...

    async def ack(self, *items: LeasedItem, stored: bool = False) -> None: ...

    async def nack(
        self, *items: LeasedItem, delay_s: float | None = None, reason: str = ""
    ) -> None: ...

    async def extend(self, item: LeasedItem, seconds: float) -> None: ...


def is_concerned(item: LeasedItem, part: DeliveryPart) -> bool:
    """Whether messages of an item are in a part; one without offsets is a whole delivery."""
    return part.delivery == item.delivery.id and (
        part.begin >= part.end
        or any(begin < part.end and part.begin < end for begin, end in item.ranges())
    )


class HeldDelivery:
    """A stretch of one partition, leased to one consumer."""

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
        "left",
        "loss",
        "partition",
        "states",
        "topic",
    )

    def __init__(
        self,
        lease: Lease,
        batch: Batch,
        holder: LeaseHolder,
        *,
        now_ns: int,
        time_ns: int,
        lease_ns: int,
    ) -> None:
        self.id: Final = lease.delivery
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
        self.arrived_time_ns: Final = time_ns  # by the wall's clock
        self.deadline_ns = now_ns + lease_ns  # the broker's may be a little earlier
        self.is_lapsed = False  # the lease has ended, as far as can be known here
        self.loss = (
            ""  # why nobody can be told of it any more: its connection is gone, or its consumer
        )
        self.left = self.count  # neither acked nor nacked nor dropped
        self.begun_ns: Final[
            dict[int, int]
        ] = {}  # by offset, in the order in which they were begun
        self.begun_together_ns = 0  # when all that still waited was begun as a batch; 0: never
        self.states: Final = self._marked()

    def __repr__(self) -> str:
        return (
            f"<Delivery {self.id} of {self.topic}[{self.partition}]@{self.begin}…{self.end - 1}, "
            f"{self.left} of {self.count} left>"
        )

    def _marked(self) -> bytearray:
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
        """The consumer, to be told something on its loop; ClientFault from a thread that is not the loop's."""
        holder = self.holder
        if get_ident() != holder.thread_id:
            holder.check_loop()
        return holder

    def state(self, offset: int) -> int:
        return self.states[offset - self.begin]

    def transition(self, begin: int, end: int, table: bytes) -> None:
        """Change the states of these offsets, as far as they are of this delivery."""
        first = max(begin, self.begin) - self.begin
        last = min(end, self.end) - self.begin
        if first < last:
            self.states[first:last] = self.states[first:last].translate(table)

    def take(self, state: int) -> list[DeliveryPart]:
        """All messages in a state, which are gone then: as ranges, to be told."""
        if state not in self.states:  # nearly always, and known sooner than by matching
            return []
        found = [match.span() for match in _RANGES[state].finditer(self.states)]
        for first, last in found:
            self.states[first:last] = bytes(last - first)
        return [
            DeliveryPart(self.id, self.begin + first, self.begin + last) for first, last in found
        ]

    def take_acked(self) -> list[DeliveryPart] | Picked:
        """The same for those that are acked; where they lie scattered, as bits."""
        states = self.states
        first, last = states.find(ACKED), states.rfind(ACKED) + 1
        acked = states.count(ACKED)
        if last - first == acked:  # none, or one stretch
            states[first:last] = bytes(acked)
            return [DeliveryPart(self.id, self.begin + first, self.begin + last)] if acked else []
        if acked < _PICKED_MIN:
            return self.take(ACKED)
        mask = int(states[first:last].translate(_DIGITS)[::-1], 2)
        states[first:last] = states[first:last].translate(ON_SENT)
        return Picked(self.id, self.begin + first, mask.to_bytes((last - first + 7) // 8, "little"))

    def ranges_in(self, state: int) -> list[Range]:
        """Where the messages in a state are, by offsets."""
        return [
            (self.begin + match.start(), self.begin + match.end())
            for match in _RANGES[state].finditer(self.states)
        ]

    def oldest_begun_ns(self, now_ns: int) -> int:
        """Since when the message has been in work that has been so for longest; now, if there is none."""
        begun_ns, states = self.begun_ns, self.states
        while begun_ns:
            offset, since_ns = next(iter(begun_ns.items()))
            if states[offset - self.begin] in (BEGUN, RECALLED):
                return since_ns
            del begun_ns[offset]  # acked: that leaves it to whoever looks
        # Behind a batch nothing waits any more, so whatever was begun for itself was begun before.
        if self.begun_together_ns and (BEGUN in states or RECALLED in states):
            return self.begun_together_ns
        return now_ns

    def end_work(self, begin: int, end: int) -> None:
        """Nobody works on these any more."""
        if begin <= self.begin and end >= self.end:
            self.begun_ns.clear()
        elif self.begun_ns:
            for offset in range(max(begin, self.begin), min(end, self.end)):
                self.begun_ns.pop(offset, None)
