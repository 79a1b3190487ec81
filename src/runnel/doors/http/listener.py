"""The HTTP door on a TCP port: opened as the settings say, drained and closed when the broker goes.

The connections are uvicorn's, its server is not: signals, logging and the order of closing are the broker's own.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from uvicorn.config import Config

from runnel.broker.broker import Broker
from runnel.config import Settings
from runnel.doors.http.app import litestar_app
from runnel.doors.http.door import HttpDoor
from runnel.doors.http.front import Front
from runnel.security.gate import Gate
from runnel.world.addresses import format_address
from runnel.world.listening import BACKLOG, listen
from runnel.world.tls import TlsFiles

_CLOSE_SECONDS_MAX: Final = 1.0
# The door's own sweep ends idle connections, by the broker's clock; uvicorn's timer, by the loop's, is to do nothing.
_NEVER_SECONDS: Final = 10**7


class HttpListener:
    """Make one with `await HttpListener.open(…)`; `drain` and `close` it before the broker."""

    def __init__(
        self, door: HttpDoor, server: asyncio.Server, address: str, tls: TlsFiles | None
    ) -> None:
        self.door = door
        self.address = address
        """Where clients reach it, as `host:port`, with the port that port 0 became."""
        self.tls = tls
        self._server = server

    @classmethod
    async def open(cls, broker: Broker, gate: Gate, settings: Settings) -> HttpListener:
        http = settings.http
        if http.listen is None:
            raise ValueError("http.listen = none: this door is closed")
        tls = TlsFiles.of("http", http.tls_certificate, http.tls_key)
        listening = await listen(
            http.listen, section="http", is_allowed_remotely=gate.asks or http.allow_remote
        )
        door = HttpDoor(broker, gate, settings)
        config = _uvicorn(Front(door, litestar_app()))
        try:
            server = await door.loop.create_server(
                lambda: door.new_connection(config),
                sock=listening,
                backlog=BACKLOG,
                ssl=None if tls is None else tls.context,
                ssl_handshake_timeout=None if tls is None else http.request_timeout_ns / 1e9,
            )
        except BaseException:
            listening.close()
            await door.close()
            raise
        return cls(door, server, format_address(*listening.getsockname()[:2]), tls)

    @property
    def connection_count(self) -> int:
        return len(self.door.connections)

    async def drain(self) -> bool:
        """Accept nobody any more, and let everybody finish. False: not all did in time."""
        self._server.close()
        return await self.door.drain()

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self.door.hurry()

    async def close(self) -> None:
        """Cut off whoever is left."""
        self._server.close()
        await self.door.close()
        # Since Python 3.12 this also waits for connections that have not got through their TLS handshake.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS_MAX):
                await self._server.wait_closed()


def _uvicorn(app: Front) -> Config:
    """What connections need to know of uvicorn's settings."""
    config = Config(
        app,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_NEVER_SECONDS,
    )
    config.load()
    return config
