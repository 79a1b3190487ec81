"""The gRPC listener on a TCP port, with health and reflection.

grpcio's server may end by itself: it stops listening, while its calls continue. A call whose method name is not text
did that before `sturdy_server.py`. The listener notices it and starts a new server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio

from runnel.broker.access import MakeAccess
from runnel.broker.broker import Broker
from runnel.config import GrpcSettings, Settings
from runnel.errors import SettingsError
from runnel.platform.addresses import Endpoint, format_address, resolve
from runnel.platform.diagnostics import get_logger
from runnel.platform.listening_socket import listen
from runnel.platform.tls import TlsFiles
from runnel.protocols.grpc.server.grpc_server import GrpcServer
from runnel.protocols.grpc.server.public import PublicServices
from runnel.protocols.grpc.server.sturdy_server import new_server
from runnel.protocols.grpc.service import SERVICE, services_of
from runnel.security.authenticator import Authenticator

logger = get_logger("runnel.grpc")

_OPTION_MAX: Final = 2**31 - 2
_NS_PER_MS: Final = 1_000_000
# Time for the final statuses of calls to reach their clients.
_CLOSE_SECONDS: Final = 0.5
# How often to check that the server still listens. A check costs a timer.
_CHECK_SECONDS: Final = 0.2
# Time for the remaining calls of a server that no longer listens. They are not affected otherwise.
_RETIRED_SECONDS: Final = 3600.0
# Connections beyond grpc.calls_max, for health checks and for calls that are about to be refused.
_OTHER_CONNECTIONS_MAX: Final = 256
# Calls beyond grpc.calls_max: calls that wait to be refused, health checks and reflection. Their own limits are far
# lower, so a few connections cannot reach this one.
_OTHER_CALLS_MAX: Final = 4096
# Calls of one connection, so that one connection cannot take them all. Its client delays further calls.
_CONNECTION_CALLS_MAX: Final = 100
_METADATA_BYTES_MAX: Final = 16 * 2**10
# The shortest interval between a client's pings, and how long a client may take to answer one.
_PING_MS_MIN: Final = 5_000
_PING_MS_MAX: Final = 20_000


_StartAnother = Callable[[], Awaitable[grpc.aio.Server]]


class GrpcListener:
    """The gRPC listener. Open it with `await GrpcListener.open(…)`; drain and close it before the broker."""

    def __init__(
        self,
        server: GrpcServer,
        aio_server: grpc.aio.Server,
        public: PublicServices,
        address: str,
        tls: GrpcTls | None,
        start_another: _StartAnother,
    ) -> None:
        self.server = server
        self.address = address
        """`host:port` that clients connect to; port 0 is replaced by the real port."""
        self.tls = tls
        self._aio_server = aio_server
        self._public = public
        self._start_another = start_another
        self._retired: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._keeping_open = asyncio.get_running_loop().create_task(self._keep_open())

    @classmethod
    async def open(
        cls,
        broker: Broker,
        authenticator: Authenticator,
        settings: Settings,
        make_access: MakeAccess | None = None,
        *,
        shared_address: str | None = None,
    ) -> GrpcListener:
        """Listen at `shared_address`, if there is one, beside other processes, under a lock that their parent holds."""
        own = settings.grpc
        assert own.listen is not None
        tls = cast("GrpcTls | None", GrpcTls.of("grpc", own.tls_certificate, own.tls_key))
        if shared_address is None:
            endpoint = await _checked(own.listen, is_allowed=authenticator.asks or own.allow_remote)
        else:
            endpoint = await resolve(shared_address, key="grpc.listen")
        options = _options(own, is_shared=shared_address is not None)
        public = PublicServices(SERVICE.full_name)
        server = GrpcServer(broker, authenticator, settings, make_access)

        def new() -> grpc.aio.Server:
            services = {**services_of(server), **public.services()}
            return new_server(services, options, _calls_max(own), server.on_unknown_method)

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
        """Start a new server whenever the current one has ended by itself."""
        is_running = True
        while is_running:
            try:
                is_running = await self._aio_server.wait_for_termination(_CHECK_SECONDS)
            except Exception as error:  # noqa: BLE001 - the server may end with any error
                await self._replace(error)

    async def _replace(self, error: Exception) -> None:
        self.server.broker.metrics.counters.protocol_errors += 1
        ended = self._aio_server
        while self._aio_server is ended:
            try:
                self._aio_server = await self._start_another()
            except SettingsError:  # the port is not free yet
                await asyncio.sleep(_CHECK_SECONDS)
        self._retired[ended] = asyncio.get_running_loop().create_task(self._retire(ended))
        logger.warning(
            "a call brought the gRPC server down; another took its place", problem=str(error)
        )

    async def _retire(self, ended: grpc.aio.Server) -> None:
        """Let the calls of a server that no longer listens finish; its replacement gets all new calls."""
        await ended.stop(_RETIRED_SECONDS)
        del self._retired[ended]

    @property
    def connection_count(self) -> int:
        """The number of active calls: grpcio does not report its connections."""
        return len(self.server.calls)

    async def drain(self) -> bool:
        """Accept no more calls and let the active ones finish. False: some did not finish in time.

        The port stays open meanwhile, so that health checks are answered with NOT_SERVING.
        """
        with suppress(TimeoutError):  # a client that watches health may not read
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._public.closing()
        return await self.server.drain()

    def hurry(self) -> None:
        """End the drain under way at once."""
        self.server.hurry()

    async def close(self) -> None:
        """End the remaining calls and close the port."""
        self._keeping_open.cancel()
        await self.server.close()
        await asyncio.wait({self._keeping_open})
        for each in (self._aio_server, *self._retired):
            await each.stop(_CLOSE_SECONDS)
        if self._retired:
            await asyncio.wait(self._retired.values())


class GrpcTls(TlsFiles):
    """The TLS files for grpcio, which asks before every handshake whether there are new ones."""

    def __init__(self, section: str, certificate: str, key: str) -> None:
        super().__init__(section, certificate, key)
        self._pair = self._read()
        self._fetched = self._pair  # the pair that grpcio has

    def reload(self) -> bool:
        if not super().reload():
            return False
        self._pair = self._read()
        return True

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            grpc.ssl_server_certificate_configuration([self._pair]),
            self._fetch,  # type: ignore[arg-type]  # None is allowed: nothing has changed
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by grpcio's threads. None: nothing has changed."""
        pair = self._pair
        if pair is self._fetched:
            return None
        self._fetched = pair
        return grpc.ssl_server_certificate_configuration([pair])

    def _read(self) -> tuple[bytes, bytes]:
        return Path(self.key).read_bytes(), Path(self.certificate).read_bytes()


