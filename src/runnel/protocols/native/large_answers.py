"""Answers that may be large: a few of a connection are prepared at a time, none while its client does not read.

Whoever asks for much and reads nothing costs the broker these few, however many requests there are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self


class LargeAnswers:
    """Those of one connection. Who comes first is let in first."""

    __slots__ = ("_is_paused", "_room", "_waiting")

    def __init__(self, count_max: int) -> None:
        self._room = count_max
        self._is_paused = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def pause(self) -> None:
        """The client does not read as fast as it is told: begin no more."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._let_in()

    async def enter(self) -> None:
        if self._room and not self._is_paused:
            self._room -= 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self.leave()  # let in and cancelled in the same turn
            raise

    def leave(self) -> None:
        self._room += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._room and self._waiting and not self._is_paused:
            admitted = self._waiting.popleft()
            if not admitted.done():
                self._room -= 1
                admitted.set_result(None)


class LargeAnswer:
    """One of them: `async with` waits until it may be prepared."""

    __slots__ = ("_answers", "_is_in")

    def __init__(self, answers: LargeAnswers) -> None:
        self._answers = answers
        self._is_in = False

    async def __aenter__(self) -> Self:
        await self._answers.enter()
        self._is_in = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._step_out()

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """While it has nothing in hand yet, and waits, others may be prepared."""
        self._step_out()
        yield
        await self._answers.enter()
        self._is_in = True

    def _step_out(self) -> None:
        if self._is_in:
            self._is_in = False
            self._answers.leave()
