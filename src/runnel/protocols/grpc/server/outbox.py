"""A queue between callbacks, which must not wait, and the one task that handles their items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """An unbounded queue with one reader. Its owner keeps it small by credits, by windows, or by reading no further."""

    __slots__ = ("_is_finished", "_waiter", "items")

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_finished = False

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> None:
        self.items.append(item)
        self._wake()

    def put_all(self, items: Iterable[T]) -> None:
        self.items.extend(items)
        self._wake()

    def finish(self) -> None:
        """Let `wait` return False once the queue is empty: no more items will come."""
        self._is_finished = True
        self._wake()

    async def wait(self) -> bool:
        """Wait for an item. False: the queue is empty and no more items will come."""
        while not self.items and not self._is_finished:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return bool(self.items)

    def take_all(self) -> list[T]:
        taken = list(self.items)
        self.items.clear()
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
