"""The messages of one key that are on their way. A queue lasts as long as there are any.

      in flight      waiting
      3  5  8        9  12  20         offsets of one key: what is in flight came before what waits

Some of those that wait may still be worked on: they were recalled, and their holder has not said yet that it stopped.
"""

from __future__ import annotations

from collections import deque

import msgspec

from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.windows import ConsumerWindow


class KeyQueue(msgspec.Struct, eq=False):
    """Whoever has messages of the key in flight is its holder, and only to the holder go more of them."""

    key: bytes
    holder: ConsumerWindow | None = None
    flight: dict[int, LeasedRange] = {}  # by offset
    waiting: deque[int] | None = None  # lowest first; None saves memory where nothing waits
    unconfirmed: int = 0  # recalled messages whose holder may still work on them
    dying: int = 0  # messages that are to become dead letters
    held_until_ns: int = 0  # 0: no delay
    shown: int = 0  # the first that waits, where it is wanted; 0: it is not
    shown_to: ConsumerWindow | None = None  # who alone may have it; None: anybody

    @property
    def is_open(self) -> bool:
        """Nothing but a consumer's room stands in the way of the first that waits."""
        return not (self.unconfirmed or self.dying or self.held_until_ns)

    @property
    def is_empty(self) -> bool:
        return not (self.flight or self.waiting or self.unconfirmed or self.dying)

    def wait(self, offsets: list[int]) -> None:
        """These have to wait; they are in order, and all lie before or behind what waits already, or nearly."""
        if not self.waiting:
            self.waiting = deque(offsets)
        elif self.waiting[-1] < offsets[0]:
            self.waiting.extend(offsets)
        elif offsets[-1] < self.waiting[0]:
            self.waiting.extendleft(reversed(offsets))
        else:  # a message that was sent back from the dead letters lies anywhere
            self.waiting = deque(sorted([*self.waiting, *offsets]))

    def drop(self, begin: int, end: int) -> None:
        """These need not wait any more: they are gone."""
        if self.waiting:
            self.waiting = deque(o for o in self.waiting if not begin <= o < end)
