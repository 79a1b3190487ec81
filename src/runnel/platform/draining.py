"""The end of a door: what was accepted is finished within a time, unless somebody is in a hurry; then its port goes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from runnel.platform.accepting import Acceptor
from runnel.platform.clock import Clock
from runnel.platform.tls import TlsFiles


class Patience:
    """How long a drain may take. Made within a running loop."""

    def __init__(self, clock: Clock, seconds_max: float) -> None:
        self._clock = clock
        self._seconds_max = seconds_max
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self._hurry.set()

    async def lasts_for(self, finish: Coroutine[Any, Any, object]) -> bool:
        """Whether it is finished before time is up, or `hurry` is called; it is given up then."""
        loop = asyncio.get_running_loop()
        finishing: asyncio.Task[object] = loop.create_task(finish)
        ends: list[asyncio.Task[Any]] = [
            finishing,
            loop.create_task(self._clock.sleep(self._seconds_max)),
            loop.create_task(self._hurry.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return finishing.done()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)


class _Door(Protocol):
    @property
    def connection_count(self) -> int: ...
    async def drain(self) -> bool: ...
    def hurry(self) -> None: ...
    async def close(self) -> None: ...


D = TypeVar("D", bound=_Door)


class PortListener(Generic[D]):
    """A door on a TCP port; `drain` and `close` it before the broker."""

    def __init__(self, door: D, acceptor: Acceptor, address: str, tls: TlsFiles | None) -> None:
        self.door = door
        self.address = address
        """Where clients reach it, as `host:port`, with the port that port 0 became."""
        self.tls = tls
        self._acceptor = acceptor

    @property
    def connection_count(self) -> int:
        """Of all that were accepted, those included whose TLS handshake is under way."""
        return self.door.connection_count + self._acceptor.handshake_count

    async def drain(self) -> bool:
        """Accept nobody any more, and let everybody finish. False: not all did in time."""
        self._acceptor.close()
        return await self.door.drain()

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self.door.hurry()

    async def close(self) -> None:
        """Cut off whoever is left."""
        await self._acceptor.abort()
        await self.door.close()
