"""Wakes connections once per turn of the loop: to write their queued frames, and to resume reading."""

from __future__ import annotations

import asyncio
from typing import Protocol


class _WokenConnection(Protocol):
    """The part of a connection that a wake-up calls."""

    def flush(self) -> None:
        """Write all queued frames."""

    def begin_turn(self) -> None:
        """Resume reading."""


class WakeUp:
    """Gathers connections during a turn of the loop, and serves them all at the beginning of the next.

    All answers and deliveries of a turn for one connection become one write, and all connections share one callback of
    the loop. Only the first delivery of a turn does not wait for others, unless the turn `is_crowded`: several requests
    came at once, so the broker is behind. Early writes would keep it behind, since each wakes a reader that may take
    the processor from the broker.
    """

    __slots__ = ("_is_scheduled", "_loop", "_reading", "_writing", "is_crowded")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_scheduled = False
        self.is_crowded = False
        self._writing: list[_WokenConnection] = []
        self._reading: list[_WokenConnection] = []

    def write_later(self, connection: _WokenConnection) -> None:
        self._writing.append(connection)
        if not self._is_scheduled:
            self._schedule()

    def read_later(self, connection: _WokenConnection) -> None:
        self._reading.append(connection)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        self.is_crowded = False
        writing, self._writing = self._writing, []
        reading, self._reading = self._reading, []
        for connection in writing:
            connection.flush()
        for connection in reading:
            connection.begin_turn()