async def _checked(text: str, *, is_allowed: bool) -> Endpoint:
    """The endpoint to listen on. A socket of ours tries it first: grpcio binds by itself, and its errors say little."""
    listening = await listen(text, section="grpc", is_allowed_remotely=is_allowed)
    listening.close()
    return await resolve(text, key="grpc.listen")


def _bind(server: grpc.aio.Server, endpoint: Endpoint, text: str, tls: GrpcTls | None) -> int:
    """Bind the server; returns the port, which is the real one if the endpoint's port is 0."""
    try:
        if tls is None:
            return server.add_insecure_port(str(endpoint))
        return server.add_secure_port(str(endpoint), tls.credentials())
    except RuntimeError:
        raise SettingsError(f'grpc.listen = "{text}": cannot listen on {endpoint}') from None


def _calls_max(own: GrpcSettings) -> int:
    return min(own.calls_max + _OTHER_CALLS_MAX, _OPTION_MAX)


def _options(own: GrpcSettings, *, is_shared: bool) -> Sequence[tuple[str, Any]]:
    # grpcio accepts no larger numbers. A larger timeout means none at all.
    idle_ms = min(own.idle_timeout_ns // _NS_PER_MS, _OPTION_MAX)
    handshake_ms = min(own.handshake_timeout_ns // _NS_PER_MS, _OPTION_MAX)
    connections_max = min(own.calls_max + _OTHER_CONNECTIONS_MAX, _OPTION_MAX)
    return (
        # Without a lock for the port a second broker would take half of the connections.
        ("grpc.so_reuseport", int(is_shared)),
        ("grpc.max_receive_message_length", min(own.message_bytes_max, _OPTION_MAX)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", _CONNECTION_CALLS_MAX),
        # It counts calls that have ended but are not freed, and so would refuse clients that keep to the limit.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        # Keepalive detects a client whose machine is gone, and ends its calls.
        ("grpc.keepalive_time_ms", max(1000, idle_ms)),
        ("grpc.keepalive_timeout_ms", _PING_MS_MAX),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS_MIN),
    )
