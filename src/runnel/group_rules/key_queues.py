"""The queues of a partition, and what of them is shown to be wanted.

To deliver a message that waited it has to be read again. So the first of each queue that could be delivered is shown:
among what is due for anybody, or, if the queue has a holder, among the heads of that consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from runnel.group_rules.group_state import GroupState
from runnel.group_rules.key_queue import KeyQueue
from runnel.group_rules.offset_set import OffsetSet
from runnel.topics.names import TopicPartition


class KeyQueues:
    """Queues by key, and by what waits or dies in them. Whoever changes a queue shows it again."""

    def __init__(self, key: TopicPartition, due: OffsetSet, group_state: GroupState) -> None:
        self._key = key
        self._due = due
        self._group_state = group_state
        self._key_queues: dict[bytes, KeyQueue] = {}
        self.get: Final = self._key_queues.get
        self.waiting: dict[int, KeyQueue] = {}
        self.dying: dict[int, KeyQueue] = {}

    def __iter__(self) -> Iterator[KeyQueue]:
        return iter(self._key_queues.values())

    def new(self, row_key: bytes) -> KeyQueue:
        queue = self._key_queues[row_key] = KeyQueue(row_key)
        return queue

    def land(self, queue: KeyQueue) -> None:
        """Nothing of its key is in flight any more."""
        if queue.waiting or queue.unconfirmed or queue.dying or queue.held_until_ns:
            self.show(queue)
        else:
            del self._key_queues[queue.key]

    def close(self) -> None:
        self._group_state.waiting -= len(self.waiting)
        for queue in self:
            self._group_state.delayed -= bool(queue.held_until_ns)
            self._hide(queue)

    # --- What waits, is held, or dies ---

    def wait(self, queue: KeyQueue, offsets: list[int]) -> None:
        """These have to wait in their queue."""
        if offsets:
            queue.wait(offsets)
            self._group_state.waiting += len(offsets)
            self.waiting.update(dict.fromkeys(offsets, queue))

    def pop(self, queue: KeyQueue, begin: int, end: int, count_max: int) -> list[int]:
        """The first that wait do so no more: those within a range, and not more than so many."""
        waiting = queue.waiting
        assert waiting
        offsets: list[int] = []
        while waiting and begin <= waiting[0] < end and len(offsets) < count_max:
            offsets.append(waiting.popleft())
            del self.waiting[offsets[-1]]
        self._group_state.waiting -= len(offsets)
        return offsets

    def hold(self, queue: KeyQueue, until_ns: int) -> None:
        """Nothing of a queue may be delivered before this time."""
        if until_ns > queue.held_until_ns:
            self._group_state.delayed += not queue.held_until_ns
            queue.held_until_ns = until_ns
            self._group_state.delay(until_ns, self._key, queue_key=queue.key)

    def ripen(self, row_key: bytes, now_ns: int) -> None:
        """The time until which a queue was held may be over: unless it has been held for longer since."""
        queue = self._key_queues.get(row_key)
        if queue is not None and 0 < queue.held_until_ns <= now_ns:
            queue.held_until_ns = 0
            self._group_state.delayed -= 1
            self.show(queue)

    def die(self, queue: KeyQueue, offset: int) -> None:
        """A message of the queue is to become a dead letter."""
        queue.dying += 1
        self.dying[offset] = queue

    def died(self, offset: int) -> None:
        """It has become one, or nothing will come of it."""
        queue = self.dying.pop(offset)
        queue.dying -= 1
        self.show(queue)

    def gone(self, begin: int, end: int) -> None:
        """Nothing of this range waits or dies any more."""
        for offset in _within(self.dying, begin, end):
            self.died(offset)
        found = _within(self.waiting, begin, end)
        self._group_state.waiting -= len(found)
        queues = {self.waiting.pop(offset): None for offset in found}
        for queue in queues:
            queue.drop(begin, end)
            self.show(queue)

    # --- Showing ---

    def show(self, queue: KeyQueue) -> None:
        """Whatever has changed in a queue: show its first where it is wanted, and end a queue that is empty."""
        if not queue.flight and not queue.unconfirmed:
            queue.holder = None
        if queue.shown:
            self._hide(queue)
        if queue.waiting and queue.is_open:
            queue.shown = queue.waiting[0]
            queue.shown_to = queue.holder
            if queue.holder is None:
                self._due.add(queue.shown)
                self._group_state.call(self._key)
            else:
                heads = queue.holder.heads.get(self._key)
                if heads is None:
                    heads = queue.holder.heads[self._key] = OffsetSet()
                    self._group_state.consumers.update(queue.holder)
                heads.add(queue.shown)
        elif queue.is_empty:
            self._group_state.delayed -= bool(queue.held_until_ns)
            del self._key_queues[queue.key]

    def _hide(self, queue: KeyQueue) -> None:
        if not queue.shown:
            return
        if queue.shown_to is None:
            self._due.discard(queue.shown)
        else:
            heads = queue.shown_to.heads[self._key]
            heads.discard(queue.shown)
            if not heads:
                del queue.shown_to.heads[self._key]
                self._group_state.consumers.update(queue.shown_to)
        queue.shown = 0


def _within(offsets: Mapping[int, object], begin: int, end: int) -> list[int]:
    if end - begin <= len(offsets):
        return [offset for offset in range(begin, end) if offset in offsets]
    return [offset for offset in offsets if begin <= offset < end]
