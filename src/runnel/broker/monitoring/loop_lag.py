"""Measures how late the event loop is: a repeating timer observes by how much it fires too late.

All work of a broker waits while the loop is busy. The timer uses the loop's own time, not the broker's clock, because
it measures the loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from runnel.broker.monitoring.histogram import TimeHistogram

_INTERVAL_SECONDS: Final = 0.1


class LoopLag:
    """Fills a histogram with the loop's lag. Create it within a running loop; `close` it before the loop ends."""

    def __init__(self, histogram: TimeHistogram) -> None:
        self._histogram = histogram
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _INTERVAL_SECONDS
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        now = self._loop.time()
        self._histogram.observe(round((now - self._due) * 1e9))
        self._due = now + _INTERVAL_SECONDS  # missed timers are not made up for
        self._timer = self._loop.call_at(self._due, self._fire)

    def close(self) -> None:
        self._timer.cancel()
