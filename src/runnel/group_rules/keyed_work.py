"""What a partition owes in key_shared mode: a key's messages to one consumer at a time, in order.

Messages without a key have no order, and are treated as in shared work. The others are looked at in the order of the
partition: each goes into the lane of its key, and from there to the lane's holder, or waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import Final, TypeAlias

from runnel.formats.work_heads import Part
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.delivery_builders import DeliveryBuilder, DeliveryBuilders
from runnel.group_rules.effects import Delivery, Effects, Failure, Want
from runnel.group_rules.group_state import Delay, GroupState
from runnel.group_rules.lane_table import LaneTable
from runnel.group_rules.lanes import Lane
from runnel.group_rules.leases import Lease
from runnel.group_rules.offset_set import GAP_MAX, OffsetSet
from runnel.group_rules.partition_work import SPAN_MAX, PartitionWork
from runnel.group_rules.windows import Consumer
from runnel.topics.names import TopicPartition

# How far ahead a lane is looked at for more to read along with its first.
_AHEAD_MAX: Final = 256
# So many turns has each consumer in one offer, if it has enough keys.
_TURNS: Final = 8

_Ended: TypeAlias = dict[int, Lease]
"""Messages of a lane that their leases have let go of, by offset."""


class KeyedWork(PartitionWork):
    """One partition. A keyed message that is not done and not new is in flight, waiting or dying, in its lane."""

    def __init__(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure],
        group_state: GroupState,
        now_ns: int,
    ) -> None:
        super().__init__(key, acked, failures, group_state, now_ns)
        self._lanes = LaneTable(key, self.due, group_state)
        self._held: dict[int, Lane] = {}  # by offset: what consumers have, recalled or not
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
        self._lanes.gone(begin, end)

    def close(self) -> None:
        super().close()
        self._lanes.close()

    # --- Wanting ---

    def want(self) -> Want | None:
        if self._unread:
            return self._want_unread()
        if not self.due and self._group_state.is_crowded and self._first_fresh() < self.end:
            self._group_state.stall(self.key)
            return None
        want = super().want()
        if want is None or want.begin not in self._lanes.waiting:
            return want
        consumers = self._group_state.consumers
        end = max(min(want.end, self.fresh), self._ahead(want.begin, consumers.room_messages))
        return self._want_all(want.begin, end, consumers.room_bytes)

    def want_for(self, consumer: Consumer) -> Want | None:
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
        """Where what waits in the lane behind its first ends, as far as it is near and there is room for it."""
        waiting = self._lanes.waiting[first].waiting
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
    ) -> list[Delivery]:
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
            if begin < self.fresh and (self._lanes.waiting or self.due):
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
                lane = self._lanes.get(row_key) or self._lanes.new(row_key)
                self._lanes.wait(lane, [offset])
                self._lanes.show(lane)

    def _offer_again(
        self, base: int, rows: Sequence[bytes | None], delivery_builders: DeliveryBuilders
    ) -> None:
        """Of messages seen before, those that are due, and those that are next in their lanes."""
        end = min(base + len(rows), self.fresh)
        shown = self.due.mask(base, end)
        for consumer in self._group_state.consumers.called:
            if (heads := consumer.heads.get(self.key)) is not None:
                shown |= heads.mask(base, end)
        for offset in masks.offsets(base, shown):
            lane = self._lanes.waiting.get(offset)
            if lane is not None:
                self._offer_lane(lane, base, end, delivery_builders)
            elif rows[offset - base] is None:
                delivery_builder = delivery_builders.of_anybody()
                if delivery_builder is not None:
                    self.due.discard(offset)
                    delivery_builders.put(delivery_builder, offset)

    def _offer_lane(
        self, lane: Lane, begin: int, end: int, delivery_builders: DeliveryBuilders
    ) -> None:
        """What is next in a lane and lies in a range, as much of it as its holder has room for."""
        delivery_builder = self._delivery_builder(lane, delivery_builders)
        if delivery_builder is not None:
            offsets = self._lanes.pop(lane, begin, end, delivery_builder.room)
            lane.holder = delivery_builder.lease.consumer
            lane.flight.update(dict.fromkeys(offsets, delivery_builder.lease))
            self._held.update(dict.fromkeys(offsets, lane))
            delivery_builders.put(delivery_builder, *offsets)
            self._lanes.show(lane)

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
        changed: dict[Lane, None] = {}
        lanes, failures, consumers = self._lanes, self.failures, self._group_state.consumers
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
                lane = lanes.get(row_key)
                if lane is None:
                    delivery_builder = delivery_builders.of_anybody()
                    if delivery_builder is None:
                        break
                    lane = lanes.new(row_key)
                elif lane.waiting or not lane.is_open:
                    delivery_builder = None
                else:
                    delivery_builder = self._delivery_builder(lane, delivery_builders)
                if delivery_builder is not None:
                    self._fly(lane, offset, delivery_builder, delivery_builders)
                elif self._group_state.is_crowded or not consumers.is_anybody_ready:
                    break
                else:
                    lanes.wait(lane, [offset])
                    changed[lane] = None
            offset += 1
        self.fresh = offset
        for lane in changed:
            self._lanes.show(lane)

    def _offer_plain(
        self, base: int, rows: Sequence[bytes | None], delivery_builders: DeliveryBuilders
    ) -> int:
        """The same where nothing has failed or is done, quickly (bench/queue.py, "work"): up to what is returned.

        Of many keys a few in a row go to one consumer before it is the next one's turn. Who is full stays so for this
        offer: what waits for them is put into its lanes at the end.
        """
        get, new, held, find = self._lanes.get, self._lanes.new, self._held, delivery_builders.find
        consumers = self._group_state.consumers
        waits_max = (
            0
            if self._group_state.is_crowded
            else self._group_state.waiting_max - self._group_state.waiting
        )
        turn = 1 + len(set(rows)) // (_TURNS * max(consumers.ready_count, 1))
        delivery_builder: DeliveryBuilder | None = None
        left = 0
        waiting: defaultdict[Lane, list[int]] = defaultdict(list)
        end = base + len(rows)
        for offset, row_key in enumerate(rows, base):
            if row_key is None:
                end = offset
                break
            lane = get(row_key)
            if lane is None:
                if not left or delivery_builder is None or not delivery_builder.room:
                    delivery_builder, left = delivery_builders.of_anybody(), turn
                    if delivery_builder is None:
                        end = offset
                        break
                left -= 1
                lane, taker = new(row_key), delivery_builder
                lane.holder = taker.lease.consumer
            elif lane.holder is None or lane.unconfirmed or lane.dying or lane.held_until_ns:
                end = offset
                break
            else:
                holders = (
                    None if lane.waiting else find(lane.holder) or delivery_builders.of(lane.holder)
                )
                if holders is None or not holders.room:
                    if not waits_max or not consumers.is_anybody_ready:
                        end = offset
                        break
                    waits_max -= 1
                    waiting[lane].append(offset)
                    continue
                taker = holders
            lane.flight[offset] = taker.lease
            held[offset] = lane
            taker.offsets.append(offset)
            taker.room -= 1
            if not taker.room:
                delivery_builders.full(taker)
        for lane, offsets in waiting.items():
            self._lanes.wait(lane, offsets)
            if not lane.shown:
                self._lanes.show(lane)
        return end

    def _offer_failed(
        self, row_key: bytes | None, offset: int, now_ns: int, changed: dict[Lane, None]
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
        lane = self._lanes.get(row_key) or self._lanes.new(row_key)
        if is_hopeless:
            self._lanes.die(lane, offset)
            self._put_off(offset, until_ns)
        else:
            self._lanes.wait(lane, [offset])
            self._lanes.hold(lane, until_ns)
        changed[lane] = None
        return True

    def _delivery_builder(
        self, lane: Lane, delivery_builders: DeliveryBuilders
    ) -> DeliveryBuilder | None:
        return (
            delivery_builders.of_anybody()
            if lane.holder is None
            else delivery_builders.of(lane.holder)
        )

    def _fly(
        self,
        lane: Lane,
        offset: int,
        delivery_builder: DeliveryBuilder,
        delivery_builders: DeliveryBuilders,
    ) -> None:
        lane.holder = delivery_builder.lease.consumer
        lane.flight[offset] = delivery_builder.lease
        self._held[offset] = lane
        delivery_builders.put(delivery_builder, offset)

    # --- What became of deliveries ---

    def acknowledge(self, lease: Lease, mask: int, effects: Effects) -> None:
        super().acknowledge(lease, mask, effects)
        offsets = masks.offsets(lease.base, mask)
        for offset, lane in zip(offsets, map(self._held.pop, offsets, repeat(None)), strict=True):
            if lane is not None:
                flight = lane.flight
                del flight[offset]
                if not flight:
                    self._lanes.land(lane)

    def give_back(self, returned: Sequence[tuple[Lease, int]]) -> None:
        keyless, by_lane = self._sort(returned)
        if keyless:
            super().give_back(keyless)
        effects = Effects()
        for lane, ended in by_lane.items():
            self._lanes.wait(lane, self._bring_back(lane, ended, effects))
            self._lanes.show(lane)
        assert not effects  # a consumer gives back all it has: nothing is left to be recalled

    def fail(
        self,
        returned: Sequence[tuple[Lease, int]],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
        effects: Effects,
    ) -> None:
        """Of each key only the first that failed counts; it comes again with all later ones that are out."""
        keyless, by_lane = self._sort(returned)
        if keyless:
            super().fail(keyless, now_ns, delay_ns=delay_ns, reason=reason, effects=effects)
        for lane, ended in by_lane.items():
            if not ended:
                self._lanes.show(lane)
                continue
            first = min(ended)
            failure = self._count(ended[first], first, now_ns, delay_ns, reason, effects)
            back = self._bring_back(lane, ended, effects)
            if self._is_hopeless(failure):
                back.remove(first)
                self._lanes.die(lane, first)
                self._bury(first, failure, effects)
            elif failure.not_before_ns > now_ns:
                self._lanes.hold(lane, failure.not_before_ns)
            self._lanes.wait(lane, back)
            self._lanes.show(lane)

    def _sort(
        self, returned: Sequence[tuple[Lease, int]]
    ) -> tuple[list[tuple[Lease, int]], dict[Lane, _Ended]]:
        """Messages without a key, and by lane those with one that are still owed. They are no longer in flight."""
        keyless: list[tuple[Lease, int]] = []
        by_lane: defaultdict[Lane, _Ended] = defaultdict(dict)
        for lease, mask in returned:
            for offset in masks.offsets(lease.base, mask):
                lane = self._held.pop(offset, None)
                if lane is None:
                    continue
                mask ^= 1 << offset - lease.base
                del lane.flight[offset]
                ended = by_lane[lane]
                if offset not in self.acked:
                    ended[offset] = lease
            if mask:
                keyless.append((lease, mask))
        return keyless, by_lane

    def _bring_back(self, lane: Lane, ended: _Ended, effects: Effects) -> list[int]:
        """What comes again of a lane, in order: what ended, and all later ones, which are recalled."""
        if not ended:
            return []
        first = min(ended)
        for offset in sorted(o for o in lane.flight if o > first and o not in self.acked):
            lease = ended[offset] = lane.flight.pop(offset)
            bit = 1 << offset - lease.base
            lease.outstanding ^= bit
            lease.recalled |= bit
            lane.unconfirmed += 1
            _add_recall(effects.recalls, lease, offset)
        for offset, lease in ended.items():
            self._remember(lease, [offset])
        return sorted(ended)

    def confirm(self, lease: Lease, mask: int) -> None:
        for offset in masks.offsets(lease.base, mask):
            lane = self._held.pop(offset)
            lane.unconfirmed -= 1
            if not lane.unconfirmed:
                self._lanes.show(lane)

    # --- Delays and dead letters ---

    def ripen(self, delay: Delay, now_ns: int, effects: Effects) -> None:
        if delay.lane_key is None:
            super().ripen(delay, now_ns, effects)
        else:
            self._lanes.ripen(delay.lane_key, now_ns)

    def buried(self, offset: int, effects: Effects) -> bool:
        is_buried = super().buried(offset, effects)
        if is_buried and offset in self._lanes.dying:
            self._lanes.died(offset)
        return is_buried


def _add_recall(recalls: list[tuple[int, Part]], lease: Lease, offset: int) -> None:
    if recalls:
        _, last = recalls[-1]
        if last.delivery == lease.id and last.end == offset:
            recalls[-1] = (lease.consumer.number, Part(lease.id, last.begin, offset + 1))
            return
    recalls.append((lease.consumer.number, Part(lease.id, offset, offset + 1)))
