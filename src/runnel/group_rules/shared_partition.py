"""One partition of a group in shared mode: any consumer with room takes the next messages.

    1 … floor … done, or leased, due again … │ never delivered … │ not stored yet
                                           fresh                end

Below `fresh` every message that is not done is in exactly one state: leased (in a lease's mask), due again, delayed
until a time, or dying (failed too often, and not yet stored as a dead letter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import AwaitedHolders
from runnel.group_rules.effects import DeadLetter, Effects, Failure, LeasedDelivery, Want, forget
from runnel.group_rules.group_state import Delay, GroupState
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.offset_set import GAP_MAX, OffsetSet
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

SPAN_MAX: Final = masks.BLOCK
"""The widest range of offsets of a delivery: acknowledging one message copies the delivery's mask."""


_PICKED_MIN: Final = 8
"""Fewer scattered messages are recorded as ranges, which then take no more room than bits."""


class SharedPartition:
    """One partition of a group. `acknowledge`, `give_back` and `fail` take messages that have left their leases."""

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
        self.due = OffsetSet()  # any consumer with room may get them
        self.delayed = OffsetSet()
        self.dying = OffsetSet()
        self.awaited: AwaitedHolders | None = None  # nothing is delivered before these have come
        self._group_state = group_state
        self._recover(now_ns)

    def _recover(self, now_ns: int) -> None:
        """Delay messages that failed before a restart; other messages before the last failed one are due."""
        if not self.failures:
            return
        self._skip_to(max(self.failures) + 1)
        self.extend(self.fresh)
        for offset, failure in self.failures.items():
            if self._is_held_back(offset, now_ns):
                self.due.discard(offset)
                # `end_delay` requests the dead letters of those that failed too often.
                self._delay(offset, max(failure.not_before_ns, now_ns))

    # --- Stored messages ---

    def extend(self, end: int) -> None:
        if end > self.end:
            self.end = end
            self._group_state.mark_busy(self.key)

    def gone(self, begin: int, end: int, effects: Effects) -> None:
        """Acknowledge messages that cannot be read any more. Leased ones are found done when their lease ends."""
        self.extend(end)
        self._acknowledge(begin, end, effects)
        self.due.discard_range(begin, end)
        self._group_state.delayed -= self.delayed.discard_range(begin, end)
        self._group_state.dying -= self.dying.discard_range(begin, end)

    def reopen(self, offset: int, effects: Effects) -> None:
        """Owe a message again, as if it had never been delivered."""
        if offset not in self.acked:
            return
        self.acked.discard(offset, offset + 1)
        effects.failed.append((self.key, offset, 0, 0, 0, ""))
        if offset < self.fresh:
            self._owe_again(offset)
        self.extend(offset + 1)
        self._group_state.mark_busy(self.key)

    def _owe_again(self, offset: int) -> None:
        self.due.add(offset)

    def end_wait(self) -> None:
        """Deliver from now on: the holders have come, or their time is over."""
        self.awaited = None
        self._group_state.mark_busy(self.key)

    def adopt(
        self,
        lease: LeasedRange,
        outstanding: int,
        recalled: int,
        row_keys: Mapping[int, bytes | None],  # noqa: ARG002 (shared mode ignores keys)
    ) -> tuple[int, int]:
        """Continue a lease of the former owner. Returns the messages that it has, and those recalled, as masks."""
        outstanding = self._still_owed(lease.base, outstanding | recalled)
        if outstanding:
            end = lease.base + outstanding.bit_length()
            self.extend(end)
            self._skip_to(end)
            self.due.discard_mask(lease.base, outstanding)
            for offset in masks.offsets(lease.base, outstanding):
                self._group_state.delayed -= self.delayed.discard(offset)
        return outstanding, 0

    def close(self) -> None:
        """Take the partition out of the group's turns and counters."""
        self._group_state.mark_idle(self.key)
        self._group_state.delayed -= len(self.delayed)
        self._group_state.dying -= len(self.dying)

    # --- Deliveries ---

    def want(self) -> Want | None:
        """The next read for any consumer with room: due messages before new ones. None: idle until marked busy."""
        if self.awaited is not None:
            self._group_state.mark_idle(self.key)
            return None
        again = self.due.stretch()
        begin, end = self._first_fresh(), self.end
        if again is not None:
            is_near = begin < end and again[1] + GAP_MAX >= begin
            begin, end = again[0], end if is_near else again[1]
        elif begin >= end:
            self._group_state.mark_idle(self.key)
            return None
        consumers = self._group_state.consumers
        return Want(self.key, begin, end, consumers.room_messages, consumers.room_bytes)

    def _first_fresh(self) -> int:
        self.fresh = self.acked.first_missing(self.fresh)
        return self.fresh

    def _skip_to(self, offset: int) -> None:
        """Continue with new messages at an offset; skipped ones are due."""
        for begin, end in self.acked.missing(self.fresh, offset):
            self.due.add_range(begin, end)
        self.fresh = max(self.fresh, offset)

    def offer(
        self,
        base: int,
        count: int,
        cost_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None,  # noqa: ARG002 (shared mode ignores keys)
    ) -> list[LeasedDelivery]:
        """Deliver those of these messages that are owed, as far as consumers have room."""
        consumers = self._group_state.consumers
        deliveries: list[LeasedDelivery] = []
        begin, end = base, base + count
        self.extend(end)
        if self.awaited is not None:
            return deliveries
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
                consumers.mark_stuck(consumer)
                continue
            taken = masks.lowest(mask, room)
            mask ^= taken
            lease = self._group_state.open_lease(consumer, self.key, begin, cost_bytes, now_ns)
            deliveries.append(self._group_state.deliver(lease, taken, self._take(begin, taken)))
        return deliveries

    def _deliverable(self, begin: int, end: int) -> int:
        """The messages of a range that are owed and not leased, as a mask at `begin`."""
        new = max(begin, min(self.fresh, end))
        mask = self.due.mask(begin, new)
        if new < end:
            owed = ((1 << end - new) - 1) & ~self.acked.mask(new, end)
            mask |= owed << (new - begin)
        return mask

    def _take(self, base: int, mask: int) -> list[tuple[int, int, int]]:
        """Mark messages as delivered. Returns the attempts of those that were delivered before."""
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

    # --- Ends of deliveries ---

    def acknowledge(self, lease: LeasedRange, mask: int, effects: Effects) -> None:
        """Mark messages as done, which are no longer outstanding in the lease."""
        whole = masks.range_of(lease.base, mask)
        if whole is not None:
            self._record_acked(self.acked.add(*whole), effects)
        else:
            new = self.acked.add_scattered(lease.base, mask)
            if new.bit_count() < _PICKED_MIN:
                self._record_acked(masks.runs(lease.base, new), effects)
            else:
                effects.picked.append((self.key, lease.base, new))
        if self.failures:
            for begin, end in masks.runs(lease.base, mask):
                forget(self.failures, begin, end)

    def _acknowledge(self, begin: int, end: int, effects: Effects) -> None:
        self._record_acked(self.acked.add(begin, end), effects)
        if self.failures:
            forget(self.failures, begin, end)

    def _record_acked(self, added: list[tuple[int, int]], effects: Effects) -> None:
        key, acked = self.key, effects.acked
        for begin, end in added:
            if acked and acked[-1][2] == begin and acked[-1][0] is key:
                # Acks of neighbouring deliveries are stored as one range.
                acked[-1] = (key, acked[-1][1], end)
            else:
                acked.append((key, begin, end))

    def give_back(self, returned: Sequence[tuple[LeasedRange, int]], effects: Effects) -> None:  # noqa: ARG002
        """Make messages due again without counting a failure. Shared mode has no order, so it recalls nothing."""
        for lease, mask in returned:
            owed = self._still_owed(lease.base, mask)
            self.due.add_mask(lease.base, owed)
            self._note_first_delivery(lease, masks.offsets(lease.base, owed))
        self._group_state.mark_busy(self.key)

    def fail(
        self,
        returned: Sequence[tuple[LeasedRange, int]],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
        effects: Effects,
    ) -> None:
        """Count messages as failed. They wait for `delay_ns`; None: as long as the options say."""
        for lease, mask in returned:
            at_once = 0
            for offset in masks.offsets(lease.base, self._still_owed(lease.base, mask)):
                failure = self._count(lease, offset, now_ns, delay_ns, reason, effects)
                if self._is_hopeless(failure):
                    self._request_dead_letter(offset, failure, effects)
                elif failure.not_before_ns > now_ns:
                    self._delay(offset, failure.not_before_ns)
                else:
                    at_once |= 1 << offset - lease.base
            self.due.add_mask(lease.base, at_once)
        self._group_state.mark_busy(self.key)

    def confirm_recall(self, lease: LeasedRange, mask: int) -> None:
        """Work has stopped on these recalled messages of a lease. Shared mode recalls nothing."""

    def want_for(self, consumer: ConsumerWindow) -> Want | None:  # noqa: ARG002
        """The next read of messages that only this consumer may have. Shared mode has none."""
        return None

    def _still_owed(self, base: int, mask: int) -> int:
        return mask & ~self.acked.mask(base, base + mask.bit_length())

    def _note_first_delivery(self, lease: LeasedRange, offsets: Sequence[int]) -> None:
        """Keep the time of the first delivery, for the next consumer of these messages."""
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
            delay_ns = 0  # it becomes a dead letter
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

    def _delay(self, offset: int, until_ns: int) -> None:
        self.delayed.add(offset)
        self._group_state.delayed += 1
        self._group_state.delay(until_ns, self.key, offset)

    def _request_dead_letter(self, offset: int, failure: Failure, effects: Effects) -> None:
        self.dying.add(offset)
        self._group_state.dying += 1
        effects.dead_letters.append(DeadLetter(self.key, offset, failure.failures, failure.reason))

    def end_delay(self, delay: Delay, now_ns: int, effects: Effects) -> None:
        """End a delay. It may stem from before a reset: the message's own state decides."""
        offset = delay.offset
        failure = self.failures.get(offset)
        if failure is None or failure.not_before_ns > now_ns or not self.delayed.discard(offset):
            return
        self._group_state.delayed -= 1
        if self._is_hopeless(failure):
            self._request_dead_letter(offset, failure, effects)
        else:
            self.due.add(offset)
            self._group_state.mark_busy(self.key)

    def dead_letter_stored(self, offset: int, effects: Effects) -> bool:
        """A message's dead letter is stored. False: none was requested."""
        if not self.dying.discard(offset):
            return False
        self._group_state.dying -= 1
        self._acknowledge(offset, offset + 1, effects)
        return True

    def dead_letter_failed(self, offset: int, now_ns: int) -> None:
        """A message's dead letter could not be stored: request it again later."""
        if not self.dying.discard(offset):
            return
        self._group_state.dying -= 1
        failure = self.failures[offset]
        until_ns = now_ns + self._group_state.options.retry_delay_ns_max
        self.failures[offset] = Failure(
            failure.failures, until_ns, failure.first_delivery_ns, failure.reason
        )
        self._delay(offset, until_ns)
