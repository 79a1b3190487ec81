"""A listener on TCP ports, and its graceful end: accepted requests finish within a deadline, then the ports close."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from runnel.platform.acceptor import Acceptor
from runnel.platform.clock import Clock
from runnel.platform.tls import TlsFiles


class DrainDeadline:
    """How long a drain may take; `hurry` ends it early. Made within a running loop."""

    def __init__(self, clock: Clock, seconds_max: float) -> None:
        self._clock = clock
        self._seconds_max = seconds_max
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """End the drain under way at once."""
        self._hurry.set()

    async def lasts_for(self, finish: Coroutine[Any, Any, object]) -> bool:
        """Run `finish` until it ends, the deadline passes or `hurry` is called; returns whether it ended.

        If it did not, it is cancelled.
        """
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


class _ListenerServer(Protocol):
    """The part of a listener's server that ends it."""

    @property
    def connection_count(self) -> int: ...
    async def drain(self) -> bool: ...
    def hurry(self) -> None: ...
    async def close(self) -> None: ...


D = TypeVar("D", bound=_ListenerServer)


class PortListener(Generic[D]):
    """A listener on a TCP port, or several. Drain and close it before the broker."""

    def __init__(
        self, server: D, acceptors: Sequence[Acceptor], address: str, tls: TlsFiles | None
    ) -> None:
        self.server = server
        self.address = address
        """`host:port` that clients connect to; port 0 is replaced by the real port."""
        self.tls = tls
        self._acceptors = acceptors

    @property
    def connection_count(self) -> int:
        """All accepted connections, including those in their TLS handshake."""
        handshake_count = sum(acceptor.handshake_count for acceptor in self._acceptors)
        return self.server.connection_count + handshake_count

    async def drain(self) -> bool:
        """Accept no more connections and let the open ones finish. False: some did not finish in time."""
        for acceptor in self._acceptors:
            acceptor.close()
        return await self.server.drain()

    def hurry(self) -> None:
        """End the drain under way at once."""
        self.server.hurry()

    async def close(self) -> None:
        """Close all remaining connections."""
        for acceptor in self._acceptors:
            await acceptor.abort()
        await self.server.close()
