"""The key queues of a partition, and the first messages of them that can be delivered.

A waiting message has to be read again before it is delivered. So each queue shows its first waiting message, if it can
be delivered: in the partition's `due` set, or, if the queue has a holder, in the `heads` of that consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from runnel.group_rules.group_state import GroupState
from runnel.group_rules.key_queue import KeyQueue
from runnel.group_rules.offset_set import OffsetSet
from runnel.topics.names import TopicPartition


class KeyQueues:
    """The queues by key, by waiting offset and by dying offset. After a change to a queue, call `show`."""

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

    def on_flight_ended(self, queue: KeyQueue) -> None:
        """No message of this queue is in flight any more."""
        if queue.waiting or queue.unconfirmed or queue.dying or queue.held_until_ns:
            self.show(queue)
        else:
            del self._key_queues[queue.key]

    def close(self) -> None:
        self._group_state.waiting -= len(self.waiting)
        for queue in self:
            self._group_state.delayed -= bool(queue.held_until_ns)
            self._hide(queue)

    # --- Waiting, delayed and dying messages ---

    def wait(self, queue: KeyQueue, offsets: list[int]) -> None:
        """Let these messages wait in their queue."""
        if offsets:
            queue.wait(offsets)
            self._group_state.waiting += len(offsets)
            self.waiting.update(dict.fromkeys(offsets, queue))

    def pop(self, queue: KeyQueue, begin: int, end: int, count_max: int) -> list[int]:
        """Remove the first waiting messages that lie within a range, at most `count_max`, and return them."""
        waiting = queue.waiting
        assert waiting
        offsets: list[int] = []
        while waiting and begin <= waiting[0] < end and len(offsets) < count_max:
            offsets.append(waiting.popleft())
            del self.waiting[offsets[-1]]
        self._group_state.waiting -= len(offsets)
        return offsets

    def hold(self, queue: KeyQueue, until_ns: int) -> None:
        """Deliver no message of this queue before a time."""
        if until_ns > queue.held_until_ns:
            self._group_state.delayed += not queue.held_until_ns
            queue.held_until_ns = until_ns
            self._group_state.delay(until_ns, self._key, queue_key=queue.key)

    def end_hold(self, row_key: bytes, now_ns: int) -> None:
        """Deliver from a queue again, unless it has been held for longer meanwhile."""
        queue = self._key_queues.get(row_key)
        if queue is not None and 0 < queue.held_until_ns <= now_ns:
            queue.held_until_ns = 0
            self._group_state.delayed -= 1
            self.show(queue)

    def add_dying(self, queue: KeyQueue, offset: int) -> None:
        """A message of this queue is to become a dead letter."""
        queue.dying += 1
        self.dying[offset] = queue

    def remove_dying(self, offset: int) -> None:
        """A message has become a dead letter, or will not become one."""
        queue = self.dying.pop(offset)
        queue.dying -= 1
        self.show(queue)

    def gone(self, begin: int, end: int) -> None:
        """Remove all waiting and dying messages of a range."""
        for offset in _within(self.dying, begin, end):
            self.remove_dying(offset)
        found = _within(self.waiting, begin, end)
        self._group_state.waiting -= len(found)
        queues = {self.waiting.pop(offset): None for offset in found}
        for queue in queues:
            queue.drop(begin, end)
            self.show(queue)

    # --- Shown messages ---

    def show(self, queue: KeyQueue) -> None:
        """After a change: show the first waiting message if it can be delivered, or remove an empty queue."""
        if not queue.flight and not queue.unconfirmed:
            queue.holder = None
        if queue.shown:
            self._hide(queue)
        if queue.waiting and queue.is_open:
            queue.shown = queue.waiting[0]
            queue.shown_to = queue.holder
            if queue.holder is None:
                self._due.add(queue.shown)
                self._group_state.mark_busy(self._key)
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
