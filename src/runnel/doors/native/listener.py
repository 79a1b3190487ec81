"""The native door on a TCP port: opened as the settings say, drained and closed when the broker goes."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from typing import Final

from runnel.broker.broker import Broker
from runnel.config import NativeSettings, Settings
from runnel.doors.native.addresses import Endpoint, format_address, resolve
from runnel.doors.native.door import Door
from runnel.doors.native.tls import tls_context
from runnel.errors import SettingsError

_BACKLOG: Final = 1024
_CLOSE_SECONDS_MAX: Final = 1.0
_KEY: Final = "native.listen"


class Listener:
    """Make one with `await Listener.open(…)`; `drain` and `close` it before the broker."""

    def __init__(self, door: Door, server: asyncio.Server, address: str, *, is_tls: bool) -> None:
        self.door = door
        self.address = address
        """Where clients reach it, as `host:port`, with the port that port 0 became."""
        self.is_tls = is_tls
        self._server = server

    @classmethod
    async def open(cls, broker: Broker, settings: Settings) -> Listener:
        native = settings.native
        context = tls_context(native)
        endpoint = await resolve(native.listen, key=_KEY)
        _check_allowed(native, endpoint)
        listening = _bind(native, endpoint)
        door = Door(broker, settings)
        try:
            server = await _serve(door, listening, context, native)
        except BaseException:
            listening.close()
            await door.close()
            raise
        address = format_address(*listening.getsockname()[:2])
        return cls(door, server, address, is_tls=context is not None)

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


def _check_allowed(native: NativeSettings, endpoint: Endpoint) -> None:
    if not endpoint.is_loopback and not native.allow_remote:
        raise SettingsError(
            f'{_KEY} = "{native.listen}" would let other machines in, and there is no authentication '
            "yet: whoever reaches the port may read and write everything. Listen on 127.0.0.1 or [::1], "
            "or set native.allow_remote = true as well if that is what you want"
        )


def _bind(native: NativeSettings, endpoint: Endpoint) -> socket.socket:
    listening = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: an answer never waits for the acknowledgement of the last one.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(endpoint.address)
        listening.listen(_BACKLOG)
        listening.settimeout(0)
    except OSError as error:
        listening.close()
        problem = f"cannot listen on {endpoint}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            problem = f"the address {endpoint} is in use, perhaps by another broker"
        raise SettingsError(f'{_KEY} = "{native.listen}": {problem}') from None
    return listening


async def _serve(
    door: Door, listening: socket.socket, context: ssl.SSLContext | None, native: NativeSettings
) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if context is None:
        return await loop.create_server(door.new_connection, sock=listening, backlog=_BACKLOG)
    return await loop.create_server(
        door.new_encrypted_connection,
        sock=listening,
        backlog=_BACKLOG,
        ssl=context,
        ssl_handshake_timeout=native.handshake_timeout_ns / 1e9,
    )
