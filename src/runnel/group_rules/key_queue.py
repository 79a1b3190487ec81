"""The queue of one key's messages that are in flight or wait. A queue exists as long as it has any.

      in flight      waiting
      3  5  8        9  12  20         offsets of one key: messages in flight come before those that wait

A consumer may still work on messages that wait: they were recalled, and it has not confirmed yet that it stopped.
"""

from __future__ import annotations

from collections import deque

import msgspec

from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.windows import ConsumerWindow


class KeyQueue(msgspec.Struct, eq=False):
    """The messages of one key. The holder is the consumer that has some in flight; only it gets more of them."""

    key: bytes
    holder: ConsumerWindow | None = None
    flight: dict[int, LeasedRange] = {}  # by offset
    waiting: deque[int] | None = None  # lowest first; None saves memory if no message waits
    unconfirmed: int = 0  # recalled messages whose holder may still work on them
    dying: int = 0  # messages that are to become dead letters
    held_until_ns: int = 0  # 0: no delay
    shown: int = 0  # the first waiting message, if it can be delivered; 0: it cannot
    shown_to: ConsumerWindow | None = None  # the only consumer that may have it; None: any

    @property
    def is_open(self) -> bool:
        """Whether the first waiting message can be delivered as soon as a consumer has room."""
        return not (self.unconfirmed or self.dying or self.held_until_ns)

    @property
    def is_empty(self) -> bool:
        return not (self.flight or self.waiting or self.unconfirmed or self.dying)

    def wait(self, offsets: list[int]) -> None:
        """Add waiting messages, in order. Nearly always, all of them lie before or behind those that wait already."""
        if not self.waiting:
            self.waiting = deque(offsets)
        elif self.waiting[-1] < offsets[0]:
            self.waiting.extend(offsets)
        elif offsets[-1] < self.waiting[0]:
            self.waiting.extendleft(reversed(offsets))
        else:  # a message that was sent back from the dead letters may lie anywhere
            self.waiting = deque(sorted([*self.waiting, *offsets]))

    def drop(self, begin: int, end: int) -> None:
        """Remove waiting messages of a range."""
        if self.waiting:
            self.waiting = deque(o for o in self.waiting if not begin <= o < end)
