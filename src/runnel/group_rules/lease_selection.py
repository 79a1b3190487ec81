"""Selects the messages that a consumer names from its leases, and finds those that it names too late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks
from runnel.group_rules.effects import OFFSET_MAX
from runnel.group_rules.leases import LeasedRange, LeaseTable
from runnel.group_rules.masks import BLOCK, FULL

_LATE_MAX: Final = 64
"""Up to this many scattered messages of one delivery are reported as late one by one."""


class LeaseSelection:
    """Masks of leases. Selecting a message removes it from its lease, so no message is selected twice.

    `taken` were outstanding. `stopped` had been recalled: naming them in any way confirms that work on them has ended.
    """

    __slots__ = ("_consumer", "_leases", "late", "stopped", "taken")

    def __init__(self, leases: LeaseTable, consumer: int, late: list[DeliveryPart]) -> None:
        self._leases = leases
        self._consumer = consumer
        self.taken: dict[LeasedRange, int] = {}
        self.stopped: dict[LeasedRange, int] = {}
        self.late = late

    def take_deliveries(self, deliveries: Iterable[int]) -> None:
        for delivery in deliveries:
            lease = self._leases.get(self._consumer, delivery)
            if lease is None or not (lease.outstanding or lease.recalled):
                self.late.append(DeliveryPart(delivery, 0, OFFSET_MAX))
            else:
                self.take_all(lease)

    def take_parts(self, parts: Iterable[DeliveryPart]) -> None:
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
                self._add_late(lease, part, taken)

    def take_picked(self, picked: Iterable[Picked]) -> None:
        for part in picked:
            mask = int.from_bytes(part.bits, "little")
            lease = self._leases.get(self._consumer, part.delivery)
            first = 0 if lease is None else part.begin - lease.base
            if lease is None or not -BLOCK < first < BLOCK:
                self._add_late_picked(part, mask)
                continue
            covered = (mask << first if first >= 0 else mask >> -first) & FULL
            taken = covered & lease.outstanding
            if taken:
                lease.outstanding ^= taken
                self.taken[lease] = self.taken.get(lease, 0) | taken
            self._stop(lease, covered)
            self._add_late_picked(part, mask & ~(taken >> first if first >= 0 else taken << -first))

    def _add_late_picked(self, part: Picked, late: int) -> None:
        """Report late messages exactly, unless the report would be many times as long as the request."""
        if late.bit_count() > _LATE_MAX:
            last = min(part.begin + late.bit_length(), OFFSET_MAX)
            self.late.append(DeliveryPart(part.delivery, part.begin, last))
            return
        self.late += [
            DeliveryPart(part.delivery, begin, end) for begin, end in masks.runs(part.begin, late)
        ]

    def find_missing(self, parts: Iterable[DeliveryPart]) -> None:
        """Report as late what the consumer does not have of these, and select nothing."""
        for part in parts:
            lease = self._leases.get(self._consumer, part.delivery)
            if lease is None:
                self.late.append(part)
            else:
                self._add_late(
                    lease, part, _covered(lease, part) & (lease.outstanding | lease.recalled)
                )

    def stop_recalled(self, parts: Iterable[DeliveryPart]) -> None:
        """Select only recalled messages. Others are not reported as late: their leases may have ended meanwhile."""
        for part in parts:
            lease = self._leases.get(self._consumer, part.delivery)
            if lease is not None:
                self._stop(lease, _covered(lease, part))

    def take_up_to(self, lease: LeasedRange, offset: int) -> None:
        """Select the messages of a lease up to and including an offset."""
        covered = (1 << max(min(offset + 1 - lease.base, BLOCK), 0)) - 1
        taken = covered & lease.outstanding
        if taken:
            lease.outstanding ^= taken
            self.taken[lease] = taken
        self._add_late_stopped(lease, self._stop(lease, covered))

    def take_all(self, lease: LeasedRange) -> None:
        if lease.outstanding:
            self.taken[lease] = self.taken.get(lease, 0) | lease.outstanding
            lease.outstanding = 0
        if lease.recalled:
            self._add_late_stopped(lease, self._stop(lease, lease.recalled))

    def _stop(self, lease: LeasedRange, mask: int) -> int:
        stopped = mask & lease.recalled
        if stopped:
            lease.recalled ^= stopped
            self.stopped[lease] = self.stopped.get(lease, 0) | stopped
        return stopped

    def _add_late_stopped(self, lease: LeasedRange, mask: int) -> None:
        self.late += [
            DeliveryPart(lease.id, begin, end) for begin, end in masks.runs(lease.base, mask)
        ]

    def _add_late(self, lease: LeasedRange, part: DeliveryPart, taken: int) -> None:
        """Report all of a part that was not taken: at most one piece more than the runs that were taken."""
        position = part.begin
        for begin, end in masks.runs(lease.base, taken):
            if position < begin:
                self.late.append(DeliveryPart(part.delivery, position, begin))
            position = end
        if position < part.end:
            self.late.append(DeliveryPart(part.delivery, position, part.end))


def _covered(lease: LeasedRange, part: DeliveryPart) -> int:
    """The part as a mask at the lease's base, cut to the widest possible lease."""
    first = part.begin - lease.base
    last = part.end - lease.base
    if last - first == 1 and 0 <= first < BLOCK:
        return 1 << first
    first = max(first, 0)
    last = min(last, BLOCK)
    return ((1 << last - first) - 1) << first if first < last else 0
