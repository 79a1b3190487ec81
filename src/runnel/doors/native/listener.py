"""The native door on a TCP port: opened as the settings say, drained and closed when the broker goes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Final

from runnel.broker.broker import Broker
from runnel.config import NativeSettings, Settings
from runnel.doors.native.door import Door
from runnel.security.gate import Gate
from runnel.world.addresses import format_address
from runnel.world.listening import BACKLOG, listen
from runnel.world.tls import TlsFiles

_CLOSE_SECONDS_MAX: Final = 1.0


class Listener:
    """Make one with `await Listener.open(…)`; `drain` and `close` it before the broker."""

    def __init__(
        self, door: Door, server: asyncio.Server, address: str, tls: TlsFiles | None
    ) -> None:
        self.door = door
        self.address = address
        """Where clients reach it, as `host:port`, with the port that port 0 became."""
        self.tls = tls
        self._server = server

    @classmethod
    async def open(cls, broker: Broker, gate: Gate, settings: Settings) -> Listener:
        native = settings.native
        tls = TlsFiles.of("native", native.tls_certificate, native.tls_key)
        listening = await listen(
            native.listen,
            section="native",
            is_allowed_remotely=gate.asks or native.allow_remote,
        )
        door = Door(broker, settings, gate)
        try:
            server = await _serve(door, listening, tls, native)
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


async def _serve(
    door: Door, listening: socket.socket, tls: TlsFiles | None, native: NativeSettings
) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if tls is None:
        return await loop.create_server(door.new_connection, sock=listening, backlog=BACKLOG)
    return await loop.create_server(
        door.new_encrypted_connection,
        sock=listening,
        backlog=BACKLOG,
        ssl=tls.context,
        ssl_handshake_timeout=native.handshake_timeout_ns / 1e9,
    )
