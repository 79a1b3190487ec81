"""How late the event loop is: a timer that is due again and again, and the time by which it fires too late.

Everything that a broker does waits behind whatever the loop is doing. It goes by the loop's own timers, not by the
broker's clock: what is measured is the loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from runnel.broker.monitoring.histogram import TimeHistogram

_SECONDS: Final = 0.1


class LoopLag:
    """Made within a running loop; `close` it before the loop ends."""

    def __init__(self, histogram: TimeHistogram) -> None:
        self._histogram = histogram
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _SECONDS
        self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        now = self._loop.time()
        self._histogram.observe(round((now - self._due) * 1e9))
        self._due = now + _SECONDS  # what was missed is not made up for
        self._timer = self._loop.call_at(self._due, self._ring)

    def close(self) -> None:
        self._timer.cancel()
