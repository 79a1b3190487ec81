"""The native listener on a TCP port, opened as the settings say."""

from __future__ import annotations

from collections.abc import Sequence
from socket import socket

from runnel.broker.access import MakeAccess
from runnel.broker.broker import Broker
from runnel.config import Settings
from runnel.platform.acceptor import Acceptor
from runnel.platform.addresses import format_address
from runnel.platform.listening_socket import listen
from runnel.platform.port_listener import PortListener
from runnel.platform.tls import TlsFiles
from runnel.protocols.native.native_server import NativeServer
from runnel.security.authenticator import Authenticator


class Listener(PortListener[NativeServer]):
    """The native protocol on a TCP port, with or without TLS. Make one with `await Listener.open(…)`."""

    @classmethod
    async def open(
        cls,
        broker: Broker,
        authenticator: Authenticator,
        settings: Settings,
        make_access: MakeAccess | None = None,
        *,
        inherited: Sequence[socket] = (),
    ) -> Listener:
        """Accept from these sockets, if there are any: the first one is shared with other processes."""
        native = settings.native
        tls = TlsFiles.of("native", native.tls_certificate, native.tls_key)
        sockets = inherited or [
            await listen(
                native.listen,
                section="native",
                is_allowed_remotely=authenticator.asks or native.allow_remote,
            )
        ]
        server = NativeServer(broker, settings, authenticator, make_access)
        address = format_address(*sockets[0].getsockname()[:2])
        acceptors = [
            Acceptor(
                listening,
                server.new_connection if tls is None else server.new_encrypted_connection,
                section="native",
                connection_count=lambda: server.connection_count,
                connections_max=native.connections_max,
                counters=broker.metrics.counters,
                tls=None if tls is None else tls.context,
                handshake_seconds_max=native.handshake_timeout_ns / 1e9,
                is_shared=bool(inherited) and listening is inherited[0],
            )
            for listening in sockets
        ]
        return cls(server, acceptors, address, tls)
