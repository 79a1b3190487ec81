"""Divides the event loop's time among walks over large collections.

A walk over topics, cursors or subscriptions goes in steps of about a millisecond and asks for a turn before each step.
All walks together do one step between two turns of the loop, so that sixty walks delay other work no longer than one
does. Owners take turns: a token with many walks does not slow the walks of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class LoopShare:
    """Gives the walks of a broker their turns."""

    def __init__(self) -> None:
        # By owner, the next one first.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._is_running = False

    @property
    def waiting(self) -> int:
        """Walks that wait for their next step."""
        return sum(map(len, self._waiting.values()))

    async def turn(self, owner: Hashable) -> None:
        """Wait until `owner` may do one step: always at least one turn of the loop."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._give_turn, loop)
        await turn

    async def steps(
        self, items: Iterable[T], owner: Hashable, items_max: int
    ) -> AsyncIterator[Sequence[T]]:
        """The items, at most `items_max` a turn. They are copied first: the collection may change meanwhile."""
        copied = list(items)
        for begin in range(0, len(copied), items_max):
            await self.turn(owner)
            yield copied[begin : begin + items_max]

    def _give_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            owner, line = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = line.popleft()
            if line:
                self._waiting[owner] = line  # behind the other owners
            if not turn.done():  # else its walk was cancelled
                turn.set_result(None)
                loop.call_soon(self._give_turn, loop)
                return
        self._is_running = False
