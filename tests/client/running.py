"""Running client tests: on both event loops, with a clock that a test can move."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import uvloop

P = ParamSpec("P")

SECONDS_MAX = 20


def in_both_loops(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test under asyncio's own loop and under uvloop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def scenario() -> None:
            async with asyncio.timeout(SECONDS_MAX):
                await test(*args, **kwargs)

        for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(scenario())

    return run


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn, sockets included, until something has come about."""
    while not condition():  # noqa: ASYNC110 - what is waited for is the server's doing
        await asyncio.sleep(0)


class FakeTimers:
    """Clocks and timers that stand still until a test moves them."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000
        self._order = itertools.count()
        self._due: list[tuple[int, int, FakeHandle]] = []

    def time_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def call_later(self, seconds: float, callback: Callable[[], object]) -> FakeHandle:
        handle = FakeHandle(callback)
        at_ns = self._now_ns + round(seconds * 1e9)
        heapq.heappush(self._due, (at_ns, next(self._order), handle))
        return handle

    @property
    def waiting(self) -> int:
        """Timers that are set."""
        return sum(not handle.is_cancelled for _, _, handle in self._due)

    async def advance(self, seconds: float) -> None:
        """Move on, ringing whatever is due on the way, each at its time."""
        await self._settle()
        end_ns = self._now_ns + round(seconds * 1e9)
        while self._due and self._due[0][0] <= end_ns:
            at_ns, _, handle = heapq.heappop(self._due)
            self._now_ns = max(self._now_ns, at_ns)
            if not handle.is_cancelled:
                handle.callback()
                await self._settle()
        self._now_ns = end_ns
        await self._settle()

    async def advance_until(self, condition: Callable[[], object]) -> None:
        """Move on in small steps, while sockets have their time too, until something has come about."""
        while not condition():
            await self.advance(0.02)

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


class FakeHandle:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
