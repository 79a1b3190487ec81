"""Limits how many large answers a connection prepares at a time; none while its client does not read.

A client that asks for much and reads nothing costs the broker these few answers, however many requests it sends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self


class LargeAnswers:
    """The places for large answers of one connection, given in the order of the requests."""

    __slots__ = ("_is_paused", "_room", "_waiting")

    def __init__(self, count_max: int) -> None:
        self._room = count_max
        self._is_paused = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def pause(self) -> None:
        """Begin no more: the client reads more slowly than the broker writes."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._admit_waiting()

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
                self.leave()  # admitted and cancelled in the same turn
            raise

    def leave(self) -> None:
        self._room += 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._room and self._waiting and not self._is_paused:
            admitted = self._waiting.popleft()
            if not admitted.done():
                self._room -= 1
                admitted.set_result(None)


class LargeAnswer:
    """One large answer: `async with` waits until it may be prepared."""

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
        self._free_place()

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Give the place to other answers while this one waits and holds no data yet."""
        self._free_place()
        yield
        await self._answers.enter()
        self._is_in = True

    def _free_place(self) -> None:
        if self._is_in:
            self._is_in = False
            self._answers.leave()
