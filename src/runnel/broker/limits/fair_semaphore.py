"""A semaphore that connections share fairly: they take turns, however many waiters one of them has."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class FairSemaphore:
    """At most `held_max` permits are held at a time. Connections take turns; waiters of one are served in order."""

    def __init__(self, held_max: int) -> None:
        self._free = held_max
        # By connection, the next one first. Empty while a permit is free.
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}

    def of(self, connection_id: int) -> Permit:
        """A permit for this connection, held during an `async with`."""
        return Permit(self, connection_id)

    async def acquire(self, connection_id: int) -> None:
        """Wait for a permit. The caller must `release` it."""
        if self._free:
            self._free -= 1
            return
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection_id, deque()).append(permit)
        try:
            await permit
        except asyncio.CancelledError:
            if permit.done() and not permit.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give the permit to the next waiter, if there is one."""
        while self._waiting:
            connection_id = next(iter(self._waiting))
            waiting = self._waiting.pop(connection_id)
            permit = waiting.popleft()
            if waiting:
                self._waiting[connection_id] = waiting  # behind the other connections
            if not permit.done():
                permit.set_result(None)
                return
        self._free += 1


class Permit:
    """Holds a permit of a semaphore during an `async with`."""

    __slots__ = ("_connection_id", "_semaphore")

    def __init__(self, semaphore: FairSemaphore, connection_id: int) -> None:
        self._semaphore = semaphore
        self._connection_id = connection_id

    async def __aenter__(self) -> None:
        await self._semaphore.acquire(self._connection_id)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._semaphore.release()
