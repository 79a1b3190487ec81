"""A rate that may not be exceeded for long: amounts are charged to it, and it says how long to wait. Pure.

A second's worth may go at once. More than that is not cut off: it goes, and whatever comes next waits until the average
holds again. So a batch that is larger than a second's worth passes, and the work is done once a batch.
"""

from __future__ import annotations

from typing import Final

_SECOND_NS: Final = 1_000_000_000


class Rate:
    """So many units a second, with a second's worth of burst."""

    __slots__ = ("_paid_until_ns", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        # The time at which everything charged so far would be through, had it gone evenly.
        self._paid_until_ns = 0

    def charge(self, amount: int, now_ns: int) -> None:
        begins_ns = max(self._paid_until_ns, now_ns)
        self._paid_until_ns = begins_ns + amount * _SECOND_NS // self.per_s

    def wait_ns(self, now_ns: int) -> int:
        """How long the next amount has to wait, whatever it is; 0: not at all."""
        return max(0, self._paid_until_ns - _SECOND_NS - now_ns)
