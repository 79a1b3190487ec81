"""The dashboard: it starts late, gets the last known value of every station at once, and then each new one."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

import runnel
from examples.demo.board import Board
from examples.demo.evidence import DashboardFound, Sum
from examples.demo.world import STATIONS, WEATHER
from runnel.client import Bus

_NS_PER_MS: Final = 1_000_000
_LAG_SAMPLES_MAX: Final = 100_000


class StationReading(msgspec.Struct, frozen=True, gc=False):
    n: int
    celsius: float


class ReadingTally:
    """The readings that one reader got. A station's readings are numbered 1, 2, 3 …, like their offsets. Pure."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.count = self.missing = self.again = self.misplaced = 0
        self._next: dict[str, int] = {}

    def take(self, topic: str, offset: int, number: int) -> None:
        self.misplaced += number != offset
        expected = self._next.get(topic)
        if expected is None:
            self.first[topic] = expected = number
        if number < expected:
            self.again += 1
            return
        self.count += 1
        self.missing += number - expected
        self._next[topic] = number + 1

    def has_all(self, published: Mapping[str, Sum]) -> bool:
        return all(self._next.get(topic, 1) > sums.messages for topic, sums in published.items())

    def expected(self, published: Mapping[str, Sum]) -> int:
        """From the first reading that it got of each station to the last published one."""
        return sum(
            sums.messages - self.first.get(topic, 1) + 1 for topic, sums in published.items()
        )


class Dashboard:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._tally = ReadingTally()
        self._lags_ms: list[float] = []
        self._known_at_once = 0
        self._came = asyncio.Event()
        self._decoder = msgspec.json.Decoder(StationReading)

    async def run(self, bus: Bus) -> None:
        """Run until it is cancelled."""
        async with bus.subscribe(WEATHER, start="last") as subscription:
            async for batch in subscription.batches():
                self._take(batch.messages())

    async def wait_all(self, published: Mapping[str, Sum], within_s: float) -> None:
        """Wait for the last reading of every station. Those that do not come in time are missing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._tally.has_all(published):
                    await self._came.wait()

    def _take(self, messages: Iterable[runnel.Message]) -> None:
        tally, oldest_ns = self._tally, None
        for message in messages:
            reading = self._decoder.decode(message.payload)
            if message.topic in tally.first:
                oldest_ns = oldest_ns or message.event_time_ns
            elif len(tally.first) < len(STATIONS):
                self._known_at_once += reading.n > 1  # it did not start with the first
            tally.take(message.topic, message.offset, reading.n)
            self._board.celsius[message.topic.split("/")[1]] = reading.celsius
        self._board.seen = tally.count
        self._came.set()
        self._came.clear()  # waiters are woken in any case
        if oldest_ns is not None and len(self._lags_ms) < _LAG_SAMPLES_MAX:
            self._lags_ms.append((time.time_ns() - oldest_ns) / _NS_PER_MS)
            if len(self._lags_ms) % 50 == 0:
                self._board.p50_ms = statistics.median(self._lags_ms[-500:])

    def found(self, published: Mapping[str, Sum]) -> DashboardFound:
        tally, lags = self._tally, sorted(self._lags_ms) or [0.0]
        expected = tally.expected(published)
        return DashboardFound(
            expected=expected,
            seen=tally.count,
            missing=max(tally.missing, expected - tally.count),
            again=tally.again,
            misplaced=tally.misplaced,
            known_at_once=self._known_at_once,
            p50_ms=lags[len(lags) // 2],
            p99_ms=lags[len(lags) * 99 // 100],
            longest_ms=lags[-1],
        )
