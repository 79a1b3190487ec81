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

    However many answers and deliveries a turn brings a connection, they become one write (beside the first delivery,
    which does not wait for others); and however many connections it concerns, the loop is asked for one callback.
    """

    __slots__ = ("_is_expected", "_loop", "_reading", "_writing")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_expected = False
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
        writing, self._writing = self._writing, []
        reading, self._reading = self._reading, []
        for connection in writing:
            connection.flush()
        for connection in reading:
            connection.begin_turn()
