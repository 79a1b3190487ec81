"""What a partition owes in key_shared mode: a key's messages to one consumer at a time, in order.

Messages without a key have no order, and are treated as in shared work. The others are looked at in the order of the
partition: each goes into the queue of its key, and from there to the queue's holder, or waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import Final, TypeAlias

from runnel.formats.work_heads import DeliveryPart
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.delivery_builders import DeliveryBuilder, DeliveryBuilders
from runnel.group_rules.effects import Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group_state import Delay, GroupState
from runnel.group_rules.key_queue import KeyQueue
from runnel.group_rules.key_queues import KeyQueues
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.offset_set import GAP_MAX, OffsetSet
from runnel.group_rules.shared_partition import SPAN_MAX, SharedPartition
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

# How far ahead a queue is looked at for more to read along with its first.
_AHEAD_MAX: Final = 256
# So many turns has each consumer in one offer, if it has enough keys.
_TURNS: Final = 8

_Ended: TypeAlias = dict[int, LeasedRange]
"""Messages of a queue that their leases have let go of, by offset."""


class KeyedPartition(SharedPartition):
    """One partition. A keyed message that is not done and not new is in flight, waiting or dying, in its queue."""

    def __init__(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure],
        group_state: GroupState,
        now_ns: int,
    ) -> None:
        super().__init__(key, acked, failures, group_state, now_ns)
        self._key_queues = KeyQueues(key, self.due, group_state)
        self._held: dict[int, KeyQueue] = {}  # by offset: what consumers have, recalled or not
        # Sent back from the dead letters: their keys are not known, so nothing newer may go out before they are read.
        self._unread = OffsetSet()

    def _recover(self, now_ns: int) -> None:
        """Keys are known only once messages are read, in order: what failed before is found then."""

    # --- What is there ---

    def _owe_again(self, offset: int) -> None:
        self._unread.add(offset)

    def gone(self, begin: int, end: int, effects: Effects) -> None:
        super().gone(begin, end, effects)
        self._unread.discard_range(begin, end)
        self._key_queues.gone(begin, end)

    def close(self) -> None:
        super().close()
        self._key_queues.close()

    # --- Wanting ---

    def want(self) -> Want | None:
        if self._unread:
            return self._want_unread()
        if not self.due and self._group_state.is_crowded and self._first_fresh() < self.end:
            self._group_state.stall(self.key)
            return None
        want = super().want()
        if want is None or want.begin not in self._key_queues.waiting:
            return want
        consumers = self._group_state.consumers
        end = max(min(want.end, self.fresh), self._ahead(want.begin, consumers.room_messages))
        return self._want_all(want.begin, end, consumers.room_bytes)

    def want_for(self, consumer: ConsumerWindow) -> Want | None:
        if self._unread:
            return self._want_unread()
        stretch = consumer.heads[self.key].stretch()
        assert stretch is not None  # heads without anything in them are not kept
        begin, end = stretch
        messages, size_bytes = consumer.room
        return self._want_all(begin, max(end, self._ahead(begin, messages)), size_bytes)

    def _want_unread(self) -> Want:
        stretch = self._unread.stretch()
        assert stretch is not None
        return self._want_all(*stretch, self._group_state.consumers.room_bytes)

    def _want_all(self, begin: int, end: int, bytes_max: int) -> Want:
        """What is wanted may lie far apart among messages that are not: so there is no limit on how many are read."""
        return Want(self.key, begin, end, end - begin, bytes_max)

    def _ahead(self, first: int, messages: int) -> int:
        """Where what waits in the queue behind its first ends, as far as it is near and there is room for it."""
        waiting = self._key_queues.waiting[first].waiting
        assert waiting is not None
        last = first
        for offset in islice(waiting, min(messages, _AHEAD_MAX)):
            if offset - last > GAP_MAX:
                break
            last = offset
        return last + 1

    # --- Delivering ---

    def offer(
        self,
        base: int,
        count: int,
        cost_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None,
    ) -> list[LeasedDelivery]:
        if row_keys is None or len(row_keys) != count:
            raise ValueError(f"{count} messages in key_shared mode need as many keys")
        self.extend(base + count)
        deliveries = []
        for begin in range(base, base + count, SPAN_MAX):
            rows = row_keys[begin - base : begin - base + SPAN_MAX]
            if self._unread:
                self._read(begin, rows)
            if self._unread:
                continue
            delivery_builders = DeliveryBuilders(
                self._group_state, self.key, begin, cost_bytes, now_ns
            )
            if begin < self.fresh and (self._key_queues.waiting or self.due):
                self._offer_again(begin, rows, delivery_builders)
            if begin + len(rows) > self.fresh:
                self._offer_new(begin, rows, now_ns, delivery_builders)
            deliveries += delivery_builders.deliver(self._attempts)
        return deliveries

    def _read(self, base: int, rows: Sequence[bytes | None]) -> None:
        """Put what was sent back where it belongs, now that its key is known."""
        for offset in masks.offsets(base, self._unread.mask(base, base + len(rows))):
            self._unread.discard(offset)
            row_key = rows[offset - base]
            if row_key is None:
                self.due.add(offset)
            else:
                queue = self._key_queues.get(row_key) or self._key_queues.new(row_key)
                self._key_queues.wait(queue, [offset])
                self._key_queues.show(queue)

    def _offer_again(
        self, base: int, rows: Sequence[bytes | None], delivery_builders: DeliveryBuilders
    ) -> None:
        """Of messages seen before, those that are due, and those that are next in their queues."""
        end = min(base + len(rows), self.fresh)
        shown = self.due.mask(base, end)
        for consumer in self._group_state.consumers.called:
            if (heads := consumer.heads.get(self.key)) is not None:
                shown |= heads.mask(base, end)
        for offset in masks.offsets(base, shown):
            queue = self._key_queues.waiting.get(offset)
            if queue is not None:
                self._offer_queue(queue, base, end, delivery_builders)
            elif rows[offset - base] is None:
                delivery_builder = delivery_builders.of_anybody()
                if delivery_builder is not None:
                    self.due.discard(offset)
                    delivery_builders.put(delivery_builder, offset)

    def _offer_queue(
        self, queue: KeyQueue, begin: int, end: int, delivery_builders: DeliveryBuilders
    ) -> None:
        """What is next in a queue and lies in a range, as much of it as its holder has room for."""
        delivery_builder = self._delivery_builder(queue, delivery_builders)
        if delivery_builder is not None:
            offsets = self._key_queues.pop(queue, begin, end, delivery_builder.room)
            queue.holder = delivery_builder.lease.consumer
            queue.flight.update(dict.fromkeys(offsets, delivery_builder.lease))
            self._held.update(dict.fromkeys(offsets, queue))
            delivery_builders.put(delivery_builder, *offsets)
            self._key_queues.show(queue)

    def _offer_new(
        self,
        base: int,
        rows: Sequence[bytes | None],
        now_ns: int,
        delivery_builders: DeliveryBuilders,
    ) -> None:
        """Of messages never seen: deliver them, or let them wait, in order, until one can do neither."""
        first = offset = self._first_fresh()
        end = base + len(rows)
        if first < base:
            return
        done = self.acked.mask(first, end)
        if not done and not self.failures:
            offset = self._offer_plain(first, rows[first - base :], delivery_builders)
        owed = f"{~done & ((1 << end - first) - 1):b}"[::-1].ljust(end - first, "0") if done else ""
        changed: dict[KeyQueue, None] = {}
        queues, failures, consumers = self._key_queues, self.failures, self._group_state.consumers
        while offset < end:
            if owed and owed[offset - first] == "0":
                offset += 1
                continue
            row_key = rows[offset - base]
            delivery_builder: DeliveryBuilder | None
            if failures and offset in failures and self._is_held_back(offset, now_ns):
                if not self._offer_failed(row_key, offset, now_ns, changed):
                    break
            elif row_key is None:
                delivery_builder = delivery_builders.of_anybody()
                if delivery_builder is None:
                    break
                delivery_builders.put(delivery_builder, offset)
            else:
                queue = queues.get(row_key)
                if queue is None:
                    delivery_builder = delivery_builders.of_anybody()
                    if delivery_builder is None:
                        break
                    queue = queues.new(row_key)
                elif queue.waiting or not queue.is_open:
                    delivery_builder = None
                else:
                    delivery_builder = self._delivery_builder(queue, delivery_builders)
                if delivery_builder is not None:
                    self._fly(queue, offset, delivery_builder, delivery_builders)
                elif self._group_state.is_crowded or not consumers.is_anybody_ready:
                    break
                else:
                    queues.wait(queue, [offset])
                    changed[queue] = None
            offset += 1
        self.fresh = offset
        for queue in changed:
            self._key_queues.show(queue)

    def _offer_plain(
        self, base: int, rows: Sequence[bytes | None], delivery_builders: DeliveryBuilders
    ) -> int:
        """The same where nothing has failed or is done, quickly (bench/queue.py, "work"): up to what is returned.

        Of many keys a few in a row go to one consumer before it is the next one's turn. Who is full stays so for this
        offer: what waits for them is put into its queues at the end.
        """
        get, new, held, find = (
            self._key_queues.get,
            self._key_queues.new,
            self._held,
            delivery_builders.find,
        )
        consumers = self._group_state.consumers
        waits_max = (
            0
            if self._group_state.is_crowded
            else self._group_state.waiting_max - self._group_state.waiting
        )
        turn = 1 + len(set(rows)) // (_TURNS * max(consumers.ready_count, 1))
        delivery_builder: DeliveryBuilder | None = None
        left = 0
        waiting: defaultdict[KeyQueue, list[int]] = defaultdict(list)
        end = base + len(rows)
        for offset, row_key in enumerate(rows, base):
            if row_key is None:
                end = offset
                break
            queue = get(row_key)
            if queue is None:
                if not left or delivery_builder is None or not delivery_builder.room:
                    delivery_builder, left = delivery_builders.of_anybody(), turn
                    if delivery_builder is None:
                        end = offset
                        break
                left -= 1
                queue, taker = new(row_key), delivery_builder
                queue.holder = taker.lease.consumer
            elif queue.holder is None or queue.unconfirmed or queue.dying or queue.held_until_ns:
                end = offset
                break
            else:
                holders = (
                    None
                    if queue.waiting
                    else find(queue.holder) or delivery_builders.of(queue.holder)
                )
                if holders is None or not holders.room:
                    if not waits_max or not consumers.is_anybody_ready:
                        end = offset
                        break
                    waits_max -= 1
                    waiting[queue].append(offset)
                    continue
                taker = holders
            queue.flight[offset] = taker.lease
            held[offset] = queue
            taker.offsets.append(offset)
            taker.room -= 1
            if not taker.room:
                delivery_builders.full(taker)
        for queue, offsets in waiting.items():
            self._key_queues.wait(queue, offsets)
            if not queue.shown:
                self._key_queues.show(queue)
        return end

    def _offer_failed(
        self, row_key: bytes | None, offset: int, now_ns: int, changed: dict[KeyQueue, None]
    ) -> bool:
        """A message that failed before a restart, and has to wait or to die. False: look at it later."""
        failure = self.failures[offset]
        until_ns = max(failure.not_before_ns, now_ns)
        if row_key is None:
            self._put_off(offset, until_ns)
            return True
        is_hopeless = self._is_hopeless(failure)
        if self._group_state.is_crowded and not is_hopeless:
            return False
        queue = self._key_queues.get(row_key) or self._key_queues.new(row_key)
        if is_hopeless:
            self._key_queues.die(queue, offset)
            self._put_off(offset, until_ns)
        else:
            self._key_queues.wait(queue, [offset])
            self._key_queues.hold(queue, until_ns)
        changed[queue] = None
        return True

    def _delivery_builder(
        self, queue: KeyQueue, delivery_builders: DeliveryBuilders
    ) -> DeliveryBuilder | None:
        return (
            delivery_builders.of_anybody()
            if queue.holder is None
            else delivery_builders.of(queue.holder)
        )

    def _fly(
        self,
        queue: KeyQueue,
        offset: int,
        delivery_builder: DeliveryBuilder,
        delivery_builders: DeliveryBuilders,
    ) -> None:
        queue.holder = delivery_builder.lease.consumer
        queue.flight[offset] = delivery_builder.lease
        self._held[offset] = queue
        delivery_builders.put(delivery_builder, offset)

    # --- What became of deliveries ---

    def acknowledge(self, lease: LeasedRange, mask: int, effects: Effects) -> None:
        super().acknowledge(lease, mask, effects)
        offsets = masks.offsets(lease.base, mask)
        for offset, queue in zip(offsets, map(self._held.pop, offsets, repeat(None)), strict=True):
            if queue is not None:
                flight = queue.flight
                del flight[offset]
                if not flight:
                    self._key_queues.land(queue)

    def give_back(self, returned: Sequence[tuple[LeasedRange, int]], effects: Effects) -> None:
        """Later messages of the same keys that are still out are recalled: a key's order holds."""
        keyless, by_queue = self._sort(returned)
        if keyless:
            super().give_back(keyless, effects)
        for queue, ended in by_queue.items():
            self._key_queues.wait(queue, self._bring_back(queue, ended, effects))
            self._key_queues.show(queue)

    def fail(
        self,
        returned: Sequence[tuple[LeasedRange, int]],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
        effects: Effects,
    ) -> None:
        """Of each key only the first that failed counts; it comes again with all later ones that are out."""
        keyless, by_queue = self._sort(returned)
        if keyless:
            super().fail(keyless, now_ns, delay_ns=delay_ns, reason=reason, effects=effects)
        for queue, ended in by_queue.items():
            if not ended:
                self._key_queues.show(queue)
                continue
            first = min(ended)
            failure = self._count(ended[first], first, now_ns, delay_ns, reason, effects)
            back = self._bring_back(queue, ended, effects)
            if self._is_hopeless(failure):
                back.remove(first)
                self._key_queues.die(queue, first)
                self._give_up(first, failure, effects)
            elif failure.not_before_ns > now_ns:
                self._key_queues.hold(queue, failure.not_before_ns)
            self._key_queues.wait(queue, back)
            self._key_queues.show(queue)

    def _sort(
        self, returned: Sequence[tuple[LeasedRange, int]]
    ) -> tuple[list[tuple[LeasedRange, int]], dict[KeyQueue, _Ended]]:
        """Messages without a key, and by queue those with one that are still owed. They are no longer in flight."""
        keyless: list[tuple[LeasedRange, int]] = []
        by_queue: defaultdict[KeyQueue, _Ended] = defaultdict(dict)
        for lease, mask in returned:
            for offset in masks.offsets(lease.base, mask):
                queue = self._held.pop(offset, None)
                if queue is None:
                    continue
                mask ^= 1 << offset - lease.base
                del queue.flight[offset]
                ended = by_queue[queue]
                if offset not in self.acked:
                    ended[offset] = lease
            if mask:
                keyless.append((lease, mask))
        return keyless, by_queue

    def _bring_back(self, queue: KeyQueue, ended: _Ended, effects: Effects) -> list[int]:
        """What comes again of a queue, in order: what ended, and all later ones, which are recalled."""
        if not ended:
            return []
        first = min(ended)
        for offset in sorted(o for o in queue.flight if o > first and o not in self.acked):
            lease = ended[offset] = queue.flight.pop(offset)
            bit = 1 << offset - lease.base
            lease.outstanding ^= bit
            lease.recalled |= bit
            queue.unconfirmed += 1
            _add_recall(effects.recalls, lease, offset)
        for offset, lease in ended.items():
            self._remember(lease, [offset])
        return sorted(ended)

    def confirm(self, lease: LeasedRange, mask: int) -> None:
        for offset in masks.offsets(lease.base, mask):
            queue = self._held.pop(offset)
            queue.unconfirmed -= 1
            if not queue.unconfirmed:
                self._key_queues.show(queue)

    # --- Delays and dead letters ---

    def ripen(self, delay: Delay, now_ns: int, effects: Effects) -> None:
        if delay.queue_key is None:
            super().ripen(delay, now_ns, effects)
        else:
            self._key_queues.ripen(delay.queue_key, now_ns)

    def dead_letter_stored(self, offset: int, effects: Effects) -> bool:
        is_settled = super().dead_letter_stored(offset, effects)
        if is_settled and offset in self._key_queues.dying:
            self._key_queues.died(offset)
        return is_settled


def _add_recall(recalls: list[tuple[int, DeliveryPart]], lease: LeasedRange, offset: int) -> None:
    if recalls:
        _, last = recalls[-1]
        if last.delivery == lease.id and last.end == offset:
            recalls[-1] = (lease.consumer.number, DeliveryPart(lease.id, last.begin, offset + 1))
            return
    recalls.append((lease.consumer.number, DeliveryPart(lease.id, offset, offset + 1)))
