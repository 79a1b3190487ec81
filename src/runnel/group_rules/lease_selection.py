"""What a consumer names of what it has: parts of its leases, and what of them comes too late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks
from runnel.group_rules.effects import OFFSET_MAX
from runnel.group_rules.leases import LeasedRange, LeaseTable
from runnel.group_rules.masks import BLOCK, FULL

_LATE_MAX: Final = 64
"""Scattered messages of one delivery that are told as late one by one."""


class LeaseSelection:
    """Masks of leases, taken from them as they are named: so nothing is named twice.

    `taken` were outstanding. `stopped` had been recalled: whatever the consumer says of them, work on them has ended.
    """

    __slots__ = ("_consumer", "_leases", "late", "stopped", "taken")

    def __init__(self, leases: LeaseTable, consumer: int, late: list[DeliveryPart]) -> None:
        self._leases = leases
        self._consumer = consumer
        self.taken: dict[LeasedRange, int] = {}
        self.stopped: dict[LeasedRange, int] = {}
        self.late = late

    def wholes(self, deliveries: Iterable[int]) -> None:
        for delivery in deliveries:
            lease = self._leases.get(self._consumer, delivery)
            if lease is None or not (lease.outstanding or lease.recalled):
                self.late.append(DeliveryPart(delivery, 0, OFFSET_MAX))
            else:
                self.all_of(lease)

    def parts(self, parts: Iterable[DeliveryPart]) -> None:
        get, consumer, all_taken = self._leases.get, self._consumer, self.taken
        for part in parts:
            lease = get(consumer, part.delivery)
            if lease is None:
                self.late.append(part)
                continue
            covered = _covered(lease, part)
            taken = covered & lease.outstanding
            if taken:
                lease.outstanding ^= taken
                all_taken[lease] = all_taken[lease] | taken if lease in all_taken else taken
            if taken.bit_count() != part.end - part.begin:
                self._stop(lease, covered)
                self._tell_late(lease, part, taken)

    def picked(self, picked: Iterable[Picked]) -> None:
        for part in picked:
            mask = int.from_bytes(part.bits, "little")
            lease = self._leases.get(self._consumer, part.delivery)
            first = 0 if lease is None else part.begin - lease.base
            if lease is None or not -BLOCK < first < BLOCK:
                self._tell_picked(part, mask)
                continue
            covered = (mask << first if first >= 0 else mask >> -first) & FULL
            taken = covered & lease.outstanding
            if taken:
                lease.outstanding ^= taken
                self.taken[lease] = self.taken.get(lease, 0) | taken
            self._stop(lease, covered)
            self._tell_picked(part, mask & ~(taken >> first if first >= 0 else taken << -first))

    def _tell_picked(self, part: Picked, late: int) -> None:
        """Exactly, unless that would be many times as long as what was said."""
        if late.bit_count() > _LATE_MAX:
            last = min(part.begin + late.bit_length(), OFFSET_MAX)
            self.late.append(DeliveryPart(part.delivery, part.begin, last))
            return
        self.late += [
            DeliveryPart(part.delivery, begin, end) for begin, end in masks.runs(part.begin, late)
        ]

    def missing(self, parts: Iterable[DeliveryPart]) -> None:
        """Tell which of these the consumer does not have, and take nothing."""
        for part in parts:
            lease = self._leases.get(self._consumer, part.delivery)
            if lease is None:
                self.late.append(part)
            else:
                self._tell_late(
                    lease, part, _covered(lease, part) & (lease.outstanding | lease.recalled)
                )

    def recalled(self, parts: Iterable[DeliveryPart]) -> None:
        """Only what was recalled; of the rest nothing is said, for leases may have ended meanwhile."""
        for part in parts:
            lease = self._leases.get(self._consumer, part.delivery)
            if lease is not None:
                self._stop(lease, _covered(lease, part))

    def up_to(self, lease: LeasedRange, offset: int) -> None:
        """What a lease has up to an offset and with it."""
        covered = (1 << max(min(offset + 1 - lease.base, BLOCK), 0)) - 1
        taken = covered & lease.outstanding
        if taken:
            lease.outstanding ^= taken
            self.taken[lease] = taken
        self._tell_stopped(lease, self._stop(lease, covered))

    def all_of(self, lease: LeasedRange) -> None:
        if lease.outstanding:
            self.taken[lease] = self.taken.get(lease, 0) | lease.outstanding
            lease.outstanding = 0
        if lease.recalled:
            self._tell_stopped(lease, self._stop(lease, lease.recalled))

    def _stop(self, lease: LeasedRange, mask: int) -> int:
        stopped = mask & lease.recalled
        if stopped:
            lease.recalled ^= stopped
            self.stopped[lease] = self.stopped.get(lease, 0) | stopped
        return stopped

    def _tell_stopped(self, lease: LeasedRange, mask: int) -> None:
        self.late += [
            DeliveryPart(lease.id, begin, end) for begin, end in masks.runs(lease.base, mask)
        ]

    def _tell_late(self, lease: LeasedRange, part: DeliveryPart, taken: int) -> None:
        """All of a part that was not outstanding. No more pieces than what was, and one."""
        position = part.begin
        for begin, end in masks.runs(lease.base, taken):
            if position < begin:
                self.late.append(DeliveryPart(part.delivery, position, begin))
            position = end
        if position < part.end:
            self.late.append(DeliveryPart(part.delivery, position, part.end))


def _covered(lease: LeasedRange, part: DeliveryPart) -> int:
    """A part as a mask at the lease's base, no wider than a lease can be."""
    first = part.begin - lease.base
    last = part.end - lease.base
    if last - first == 1 and 0 <= first < BLOCK:
        return 1 << first
    first = max(first, 0)
    last = min(last, BLOCK)
    return ((1 << last - first) - 1) << first if first < last else 0
