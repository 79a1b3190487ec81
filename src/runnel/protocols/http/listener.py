"""The HTTP listener on a TCP port: opened as the settings say, drained and closed when the broker shuts down.

It uses uvicorn's connections but not uvicorn's server: signals, logging and the order of closing are the broker's own.
"""

from __future__ import annotations

import socket

from uvicorn.config import Config

from runnel.broker.access import MakeAccess
from runnel.broker.broker import Broker
from runnel.config import Settings
from runnel.platform.acceptor import Acceptor
from runnel.platform.addresses import format_address
from runnel.platform.listening_socket import listen
from runnel.platform.port_listener import PortListener
from runnel.platform.tls import TlsFiles
from runnel.protocols.http.app import litestar_app
from runnel.protocols.http.server.browsers import BrowserPolicy
from runnel.protocols.http.server.front import Front
from runnel.protocols.http.server.http_server import HttpServer
from runnel.security.authenticator import Authenticator


class HttpListener(PortListener[HttpServer]):
    """The HTTP server and the port that it listens on. Make one with `await HttpListener.open(…)`."""

    @classmethod
    async def open(
        cls,
        broker: Broker,
        authenticator: Authenticator,
        settings: Settings,
        make_access: MakeAccess | None = None,
        *,
        inherited: socket.socket | None = None,
    ) -> HttpListener:
        """Accept from this socket, if there is one: other processes do too."""
        http = settings.http
        if http.listen is None:
            raise ValueError("http.listen = none: this listener is closed")
        tls = TlsFiles.of("http", http.tls_certificate, http.tls_key)
        browsers = BrowserPolicy(
            http, asks_for_tokens=authenticator.asks, machine=socket.gethostname()
        )
        listening = inherited or await listen(
            http.listen, section="http", is_allowed_remotely=authenticator.asks or http.allow_remote
        )
        server = HttpServer(broker, authenticator, settings, make_access)
        config = _uvicorn(Front(server, litestar_app(), browsers))
        acceptor = Acceptor(
            listening,
            lambda: server.new_connection(config),
            section="http",
            connection_count=lambda: server.connection_count,
            connections_max=http.connections_max,
            counters=broker.metrics.counters,
            tls=None if tls is None else tls.context,
            handshake_seconds_max=http.handshake_timeout_ns / 1e9,
            is_shared=inherited is not None,
        )
        return cls(server, [acceptor], format_address(*listening.getsockname()[:2]), tls)


def _uvicorn(app: Front) -> Config:
    """The settings of uvicorn that connections need."""
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
    )
    config.load()
    return config
