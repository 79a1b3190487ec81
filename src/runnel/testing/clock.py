"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq

NS_PER_SECOND = 1_000_000_000


class VirtualClock:
    """Wall and monotonic time that a test controls; sleepers wake when the clock is advanced.

    Everything runs on the loop's thread. `advance` wakes sleepers by their deadlines, earliest first; with the same
    deadline, in the order in which they began to sleep. They run in the next turn of the loop, and then see the time
    to which the clock was advanced.
    """

    def __init__(self, start_ns: int = 1_700_000_000 * NS_PER_SECOND) -> None:
        self._wall_ns = start_ns
        self._monotonic_ns = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sleep_count = 0

    def time_ns(self) -> int:
        """The wall clock, in nanoseconds since 1970 UTC."""
        return self._wall_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds since the clock was made; deadlines use it."""
        return self._monotonic_ns

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was advanced by this much."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        deadline_ns = self._monotonic_ns + round(seconds * NS_PER_SECOND)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleep_count += 1
        heapq.heappush(self._sleepers, (deadline_ns, self._sleep_count, woken))
        await woken

    def advance(self, ns: int) -> None:
        """Advance both clocks, and wake the sleepers whose deadlines have passed."""
        if ns < 0:
            raise ValueError(f"time does not pass by {ns} ns; step_wall moves the wall clock back")
        self._wall_ns += ns
        self._monotonic_ns += ns
        while self._sleepers and self._sleepers[0][0] <= self._monotonic_ns:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)

    def step_wall(self, ns: int) -> None:
        """Set the wall clock forward or back, as an administrator would; no sleeper wakes."""
        self._wall_ns += ns

    @property
    def next_wake_ns(self) -> int | None:
        """How far to advance until the next sleeper wakes; None if there are no sleepers."""
        while self._sleepers and self._sleepers[0][2].done():  # cancelled meanwhile
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] - self._monotonic_ns if self._sleepers else None
