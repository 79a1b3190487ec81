"""A query's position as a named cursor on the broker. It holds back retention, and shows how far the query is behind.

The cursor is at the end of the query's last committed micro-batch, never further. If the user gives a name, the
planning process moves the cursor. Otherwise it is named after the query's id, which only tasks know, so the first task
of each micro-batch moves it. Only the user removes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

import msgspec
from pyspark import TaskContext

from runnel.formats.wire import CursorPlace
from runnel.spark.connections import BrokerLogin, connection
from runnel.spark.read.ranges import Range, ReadPartition, logger
from runnel.spark.read.stream_offset import Positions

PREFIX: Final = "spark/"
_QUERY_ID: Final = "sql.streaming.queryId"  # a local property of the query's jobs

# The broker syncs a record for each move. A hold that follows within a second is good enough.
_INTERVAL_S: Final = 1.0
_ARRIVAL_S: Final = 5.0

# When this process last moved each cursor, for all tasks of a query that run in this process.
_moved_at_s: dict[tuple[BrokerLogin, str], float] = {}


class CursorStep(msgspec.Struct, frozen=True):
    """A move of the cursor by a task, because only tasks know the query's id."""

    address: BrokerLogin
    places: tuple[CursorPlace, ...]

    def take(self) -> None:
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        if query_id is None:
            return
        name = f"{PREFIX}{query_id}"
        now_s = time.monotonic()
        if now_s - _moved_at_s.get((self.address, name), -_INTERVAL_S) >= _INTERVAL_S:
            _moved_at_s[self.address, name] = now_s
            _move(self.address, name, self.places)


class StreamPartition(ReadPartition):
    """The ranges that one task of a micro-batch reads, and a cursor move if this task makes it."""

    def __init__(self, ranges: Sequence[Range], step: CursorStep | None) -> None:
        super().__init__(ranges)
        self.step = step


class QueryCursor:
    """The cursor as the planning process moves it. `name` None: tasks move it; "": no cursor."""

    def __init__(self, address: BrokerLogin, patterns: tuple[str, ...], name: str | None) -> None:
        self._address = address
        self._patterns = patterns
        self._name = name
        self._moved_to: tuple[CursorPlace, ...] = ()
        self._moved_at_s = -_INTERVAL_S
        self._moving: Future[None] | None = None

    def move(self, committed: Positions) -> None:
        """Move to the start of a micro-batch, at most once per interval, without waiting."""
        if time.monotonic() - self._moved_at_s >= _INTERVAL_S:
            self._move(committed)

    def arrive(self, committed: Positions) -> None:
        """Move after the query has read everything. Waits for the move, because the query may end now."""
        self._move(committed)
        if self._moving is not None:
            wait((self._moving,), _ARRIVAL_S)
            self._moving = None

    def _move(self, committed: Positions) -> None:
        if not self._name or not committed:
            return
        places = self._places(committed)
        if places != self._moved_to:
            self._moved_to, self._moved_at_s = places, time.monotonic()
            self._moving = _move(self._address, self._name, places)

    def step(self, committed: Positions) -> CursorStep | None:
        """The move that a task makes; None if the planning process moves the cursor."""
        if self._name is not None or not committed:
            return None
        return CursorStep(self._address, self._places(committed))

    def _places(self, committed: Positions) -> tuple[CursorPlace, ...]:
        return tuple(
            CursorPlace(
                journal=key.journal,
                shard=key.shard,
                epoch=place.epoch,
                entry=place.entry,
                patterns=self._patterns,
            )
            for key, place in committed.items()
        )


def _move(address: BrokerLogin, name: str, places: tuple[CursorPlace, ...]) -> Future[None]:
    """Move the cursor. A failure is only logged: the query continues although its hold does not move."""
    bus = connection(address).bus
    moving = asyncio.run_coroutine_threadsafe(bus.set_cursor(name, places), bus.loop)

    def done(moved: Future[None]) -> None:
        if not moved.cancelled() and (error := moved.exception()) is not None:
            logger.warning("cursor %s was not moved: %s", name, error)

    moving.add_done_callback(done)
    return moving
