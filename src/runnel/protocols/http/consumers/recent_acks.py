"""The recent acknowledgements of a polling consumer, so that a client that got no answer may repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

ACKED_MAX: Final = 10_000
_REMEMBERED_NS_MAX: Final = 60 * 1_000_000_000
_OFFSET_BITS: Final = 63

Offsets = Mapping[int, Sequence[int]]
"""Offsets of messages by delivery."""


class RecentAcks:
    """The messages that one consumer acknowledged in time in the last minute. Only their numbers are kept."""

    __slots__ = ("_when_ns",)

    def __init__(self) -> None:
        # In order of arrival. One number for each message: a tuple would take twice the memory.
        self._when_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._when_ns)

    def unknown(self, offsets: Offsets) -> dict[int, list[int]]:
        """The offsets that were not acknowledged recently; deliveries without any are left out."""
        rest = {
            delivery: [at for at in named if _number(delivery, at) not in self._when_ns]
            for delivery, named in offsets.items()
        }
        return {delivery: named for delivery, named in rest.items() if named}

    def add(self, acked: Iterable[tuple[int, int]], now_ns: int) -> None:
        """Remember these messages, each given by delivery and offset."""
        for delivery, offset in acked:
            self._when_ns[_number(delivery, offset)] = now_ns
        while len(self._when_ns) > ACKED_MAX:
            del self._when_ns[next(iter(self._when_ns))]

    def forget_old(self, now_ns: int) -> None:
        while self._when_ns:
            number, when_ns = next(iter(self._when_ns.items()))
            if now_ns - when_ns < _REMEMBERED_NS_MAX:
                return
            del self._when_ns[number]


def _number(delivery: int, offset: int) -> int:
    return delivery << _OFFSET_BITS | offset
