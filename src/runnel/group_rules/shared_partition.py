"""What a partition owes, and the rules of shared work: whomever has room takes the next messages.

    1 … floor … done and owed, leased, due again … │ never delivered … │ not there yet
                                                 fresh                end

Below `fresh` every message that is not done is in exactly one place: leased (its lease knows), due again, delayed
until a time, or dying (failed too often, and not yet stored as a dead letter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import DeadLetter, Effects, Failure, LeasedDelivery, Want, forget
from runnel.group_rules.group_state import Delay, GroupState
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.offset_set import GAP_MAX, OffsetSet
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

SPAN_MAX: Final = masks.BLOCK
"""A delivery spans no more offsets: acknowledging one of them copies its mask."""


_PICKED_MIN: Final = 8
"""Fewer scattered messages are told as ranges, which then take no more room than bits."""


class SharedPartition:
    """One partition of a group. `give_back`, `fail` and `acknowledge` are told of what leases let go of."""

    def __init__(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure],
        group_state: GroupState,
        now_ns: int,
    ) -> None:
        self.key = key
        self.acked = acked
        self.failures = {
            offset: failure for offset, failure in failures.items() if offset not in acked
        }
        self.fresh = acked.floor
        self.end = acked.floor
        self.due = OffsetSet()  # may go to whomever has room
        self.delayed = OffsetSet()
        self.dying = OffsetSet()
        self._group_state = group_state
        self._recover(now_ns)

    def _recover(self, now_ns: int) -> None:
        """Put what failed before a restart where it belongs; what lies before the last of it is due."""
        if not self.failures:
            return
        self._skip_to(max(self.failures) + 1)
        self.extend(self.fresh)
        for offset, failure in self.failures.items():
            if self._is_held_back(offset, now_ns):
                self.due.discard(offset)
                # What is to become a dead letter is told by the next look at the clock.
                self._put_off(offset, max(failure.not_before_ns, now_ns))

    # --- What is there ---

    def extend(self, end: int) -> None:
        if end > self.end:
            self.end = end
            self._group_state.call(self.key)

    def gone(self, begin: int, end: int, effects: Effects) -> None:
        """These will never come. Where they are leased, the lease finds them done when it ends."""
        self.extend(end)
        self._acknowledge(begin, end, effects)
        self.due.discard_range(begin, end)
        self._group_state.delayed -= self.delayed.discard_range(begin, end)
        self._group_state.dying -= self.dying.discard_range(begin, end)

    def reopen(self, offset: int, effects: Effects) -> None:
        """Owed again, as if it had never been delivered."""
        if offset not in self.acked:
            return
        self.acked.discard(offset, offset + 1)
        effects.failed.append((self.key, offset, 0, 0, 0, ""))
        if offset < self.fresh:
            self._owe_again(offset)
        self.extend(offset + 1)
        self._group_state.call(self.key)

    def _owe_again(self, offset: int) -> None:
        self.due.add(offset)

    def close(self) -> None:
        """It is no more: nothing of it waits for anything."""
        self._group_state.rest(self.key)
        self._group_state.delayed -= len(self.delayed)
        self._group_state.dying -= len(self.dying)

    # --- Delivering ---

    def want(self) -> Want | None:
        """What to read for whomever has room; what came back before what is new. None: nothing until it calls."""
        again = self.due.stretch()
        begin, end = self._first_fresh(), self.end
        if again is not None:
            is_near = begin < end and again[1] + GAP_MAX >= begin
            begin, end = again[0], end if is_near else again[1]
        elif begin >= end:
            self._group_state.rest(self.key)
            return None
        consumers = self._group_state.consumers
        return Want(self.key, begin, end, consumers.room_messages, consumers.room_bytes)

    def _first_fresh(self) -> int:
        self.fresh = self.acked.first_missing(self.fresh)
        return self.fresh

    def _skip_to(self, offset: int) -> None:
        """Go on with new messages from an offset on; those passed over are due."""
        for begin, end in self.acked.missing(self.fresh, offset):
            self.due.add_range(begin, end)
        self.fresh = max(self.fresh, offset)

    def offer(
        self,
        base: int,
        count: int,
        cost_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None,  # noqa: ARG002 (shared work has no keys)
    ) -> list[LeasedDelivery]:
        """Deliver what can be of these messages."""
        consumers = self._group_state.consumers
        deliveries = []
        begin, end = base, base + count
        self.extend(end)
        mask = self._deliverable(begin, min(end, begin + SPAN_MAX))
        while True:
            if not mask:
                begin = min(end, begin + SPAN_MAX)
                if begin == end:
                    break
                mask = self._deliverable(begin, min(end, begin + SPAN_MAX))
                continue
            consumer = consumers.next_ready()
            if consumer is None:
                break
            room = consumer.fits(cost_bytes)
            if not room:
                consumers.stick(consumer)
                continue
            taken = masks.lowest(mask, room)
            mask ^= taken
            lease = self._group_state.open_lease(consumer, self.key, begin, cost_bytes, now_ns)
            deliveries.append(self._group_state.deliver(lease, taken, self._take(begin, taken)))
        return deliveries

    def _deliverable(self, begin: int, end: int) -> int:
        """Which of these are owed and nobody's, as a mask at `begin`."""
        new = max(begin, min(self.fresh, end))
        mask = self.due.mask(begin, new)
        if new < end:
            owed = ((1 << end - new) - 1) & ~self.acked.mask(new, end)
            mask |= owed << (new - begin)
        return mask

    def _take(self, base: int, mask: int) -> list[tuple[int, int, int]]:
        """These are delivered now. Tells which of them were before."""
        attempts: list[tuple[int, int, int]] = []
        end = base + mask.bit_length()
        if base < self.fresh:
            again = mask if end <= self.fresh else mask & ((1 << self.fresh - base) - 1)
            self.due.discard_mask(base, again)
            if self.failures:
                attempts = self._attempts(masks.offsets(base, again))
        if end > self.fresh:
            self._skip_to(base)
            self.fresh = end
        return attempts

    def _attempts(self, offsets: Sequence[int]) -> list[tuple[int, int, int]]:
        failures = self.failures
        if not failures:
            return []
        return [
            (offset, failures[offset].failures, failures[offset].first_delivery_ns)
            for offset in sorted(offsets)
            if offset in failures
        ]

    # --- What became of deliveries ---

    def acknowledge(self, lease: LeasedRange, mask: int, effects: Effects) -> None:
        """These are done, and no longer outstanding in the lease."""
        whole = masks.range_of(lease.base, mask)
        if whole is not None:
            self._tell_acked(self.acked.add(*whole), effects)
        else:
            new = self.acked.add_scattered(lease.base, mask)
            if new.bit_count() < _PICKED_MIN:
                self._tell_acked(masks.runs(lease.base, new), effects)
            else:
                effects.picked.append((self.key, lease.base, new))
        if self.failures:
            for begin, end in masks.runs(lease.base, mask):
                forget(self.failures, begin, end)

    def _acknowledge(self, begin: int, end: int, effects: Effects) -> None:
        self._tell_acked(self.acked.add(begin, end), effects)
        if self.failures:
            forget(self.failures, begin, end)

    def _tell_acked(self, added: list[tuple[int, int]], effects: Effects) -> None:
        key, acked = self.key, effects.acked
        for begin, end in added:
            if acked and acked[-1][2] == begin and acked[-1][0] is key:
                # Acks of neighbouring deliveries are one range to be stored.
                acked[-1] = (key, acked[-1][1], end)
            else:
                acked.append((key, begin, end))

    def give_back(self, returned: Sequence[tuple[LeasedRange, int]], effects: Effects) -> None:  # noqa: ARG002
        """These come again, and no failure is counted. Shared work has no order, so it recalls nothing."""
        for lease, mask in returned:
            owed = self._still_owed(lease.base, mask)
            self.due.add_mask(lease.base, owed)
            self._remember(lease, masks.offsets(lease.base, owed))
        self._group_state.call(self.key)

    def fail(
        self,
        returned: Sequence[tuple[LeasedRange, int]],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
        effects: Effects,
    ) -> None:
        """These have failed. `delay_ns` of None: they wait as long as the options say."""
        for lease, mask in returned:
            at_once = 0
            for offset in masks.offsets(lease.base, self._still_owed(lease.base, mask)):
                failure = self._count(lease, offset, now_ns, delay_ns, reason, effects)
                if self._is_hopeless(failure):
                    self._give_up(offset, failure, effects)
                elif failure.not_before_ns > now_ns:
                    self._put_off(offset, failure.not_before_ns)
                else:
                    at_once |= 1 << offset - lease.base
            self.due.add_mask(lease.base, at_once)
        self._group_state.call(self.key)

    def confirm(self, lease: LeasedRange, mask: int) -> None:
        """Work has stopped on these, which were recalled from the lease. Shared work recalls nothing."""

    def want_for(self, consumer: ConsumerWindow) -> Want | None:  # noqa: ARG002
        """What to read for a consumer because nobody else may have it. In shared work anybody may."""
        return None

    def _still_owed(self, base: int, mask: int) -> int:
        return mask & ~self.acked.mask(base, base + mask.bit_length())

    def _remember(self, lease: LeasedRange, offsets: Sequence[int]) -> None:
        """When they were first delivered, for the next to whom they go."""
        failure = Failure(0, 0, lease.delivered_ns)
        for offset in offsets:
            self.failures.setdefault(offset, failure)

    def _count(
        self,
        lease: LeasedRange,
        offset: int,
        now_ns: int,
        delay_ns: int | None,
        reason: str,
        effects: Effects,
    ) -> Failure:
        former = self.failures.get(offset)
        failures, first_ns = 1, lease.delivered_ns
        if former is not None:
            failures += former.failures
            first_ns = former.first_delivery_ns or first_ns
        options = self._group_state.options
        if 0 < options.deliveries_max <= failures:
            delay_ns = 0  # it is not delivered again
        elif delay_ns is None:
            delay_ns = options.delay_ns(failures)
        failure = Failure(failures, now_ns + delay_ns, first_ns, reason)
        self.failures[offset] = failure
        effects.failed.append((self.key, offset, failures, now_ns + delay_ns, first_ns, reason))
        return failure

    # --- Delays and dead letters ---

    def _is_hopeless(self, failure: Failure) -> bool:
        return 0 < self._group_state.options.deliveries_max <= failure.failures

    def _is_held_back(self, offset: int, now_ns: int) -> bool:
        failure = self.failures[offset]
        return failure.not_before_ns > now_ns or self._is_hopeless(failure)

    def _put_off(self, offset: int, until_ns: int) -> None:
        self.delayed.add(offset)
        self._group_state.delayed += 1
        self._group_state.delay(until_ns, self.key, offset)

    def _give_up(self, offset: int, failure: Failure, effects: Effects) -> None:
        self.dying.add(offset)
        self._group_state.dying += 1
        effects.dead_letters.append(DeadLetter(self.key, offset, failure.failures, failure.reason))

    def ripen(self, delay: Delay, now_ns: int, effects: Effects) -> None:
        """A delay is over. It may be one of before a reset: what counts is what the message itself has."""
        offset = delay.offset
        failure = self.failures.get(offset)
        if failure is None or failure.not_before_ns > now_ns or not self.delayed.discard(offset):
            return
        self._group_state.delayed -= 1
        if self._is_hopeless(failure):
            self._give_up(offset, failure, effects)
        else:
            self.due.add(offset)
            self._group_state.call(self.key)

    def dead_letter_stored(self, offset: int, effects: Effects) -> bool:
        """Its dead letter is stored. False: nobody asked for one."""
        if not self.dying.discard(offset):
            return False
        self._group_state.dying -= 1
        self._acknowledge(offset, offset + 1, effects)
        return True

    def dead_letter_failed(self, offset: int, now_ns: int) -> None:
        """Its dead letter could not be stored: try again later."""
        if not self.dying.discard(offset):
            return
        self._group_state.dying -= 1
        failure = self.failures[offset]
        until_ns = now_ns + self._group_state.options.retry_delay_ns_max
        self.failures[offset] = Failure(
            failure.failures, until_ns, failure.first_delivery_ns, failure.reason
        )
        self._put_off(offset, until_ns)
