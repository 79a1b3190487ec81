"""The lanes of a partition, and what of them is shown to be wanted.

To deliver a message that waited it has to be read again. So the first of each lane that could be delivered is shown:
among what is due for anybody, or, if the lane has a holder, among the heads of that consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from runnel.group_rules.group_state import GroupState
from runnel.group_rules.lanes import Lane
from runnel.group_rules.offset_set import OffsetSet
from runnel.topics.names import TopicPartition


class LaneTable:
    """Lanes by key, and by what waits or dies in them. Whoever changes a lane shows it again."""

    def __init__(self, key: TopicPartition, due: OffsetSet, group_state: GroupState) -> None:
        self._key = key
        self._due = due
        self._group_state = group_state
        self._lanes: dict[bytes, Lane] = {}
        self.get: Final = self._lanes.get
        self.waiting: dict[int, Lane] = {}
        self.dying: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def new(self, row_key: bytes) -> Lane:
        lane = self._lanes[row_key] = Lane(row_key)
        return lane

    def land(self, lane: Lane) -> None:
        """Nothing of its key is in flight any more."""
        if lane.waiting or lane.unconfirmed or lane.dying or lane.held_until_ns:
            self.show(lane)
        else:
            del self._lanes[lane.key]

    def close(self) -> None:
        self._group_state.waiting -= len(self.waiting)
        for lane in self:
            self._group_state.delayed -= bool(lane.held_until_ns)
            self._hide(lane)

    # --- What waits, is held, or dies ---

    def wait(self, lane: Lane, offsets: list[int]) -> None:
        """These have to wait in their lane."""
        if offsets:
            lane.wait(offsets)
            self._group_state.waiting += len(offsets)
            self.waiting.update(dict.fromkeys(offsets, lane))

    def pop(self, lane: Lane, begin: int, end: int, count_max: int) -> list[int]:
        """The first that wait do so no more: those within a range, and not more than so many."""
        waiting = lane.waiting
        assert waiting
        offsets: list[int] = []
        while waiting and begin <= waiting[0] < end and len(offsets) < count_max:
            offsets.append(waiting.popleft())
            del self.waiting[offsets[-1]]
        self._group_state.waiting -= len(offsets)
        return offsets

    def hold(self, lane: Lane, until_ns: int) -> None:
        """Nothing of a lane may be delivered before this time."""
        if until_ns > lane.held_until_ns:
            self._group_state.delayed += not lane.held_until_ns
            lane.held_until_ns = until_ns
            self._group_state.delay(until_ns, self._key, lane_key=lane.key)

    def ripen(self, row_key: bytes, now_ns: int) -> None:
        """The time until which a lane was held may be over: unless it has been held for longer since."""
        lane = self._lanes.get(row_key)
        if lane is not None and 0 < lane.held_until_ns <= now_ns:
            lane.held_until_ns = 0
            self._group_state.delayed -= 1
            self.show(lane)

    def die(self, lane: Lane, offset: int) -> None:
        """A message of the lane is to become a dead letter."""
        lane.dying += 1
        self.dying[offset] = lane

    def died(self, offset: int) -> None:
        """It has become one, or nothing will come of it."""
        lane = self.dying.pop(offset)
        lane.dying -= 1
        self.show(lane)

    def gone(self, begin: int, end: int) -> None:
        """Nothing of this range waits or dies any more."""
        for offset in _within(self.dying, begin, end):
            self.died(offset)
        found = _within(self.waiting, begin, end)
        self._group_state.waiting -= len(found)
        lanes = {self.waiting.pop(offset): None for offset in found}
        for lane in lanes:
            lane.drop(begin, end)
            self.show(lane)

    # --- Showing ---

    def show(self, lane: Lane) -> None:
        """Whatever has changed in a lane: show its first where it is wanted, and end a lane that is empty."""
        if not lane.flight and not lane.unconfirmed:
            lane.holder = None
        if lane.shown:
            self._hide(lane)
        if lane.waiting and lane.is_open:
            lane.shown = lane.waiting[0]
            lane.shown_to = lane.holder
            if lane.holder is None:
                self._due.add(lane.shown)
                self._group_state.call(self._key)
            else:
                heads = lane.holder.heads.get(self._key)
                if heads is None:
                    heads = lane.holder.heads[self._key] = OffsetSet()
                    self._group_state.consumers.update(lane.holder)
                heads.add(lane.shown)
        elif lane.is_empty:
            self._group_state.delayed -= bool(lane.held_until_ns)
            del self._lanes[lane.key]

    def _hide(self, lane: Lane) -> None:
        if not lane.shown:
            return
        if lane.shown_to is None:
            self._due.discard(lane.shown)
        else:
            heads = lane.shown_to.heads[self._key]
            heads.discard(lane.shown)
            if not heads:
                del lane.shown_to.heads[self._key]
                self._group_state.consumers.update(lane.shown_to)
        lane.shown = 0


def _within(offsets: Mapping[int, object], begin: int, end: int) -> list[int]:
    if end - begin <= len(offsets):
        return [offset for offset in range(begin, end) if offset in offsets]
    return [offset for offset in offsets if begin <= offset < end]
