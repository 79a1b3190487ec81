"""One partition of a group in key_shared mode: a key's messages go to one consumer at a time, in order.

Messages without a key have no order and are delivered as in shared mode. Messages with a key are read in the order of
the partition. Each goes into the queue of its key: from there to the queue's holder, or it waits.
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

# How many waiting messages of a queue one read may cover.
_AHEAD_MAX: Final = 256
# The turns of each consumer in one offer, if there are enough keys.
_TURNS: Final = 8

_Ended: TypeAlias = dict[int, LeasedRange]
"""Messages of a queue whose lease has ended, by offset."""


class KeyedPartition(SharedPartition):
    """One partition. A keyed message below `fresh` that is not done is in flight, waiting or dying in its queue."""

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
        self._held: dict[
            int, KeyQueue
        ] = {}  # by offset: messages that consumers have, recalled or not
        # Messages sent back from the dead letters. Their keys are unknown, so they are read before anything newer goes.
        self._unread = OffsetSet()
        # Leases of a former owner, of messages that are not read here yet: reading them delivers nothing.
        self._adopted = OffsetSet()
        self._adopted_end = 0

    def _recover(self, now_ns: int) -> None:
        """Do nothing: earlier failures are handled when their messages are read, since keys are unknown until then."""

    # --- Stored messages ---

    def _owe_again(self, offset: int) -> None:
        self._unread.add(offset)

    def gone(self, begin: int, end: int, effects: Effects) -> None:
        super().gone(begin, end, effects)
        self._unread.discard_range(begin, end)
        self._key_queues.gone(begin, end)

    def close(self) -> None:
        super().close()
        self._key_queues.close()

    def adopt(
        self,
        lease: LeasedRange,
        outstanding: int,
        recalled: int,
        row_keys: Mapping[int, bytes | None],
    ) -> tuple[int, int]:
        """Continue a lease: its consumer holds the keys of its messages. Messages that are gone are left out."""
        outstanding = self._still_owed(lease.base, outstanding)
        recalled = self._still_owed(lease.base, recalled) & ~outstanding
        for offset in masks.offsets(lease.base, outstanding):
            if offset not in row_keys:
                outstanding ^= 1 << offset - lease.base
                continue
            self.extend(offset + 1)
            self._adopted.add(offset)
            self._adopted_end = max(self._adopted_end, offset + 1)
            if (row_key := row_keys[offset]) is not None:
                queue = self._key_queues.get(row_key) or self._key_queues.new(row_key)
                queue.holder = lease.consumer
                queue.flight[offset] = lease
                self._held[offset] = queue
        for offset in masks.offsets(lease.base, recalled):
            row_key = row_keys.get(offset)
            if row_key is None:
                recalled ^= 1 << offset - lease.base
                continue
            queue = self._key_queues.get(row_key) or self._key_queues.new(row_key)
            queue.holder = queue.holder or lease.consumer
            queue.unconfirmed += 1
            self._held[offset] = queue
        return outstanding, recalled

    # --- Reads ---

    def want(self) -> Want | None:
        if self.awaited is not None:
            return super().want()
        if self._unread:
            return self._want_unread()
        if not self.due and self._group_state.is_crowded and self._first_fresh() < self.end:
            self._group_state.mark_stalled(self.key)
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
        assert stretch is not None  # empty heads are removed
        begin, end = stretch
        messages, size_bytes = consumer.room
        return self._want_all(begin, max(end, self._ahead(begin, messages)), size_bytes)

    def _want_unread(self) -> Want:
        stretch = self._unread.stretch()
        assert stretch is not None
        return self._want_all(*stretch, self._group_state.consumers.room_bytes)

    def _want_all(self, begin: int, end: int, bytes_max: int) -> Want:
        """A read without a limit of messages: the wanted ones may lie far apart among others."""
        return Want(self.key, begin, end, end - begin, bytes_max)

    def _ahead(self, first: int, messages: int) -> int:
        """The end of the waiting messages of a queue that are worth reading with its first: near, and with room."""
        waiting = self._key_queues.waiting[first].waiting
        assert waiting is not None
        last = first
        for offset in islice(waiting, min(messages, _AHEAD_MAX)):
            if offset - last > GAP_MAX:
                break
            last = offset
        return last + 1

    # --- Deliveries ---

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
        deliveries: list[LeasedDelivery] = []
        if self.awaited is not None:
            return deliveries
        for begin in range(base, base + count, SPAN_MAX):
            rows = row_keys[begin - base : begin - base + SPAN_MAX]
            if self._unread:
                self._read(begin, rows)
            if self._unread:
                continue
            delivery_builders = DeliveryBuilders(
                self._group_state, self.key, begin, cost_bytes, now_ns
            )
            again_end = max(self.fresh, self._adopted_end)
            if begin < again_end and (self._key_queues.waiting or self.due):
                self._offer_again(begin, rows, delivery_builders)
            if begin + len(rows) > self.fresh:
                self._offer_new(begin, rows, now_ns, delivery_builders)
            deliveries += delivery_builders.deliver(self._attempts)
        return deliveries

    def _read(self, base: int, rows: Sequence[bytes | None]) -> None:
        """Queue messages that were sent back from the dead letters, now that their keys are known."""
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
        """Deliver messages seen before: those that are due, and those that are next in their queues."""
        end = min(base + len(rows), max(self.fresh, self._adopted_end))
        shown = self.due.mask(base, end)
        for consumer in self._group_state.consumers.with_heads:
            if (heads := consumer.heads.get(self.key)) is not None:
                shown |= heads.mask(base, end)
        for offset in masks.offsets(base, shown):
            queue = self._key_queues.waiting.get(offset)
            if queue is not None:
                self._offer_queue(queue, base, end, delivery_builders)
            elif rows[offset - base] is None:
                delivery_builder = delivery_builders.for_any_consumer()
                if delivery_builder is not None:
                    self.due.discard(offset)
                    delivery_builders.put(delivery_builder, offset)

    def _offer_queue(
        self, queue: KeyQueue, begin: int, end: int, delivery_builders: DeliveryBuilders
    ) -> None:
        """Deliver the next messages of a queue that lie in a range, as many as its holder has room for."""
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
        """Deliver new messages or let them wait, in order, up to the first for which neither is possible."""
        first = offset = self._first_fresh()
        end = base + len(rows)
        if first < base:
            return
        done = self.acked.mask(first, end)
        if self._adopted:
            done |= self._adopted.mask(first, end)
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
                delivery_builder = delivery_builders.for_any_consumer()
                if delivery_builder is None:
                    break
                delivery_builders.put(delivery_builder, offset)
            else:
                queue = queues.get(row_key)
                if queue is None:
                    delivery_builder = delivery_builders.for_any_consumer()
                    if delivery_builder is None:
                        break
                    queue = queues.new(row_key)
                elif queue.waiting or not queue.is_open:
                    delivery_builder = None
                else:
                    delivery_builder = self._delivery_builder(queue, delivery_builders)
                if delivery_builder is not None:
                    self._put_in_flight(queue, offset, delivery_builder, delivery_builders)
                elif self._group_state.is_crowded or not consumers.is_any_ready:
                    break
                else:
                    queues.wait(queue, [offset])
                    changed[queue] = None
            offset += 1
        self.fresh = offset
        if self._adopted:
            self._adopted.discard_range(first, offset)
        for queue in changed:
            self._key_queues.show(queue)

    def _offer_plain(
        self, base: int, rows: Sequence[bytes | None], delivery_builders: DeliveryBuilders
    ) -> int:
        """The fast path of `_offer_new` (bench/queue.py, "work"), for rows of which none has failed or is done.

        Returns the offset at which it stopped. With many keys, a few in a row go to one consumer before the next
        consumer's turn. A full consumer stays full for this offer: messages that wait for it are queued at the end.
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
                    delivery_builder, left = delivery_builders.for_any_consumer(), turn
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
                holder_builder = (
                    None
                    if queue.waiting
                    else find(queue.holder) or delivery_builders.for_consumer(queue.holder)
                )
                if holder_builder is None or not holder_builder.room:
                    if not waits_max or not consumers.is_any_ready:
                        end = offset
                        break
                    waits_max -= 1
                    waiting[queue].append(offset)
                    continue
                taker = holder_builder
            queue.flight[offset] = taker.lease
            held[offset] = queue
            taker.offsets.append(offset)
            taker.room -= 1
            if not taker.room:
                delivery_builders.on_full(taker)
        for queue, offsets in waiting.items():
            self._key_queues.wait(queue, offsets)
            if not queue.shown:
                self._key_queues.show(queue)
        return end

    def _offer_failed(
        self, row_key: bytes | None, offset: int, now_ns: int, changed: dict[KeyQueue, None]
    ) -> bool:
        """Delay a message that failed before a restart, or give it up. False: the group is too crowded for it."""
        failure = self.failures[offset]
        until_ns = max(failure.not_before_ns, now_ns)
        if row_key is None:
            self._delay(offset, until_ns)
            return True
        is_hopeless = self._is_hopeless(failure)
        if self._group_state.is_crowded and not is_hopeless:
            return False
        queue = self._key_queues.get(row_key) or self._key_queues.new(row_key)
        if is_hopeless:
            self._key_queues.add_dying(queue, offset)
            self._delay(offset, until_ns)
        else:
            self._key_queues.wait(queue, [offset])
            self._key_queues.hold(queue, until_ns)
        changed[queue] = None
        return True

    def _delivery_builder(
        self, queue: KeyQueue, delivery_builders: DeliveryBuilders
    ) -> DeliveryBuilder | None:
        return (
            delivery_builders.for_any_consumer()
            if queue.holder is None
            else delivery_builders.for_consumer(queue.holder)
        )

    def _put_in_flight(
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

    # --- Ends of deliveries ---

    def acknowledge(self, lease: LeasedRange, mask: int, effects: Effects) -> None:
        super().acknowledge(lease, mask, effects)
        offsets = masks.offsets(lease.base, mask)
        for offset, queue in zip(offsets, map(self._held.pop, offsets, repeat(None)), strict=True):
            if queue is not None:
                flight = queue.flight
                del flight[offset]
                if not flight:
                    self._key_queues.on_flight_ended(queue)

    def give_back(self, returned: Sequence[tuple[LeasedRange, int]], effects: Effects) -> None:
        """Return messages, and recall later messages of their keys that are in flight, to keep the order of keys."""
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
        """Count the first failed message of each key; it is due again with all later ones that are in flight."""
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
                self._key_queues.add_dying(queue, first)
                self._request_dead_letter(first, failure, effects)
            elif failure.not_before_ns > now_ns:
                self._key_queues.hold(queue, failure.not_before_ns)
            self._key_queues.wait(queue, back)
            self._key_queues.show(queue)

    def _sort(
        self, returned: Sequence[tuple[LeasedRange, int]]
    ) -> tuple[list[tuple[LeasedRange, int]], dict[KeyQueue, _Ended]]:
        """Take messages out of flight. Returns those without a key, and by queue those with one that are owed."""
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
        """Recall the later messages of a queue. Returns all that are due again, in order, with those that ended."""
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
            self._note_first_delivery(lease, [offset])
        return sorted(ended)

    def confirm_recall(self, lease: LeasedRange, mask: int) -> None:
        for offset in masks.offsets(lease.base, mask):
            queue = self._held.pop(offset)
            queue.unconfirmed -= 1
            if not queue.unconfirmed:
                self._key_queues.show(queue)

    # --- Delays and dead letters ---

    def end_delay(self, delay: Delay, now_ns: int, effects: Effects) -> None:
        if delay.queue_key is None:
            super().end_delay(delay, now_ns, effects)
        else:
            self._key_queues.end_hold(delay.queue_key, now_ns)

    def dead_letter_stored(self, offset: int, effects: Effects) -> bool:
        is_settled = super().dead_letter_stored(offset, effects)
        if is_settled and offset in self._key_queues.dying:
            self._key_queues.remove_dying(offset)
        return is_settled


def _add_recall(recalls: list[tuple[int, DeliveryPart]], lease: LeasedRange, offset: int) -> None:
    if recalls:
        _, last = recalls[-1]
        if last.delivery == lease.id and last.end == offset:
            recalls[-1] = (lease.consumer.number, DeliveryPart(lease.id, last.begin, offset + 1))
            return
    recalls.append((lease.consumer.number, DeliveryPart(lease.id, offset, offset + 1)))
