"""The native door on a TCP port: opened as the settings say, drained and closed when the broker goes."""

from __future__ import annotations

import asyncio
import socket

from runnel.broker.broker import Broker
from runnel.config import NativeSettings, Settings
from runnel.doors.native.door import Door
from runnel.security.gate import Gate
from runnel.world.addresses import format_address
from runnel.world.draining import PortListener
from runnel.world.listening import BACKLOG, listen
from runnel.world.tls import TlsFiles


class Listener(PortListener[Door]):
    """Make one with `await Listener.open(…)`."""

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
