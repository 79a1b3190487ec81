"""The clock: wall time, monotonic time and sleeping, behind an interface so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The only source of time for the rest of Runnel."""

    def time_ns(self) -> int:
        """Wall clock, UTC, since 1970. It may step, backwards too: never measure with it."""
        ...

    def monotonic_ns(self) -> int:
        """Never goes back; its zero means nothing."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for that long on the monotonic clock; zero or less lets the loop turn once."""
        ...


class SystemClock:
    """The machine's clock and the running loop's timers."""

    time_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
