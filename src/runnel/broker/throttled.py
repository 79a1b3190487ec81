"""Caches an expensive reading; refreshing it takes at most 2 % of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from runnel.platform.clock import Clock

T = TypeVar("T")

# Looking takes at most one part in so many of the time.
SHARE: Final = 50


class Throttled(Generic[T]):
    """The value of a reading, read again once fifty times the time that it took has passed.

    Statistics of a hundred shards are read whenever somebody asks, those of a hundred thousand every few seconds:
    whoever watches the broker does not slow it down. A value read anew is another object.
    """

    def __init__(self, read: Callable[[], T], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._value: T | None = None
        self._again_ns = 0  # of the monotonic clock

    def value(self) -> T:
        now_ns = self._clock.monotonic_ns()
        if self._value is None or now_ns >= self._again_ns:
            self._value = self._read()
            done_ns = self._clock.monotonic_ns()
            self._again_ns = done_ns + (done_ns - now_ns) * SHARE
        return self._value

    def forget(self) -> None:
        """What was read is known to be past: the next to ask reads anew."""
        self._value = None
