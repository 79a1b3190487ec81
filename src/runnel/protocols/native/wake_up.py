"""What all connections do once in a turn of the loop: write what was queued, and read on where they stopped."""

from __future__ import annotations

import asyncio
from typing import Protocol


class _Turning(Protocol):
    def flush(self) -> None:
        """Write everything that is queued."""

    def begin_turn(self) -> None:
        """It may read again."""


class WakeUp:
    """Gathers connections during a turn of the loop, and serves them all at the beginning of the next.

    However many answers and deliveries a turn brings a connection, they become one write; and however many connections
    it concerns, the loop is asked for one callback. Only the first delivery of a turn does not wait for others, unless
    the turn `is_crowded`: several requests came at once, so the broker is behind, and early writes would keep it there,
    since each wakes a reader who may take the processor from it.
    """

    __slots__ = ("_is_expected", "_loop", "_reading", "_writing", "is_crowded")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_expected = False
        self.is_crowded = False
        self._writing: list[_Turning] = []
        self._reading: list[_Turning] = []

    def write_later(self, connection: _Turning) -> None:
        self._writing.append(connection)
        if not self._is_expected:
            self._expect()

    def read_later(self, connection: _Turning) -> None:
        self._reading.append(connection)
        if not self._is_expected:
            self._expect()

    def _expect(self) -> None:
        self._is_expected = True
        self._loop.call_soon(self._come)

    def _come(self) -> None:
        self._is_expected = False
        self.is_crowded = False
        writing, self._writing = self._writing, []
        reading, self._reading = self._reading, []
        for connection in writing:
            connection.flush()
        for connection in reading:
            connection.begin_turn()
