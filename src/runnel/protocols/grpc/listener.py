"""The gRPC listener on a TCP port: opened as the settings say, with health and reflection; drained and closed later.

grpcio's server may end by itself: it listens no longer, though calls that are under way go on. A call whose method is
no text did that, before `grpc_server.py`. The listener looks after it, and opens another in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio

from runnel.broker.broker import Broker
from runnel.config import GrpcSettings, Settings
from runnel.errors import SettingsError
from runnel.platform.addresses import Endpoint, format_address, resolve
from runnel.platform.diagnostics import get_logger
from runnel.platform.listening_socket import listen
from runnel.platform.tls import TlsFiles
from runnel.protocols.grpc.server.grpc_server import GrpcServer
from runnel.protocols.grpc.server.public import Public
from runnel.protocols.grpc.server.sturdy_server import new_server
from runnel.protocols.grpc.service import SERVICE, services_of
from runnel.security.authenticator import Authenticator

logger = get_logger("runnel.grpc")

_OPTION_MAX: Final = 2**31 - 2
_NS_PER_MS: Final = 1_000_000
# For what ends a call to reach its client, once nothing is waited for any more.
_CLOSE_SECONDS: Final = 0.5
# How often it is seen to that the server still listens; asking costs a timer.
_LOOK_SECONDS: Final = 0.2
# For the calls of a server that listens no longer; they go on as if nothing had happened.
_RETIRED_SECONDS: Final = 3600.0
# Connections beyond grpc.calls_max, for those that ask for health or are about to be refused.
_OTHER_CONNECTIONS_MAX: Final = 256
# Calls beyond grpc.calls_max: those that wait to be refused, ask for health, or look at the service. They have limits
# of their own, far below; this one is not reached by what a few connections can do.
_OTHER_CALLS_MAX: Final = 4096
# Of one connection; its client waits with the next. So nobody takes all that there are with one.
_CONNECTION_CALLS_MAX: Final = 100
_METADATA_BYTES_MAX: Final = 16 * 2**10
# How often a client may ask whether the connection lives, and how long it may take to answer the same question.
_PING_MS_MIN: Final = 5_000
_PING_MS_MAX: Final = 20_000


_StartAnother = Callable[[], Awaitable[grpc.aio.Server]]


class GrpcListener:
    """Make one with `await GrpcListener.open(…)`; `drain` and `close` it before the broker."""

    def __init__(
        self,
        server: GrpcServer,
        aio_server: grpc.aio.Server,
        public: Public,
        address: str,
        tls: GrpcTls | None,
        start_another: _StartAnother,
    ) -> None:
        self.server = server
        self.address = address
        """Where clients reach it, as `host:port`, with the port that port 0 became."""
        self.tls = tls
        self._aio_server = aio_server
        self._public = public
        self._start_another = start_another
        self._retired: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._keeping_open = asyncio.get_running_loop().create_task(self._keep_open())

    @classmethod
    async def open(
        cls, broker: Broker, authenticator: Authenticator, settings: Settings
    ) -> GrpcListener:
        own = settings.grpc
        assert own.listen is not None
        tls = cast("GrpcTls | None", GrpcTls.of("grpc", own.tls_certificate, own.tls_key))
        endpoint = await _checked(own.listen, is_allowed=authenticator.asks or own.allow_remote)
        public = Public(SERVICE.full_name)
        server = GrpcServer(broker, authenticator, settings)

        def new() -> grpc.aio.Server:
            services = {**services_of(server), **public.services()}
            return new_server(services, _options(own), _calls_max(own), server.on_unknown_method)

        try:
            aio_server = new()
            port = _bind(aio_server, endpoint, own.listen, tls)
        except BaseException:
            await server.close()
            raise
        endpoint = Endpoint(endpoint.family, (endpoint.address[0], port, *endpoint.address[2:]))
        await public.open()

        async def start_another() -> grpc.aio.Server:
            another = new()
            _bind(another, endpoint, str(endpoint), tls)
            await another.start()
            return another

        try:
            await aio_server.start()
        except BaseException:
            await server.close()
            raise
        address = format_address(*endpoint.address[:2])
        return cls(server, aio_server, public, address, tls, start_another)

    async def _keep_open(self) -> None:
        """Whenever the server has ended by itself, put another in its place."""
        is_running = True
        while is_running:
            try:
                is_running = await self._aio_server.wait_for_termination(_LOOK_SECONDS)
            except Exception as error:  # noqa: BLE001 - what the server ended with, whatever it is
                await self._replace(error)

    async def _replace(self, error: Exception) -> None:
        self.server.broker.metrics.counters.protocol_errors += 1
        ended = self._aio_server
        while self._aio_server is ended:
            try:
                self._aio_server = await self._start_another()
            except SettingsError:  # its port is not free yet
                await asyncio.sleep(_LOOK_SECONDS)
        self._retired[ended] = asyncio.get_running_loop().create_task(self._retire(ended))
        logger.warning(
            "a call brought the gRPC server down; another took its place", problem=str(error)
        )

    async def _retire(self, ended: grpc.aio.Server) -> None:
        """Let the calls of a server that no longer listens finish; its replacement gets all new ones."""
        await ended.stop(_RETIRED_SECONDS)
        del self._retired[ended]

    @property
    def connection_count(self) -> int:
        """Calls under way: gRPC does not tell of its connections."""
        return len(self.server.calls)

    async def drain(self) -> bool:
        """Let nobody in any more, and let every call finish. False: not all did in time.

        The port stays open meanwhile, so that whoever asks for health is told that it does not serve.
        """
        with suppress(TimeoutError):  # somebody who watches it may not read
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._public.closing()
        return await self.server.drain()

    def hurry(self) -> None:
        """A drain under way waits no longer."""
        self.server.hurry()

    async def close(self) -> None:
        """Cut off whoever is left."""
        self._keeping_open.cancel()
        await self.server.close()
        await asyncio.wait({self._keeping_open})
        for each in (self._aio_server, *self._retired):
            await each.stop(_CLOSE_SECONDS)
        if self._retired:
            await asyncio.wait(self._retired.values())


class GrpcTls(TlsFiles):
    """The files in the form in which grpcio wants them: it asks before every handshake whether there are new ones."""

    def __init__(self, section: str, certificate: str, key: str) -> None:
        super().__init__(section, certificate, key)
        self._pair = self._read()
        self._told = self._pair

    def reload(self) -> bool:
        if not super().reload():
            return False
        self._pair = self._read()
        return True

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            grpc.ssl_server_certificate_configuration([self._pair]),
            self._fetch,  # type: ignore[arg-type]  # None is allowed, and means what it says there
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by threads of grpcio's; None: nothing has changed."""
        pair = self._pair
        if pair is self._told:
            return None
        self._told = pair
        return grpc.ssl_server_certificate_configuration([pair])

    def _read(self) -> tuple[bytes, bytes]:
        return Path(self.key).read_bytes(), Path(self.certificate).read_bytes()


