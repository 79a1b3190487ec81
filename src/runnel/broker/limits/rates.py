"""A rate limit: amounts are charged to it, and it says how long to wait. Pure.

A second's worth may pass at once. A larger amount passes too, and the next one waits until the average holds again. So
a batch larger than a second's worth passes, and the limit is computed once per batch.
"""

from __future__ import annotations

from typing import Final

_SECOND_NS: Final = 1_000_000_000


class Rate:
    """A limit in units per second, with a burst of one second's worth."""

    __slots__ = ("_paid_until_ns", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        # The time at which everything charged so far would have passed at an even rate.
        self._paid_until_ns = 0

    def charge(self, amount: int, now_ns: int) -> None:
        begins_ns = max(self._paid_until_ns, now_ns)
        self._paid_until_ns = begins_ns + amount * _SECOND_NS // self.per_s

    def wait_ns(self, now_ns: int) -> int:
        """How long the next amount has to wait, whatever its size; 0: not at all."""
        return max(0, self._paid_until_ns - _SECOND_NS - now_ns)
