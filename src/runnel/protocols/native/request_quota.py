"""Limits how many requests one connection begins before other connections have their turn."""

from __future__ import annotations

from typing import Final

_REQUESTS_MAX: Final = 32
_REQUESTS_MIN: Final = 4


class RequestQuota:
    """The quota of requests per turn, shared by all sessions of a listener.

    `waiting` counts the sessions that have more requests and let others go first. The more there are, the fewer
    requests each begins per turn. Eight connections that never rested made a stored acknowledgement of a ninth wait
    37 ms (p50) with 32 requests a turn, 12 ms with 8 and 6 ms with 4 (bench/live.py, "saturated").
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0

    def requests(self) -> int:
        """How many requests a session may begin in this turn."""
        return max(_REQUESTS_MIN, _REQUESTS_MAX // (self.waiting + 1))
