"""Lists the connections of all listeners, in steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.monitoring.metric_tables import ConnectionStats
from runnel.broker.monitoring.throttled import SHARE
from runnel.broker.pages import Listed, PageBuilder
from runnel.platform.clock import Clock

# The connections of a listener: for each id, a function that reads its row.
ReadRows: TypeAlias = Mapping[int, Callable[[], ConnectionStats]]

_ROWS_PER_STEP: Final = 128


class Connections:
    """The connections of all listeners of a broker. Each listener adds itself to `listeners`."""

    def __init__(self, share: LoopShare, clock: Clock) -> None:
        self.listeners: list[Callable[[], ReadRows]] = []
        self._share = share
        self._clock = clock
        self._reported: Mapping[int, ConnectionStats] = {}
        self._report_again_ns = 0  # of the monotonic clock

    async def page(self, *, after: int, limit: int, owner: Hashable) -> Listed[ConnectionStats]:
        """Connections with an id above `after`, in order of age, and whether these are all that remain."""
        page: PageBuilder[ConnectionStats] = PageBuilder(limit, "connections")
        known = self._known(after)
        for begin in range(0, len(known), _ROWS_PER_STEP):
            await self._share.turn(owner)
            for _, read in known[begin : begin + _ROWS_PER_STEP]:
                if page.is_full():
                    return page.items, False
                page.add(read())
        return page.items, True

    async def report(self) -> Mapping[int, ConnectionStats]:
        """All connections by id. Reading them takes at most 2 % of the time; a new reading is a new object."""
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._report_again_ns:
            rows: dict[int, ConnectionStats] = {}
            async for some in self._share.steps(self._known(0), None, _ROWS_PER_STEP):
                rows |= {number: read() for number, read in some}
            self._reported = rows
            done_ns = self._clock.monotonic_ns()
            self._report_again_ns = done_ns + (done_ns - now_ns) * SHARE
        return self._reported

    def _known(self, after: int) -> list[tuple[int, Callable[[], ConnectionStats]]]:
        known = [
            (number, read)
            for listener in self.listeners
            for number, read in listener().items()
            if number > after
        ]
        known.sort(key=lambda each: each[0])
        return known