async def _checked(text: str, *, is_allowed: bool) -> Endpoint:
    """Where to listen. grpcio binds by itself, and says little of what went wrong: so a socket of ours tries first."""
    listening = await listen(text, section="grpc", is_allowed_remotely=is_allowed)
    listening.close()
    return await resolve(text, key="grpc.listen")


def _bind(server: grpc.aio.Server, endpoint: Endpoint, text: str, tls: GrpcTls | None) -> int:
    """The port, which is another if it was 0."""
    try:
        if tls is None:
            return server.add_insecure_port(str(endpoint))
        return server.add_secure_port(str(endpoint), tls.credentials())
    except RuntimeError:
        raise SettingsError(f'grpc.listen = "{text}": cannot listen on {endpoint}') from None


def _calls_max(own: GrpcSettings) -> int:
    return min(own.calls_max + _OTHER_CALLS_MAX, _OPTION_MAX)


def _options(own: GrpcSettings) -> Sequence[tuple[str, Any]]:
    # grpcio takes no larger numbers; nothing that would be one is meant to end.
    idle_ms = min(own.idle_timeout_ns // _NS_PER_MS, _OPTION_MAX)
    handshake_ms = min(own.handshake_timeout_ns // _NS_PER_MS, _OPTION_MAX)
    connections_max = min(own.calls_max + _OTHER_CONNECTIONS_MAX, _OPTION_MAX)
    return (
        ("grpc.so_reuseport", 0),  # or a second broker would take half of the connections
        ("grpc.max_receive_message_length", min(own.message_bytes_max, _OPTION_MAX)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", _CONNECTION_CALLS_MAX),
        # It would count calls that have ended but are not freed, and so refuse clients that keep to the limit.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        # A client whose machine is gone is found out, and its calls end.
        ("grpc.keepalive_time_ms", max(1000, idle_ms)),
        ("grpc.keepalive_timeout_ms", _PING_MS_MAX),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS_MIN),
    )
