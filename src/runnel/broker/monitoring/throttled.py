"""Caches an expensive reading; refreshing it takes at most 2 % of the time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from runnel.platform.clock import Clock

T = TypeVar("T")

# Reading takes at most one part in this many of the time.
_SHARE: Final = 50


class Throttled(Generic[T]):
    """The value of a reading, read again once fifty times the time that it took has passed.

    Statistics of a hundred shards are read at each request, statistics of a hundred thousand every few seconds:
    monitoring does not slow the broker down. A new reading is a new object.
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
            self._again_ns = done_ns + (done_ns - now_ns) * _SHARE
        return self._value

    def forget(self) -> None:
        """Discard the value, which is known to be out of date: the next request reads it again."""
        self._value = None


class ThrottledAsync(Generic[T]):
    """`Throttled` for a reading that has to be awaited."""

    def __init__(self, read: Callable[[], Awaitable[T]], clock: Clock, *, first: T) -> None:
        """`first` is the value until the first reading is done, for those who do not wait for it."""
        self.last = first
        self._read = read
        self._clock = clock
        self._again_ns = 0  # of the monotonic clock

    async def value(self) -> T:
        began_ns = self._clock.monotonic_ns()
        if began_ns >= self._again_ns:
            self.last = await self._read()
            done_ns = self._clock.monotonic_ns()
            self._again_ns = done_ns + (done_ns - began_ns) * _SHARE
        return self.last

    def forget(self) -> None:
        """Read again at the next request."""
        self._again_ns = 0
