"""Lists the connections of all listeners, in steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.monitoring.metric_tables import ConnectionStats
from runnel.broker.monitoring.throttled import ThrottledAsync
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
        self._report: ThrottledAsync[Mapping[int, ConnectionStats]] = ThrottledAsync(
            self._read_all, clock, first={}
        )

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
        return await self._report.value()

    async def _read_all(self) -> Mapping[int, ConnectionStats]:
        rows: dict[int, ConnectionStats] = {}
        async for some in self._share.steps(self._known(0), None, _ROWS_PER_STEP):
            rows |= {number: read() for number, read in some}
        return rows

    def _known(self, after: int) -> list[tuple[int, Callable[[], ConnectionStats]]]:
        known = [
            (number, read)
            for listener in self.listeners
            for number, read in listener().items()
            if number > after
        ]
        known.sort(key=lambda each: each[0])
        return known
