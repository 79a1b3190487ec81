"""Whose turn it is: a few at a time, connection after connection, so that nobody waits behind a crowd of another's."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class FairSemaphore:
    """At most so many turns are held at a time. Connections take turns, and within one whoever asked first."""

    def __init__(self, held_max: int) -> None:
        self._free = held_max
        # By connection, the one that is next first. Somebody waits only while no turn is free.
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}

    def of(self, connection_id: int) -> Permit:
        """A turn for this connection, held for the time of an `async with`."""
        return Permit(self, connection_id)

    async def wait(self, connection_id: int) -> None:
        """Until it is this one's turn. Whoever got one passes it on."""
        if self._free:
            self._free -= 1
            return
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection_id, deque()).append(permit)
        try:
            await permit
        except asyncio.CancelledError:
            if permit.done() and not permit.cancelled():
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """The next one's turn."""
        while self._waiting:
            connection_id = next(iter(self._waiting))
            line = self._waiting.pop(connection_id)
            permit = line.popleft()
            if line:
                self._waiting[connection_id] = line  # behind the others
            if not permit.done():
                permit.set_result(None)
                return
        self._free += 1


class Permit:
    """The time of one `async with`."""

    __slots__ = ("_connection_id", "_semaphore")

    def __init__(self, turns: FairSemaphore, connection_id: int) -> None:
        self._semaphore = turns
        self._connection_id = connection_id

    async def __aenter__(self) -> None:
        await self._semaphore.wait(self._connection_id)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._semaphore.pass_on()
