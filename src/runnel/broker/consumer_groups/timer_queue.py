"""Calls back when leases and delays are due; one task waits for the earliest."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from runnel.platform.clock import Clock


class TimerQueue:
    """Calls back at times of the monotonic clock. A callback that is no longer wanted finds nothing to do."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._earlier = asyncio.Event()

    def set(self, time_ns: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_ns, next(self._order), call))
        if self._heap[0][0] == time_ns:
            self._earlier.set()

    async def run(self) -> None:
        """Call back until cancelled."""
        while True:
            self._earlier.clear()
            self._fire()
            waits: list[asyncio.Task[object]] = [asyncio.create_task(self._earlier.wait())]
            if self._heap:
                waits.append(asyncio.create_task(self._sleep_until(self._heap[0][0])))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _sleep_until(self, time_ns: int) -> None:
        # Reads the clock when the sleep begins, not when it was decided: time may have passed in between.
        await self._clock.sleep((time_ns - self._clock.monotonic_ns()) / 1e9)

    def _fire(self) -> None:
        now_ns = self._clock.monotonic_ns()
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2]()
