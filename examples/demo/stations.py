"""Weather stations: named publishers send their readings, whether or not the broker is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from examples.demo.board import Board
from examples.demo.evidence import Sum
from examples.demo.world import GATEWAYS, STATIONS, stations_of
from runnel.client import Bus, Receipt

TICK_S: Final = 0.2
PATIENCE_S: Final = 120.0
_TAGS: Final = {"unit": "C"}


class Stations:
    """All gateways. `sums` has what was published, by topic; all of it is stored once `run` has returned."""

    def __init__(self, readings_per_s: int) -> None:
        self.sums = {station.topic: Sum() for station in STATIONS}
        self._per_tick = max(1, round(readings_per_s * TICK_S / len(STATIONS)))

    async def run(self, bus: Bus, board: Board, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as gateways:
            for number in range(GATEWAYS):
                gateways.create_task(self._publish(number, bus, board, stop))

    async def _publish(self, gateway: int, bus: Bus, board: Board, stop: asyncio.Event) -> None:
        """A named publisher resends what was not acknowledged when the connection broke; it is stored once."""
        stations = stations_of(gateway)
        name = f"gateway-{gateway + 1}"
        due_s = time.monotonic()
        async with bus.publisher(name=name, deadline_s=PATIENCE_S) as publisher:
            while not stop.is_set():
                for station in stations:
                    sums = self.sums[station.topic]
                    for left in reversed(range(self._per_tick)):
                        payload = station.reading(sums.messages + 1)
                        sums.add(payload)
                        if left:
                            publisher.send(payload, station.topic, tags=_TAGS)
                        else:
                            stored = publisher.submit(payload, station.topic, tags=_TAGS)
                            stored.add_done_callback(_noting(board, self._per_tick))
                    board.sent += self._per_tick
                await publisher.ready()
                due_s = max(
                    due_s + TICK_S, time.monotonic() - 1
                )  # late by a second, and it stays late
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _noting(board: Board, count: int) -> Callable[[asyncio.Future[Receipt]], None]:
    """A publisher's messages of one topic are stored in order, so the last one stands for those before it."""

    def note(stored: asyncio.Future[Receipt]) -> None:
        if not stored.cancelled() and stored.exception() is None:
            board.stored += count

    return note
