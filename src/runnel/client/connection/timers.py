"""The client's clocks and timers, and waits that end with a clear error.

All delays, backoffs and deadlines use them, so that a test's clock can drive the client.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from runnel.errors import RunnelError

_T = TypeVar("_T")


class Usual(enum.Enum):
    """The default of arguments for which None has a meaning of its own."""

    DEADLINE = "the bus's deadline"


class Handle(Protocol):
    """A timer that has been set."""

    def cancel(self) -> object: ...


class Timers(Protocol):
    """The clocks and timers of one event loop."""

    def time_ns(self) -> int: ...

    def monotonic_ns(self) -> int: ...

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle: ...


class LoopTimers:
    """The machine's clocks, and the running loop's timers."""

    time_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle:
        return self._loop.call_later(seconds, callback)


class Deadline:
    """The moment at which a wait gives up. Without seconds it never comes."""

    __slots__ = ("_at_ns", "_timers", "seconds")

    def __init__(self, timers: Timers, seconds: float | None) -> None:
        self.seconds = seconds
        self._timers = timers
        self._at_ns = None if seconds is None else timers.monotonic_ns() + round(seconds * 1e9)

    @property
    def left_s(self) -> float:
        if self._at_ns is None:
            return math.inf
        return max(0.0, (self._at_ns - self._timers.monotonic_ns()) / 1e9)

    async def wait(self, future: asyncio.Future[_T], expired: Callable[[], RunnelError]) -> _T:
        """The future's result, or the error that `expired` makes if it does not come in time.

        The future must be the caller's own: cancelling the wait cancels the future.
        """
        if self._at_ns is None or future.done():
            return await future

        def give_up() -> None:
            if not future.done():
                future.set_exception(expired())

        handle = self._timers.call_later(self.left_s, give_up)
        try:
            return await future
        finally:
            handle.cancel()


async def sleep(timers: Timers, seconds: float) -> None:
    """Wait for some seconds of these timers."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    handle = timers.call_later(seconds, wake)
    try:
        await woken
    finally:
        handle.cancel()
