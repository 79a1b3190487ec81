"""The services that need no token: health and reflection. Their limits are apart from those of other calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from runnel.errors import LimitExceededError, RunnelError
from runnel.protocols.grpc.server.calls import Context, single_request
from runnel.protocols.grpc.server.statuses import refused
from runnel.protocols.grpc.server.sturdy_server import Services

# Active calls of each method. Further calls are refused at once.
_CHECKS_MAX: Final = 1024
_WATCHES_MAX: Final = 64
_REFLECTIONS_MAX: Final = 16
# grpcio holds a request in memory while it arrives, even one as large as a publisher's. So few are read at a time, and
# fewer of one connection, so that no connection keeps the others waiting.
_READ_MAX: Final = 32
_CONNECTION_READ_MAX: Final = 4
# How long a request may take to arrive, once it is being read.
_REQUEST_SECONDS_MAX: Final = 5.0
_REFLECTION_SECONDS_MAX: Final = 60.0
_REQUEST_BYTES_MAX: Final = 4096

_Answering: TypeAlias = Callable[[Context], Awaitable[Any]]


class PublicServices:
    """The health and reflection services. Make it within a running loop; call `closing` when the broker shuts down."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._health = health.HealthServicer()
        names = (service, HEALTH, reflection.SERVICE_NAME)
        self._reflection = reflection.aio.ReflectionServicer(names)
        self._active: Counter[str] = Counter()  # calls, by method
        self._reading = asyncio.Semaphore(_READ_MAX)
        self._connections: dict[str, _Connection] = {}

    async def open(self) -> None:
        """Report SERVING from now on."""
        for name in (self._service, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def closing(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    def services(self) -> Services:
        # Handlers take all requests as streams (service.py gives the reason).
        checked = grpc.stream_unary_rpc_method_handler(
            self._limited("Check", _CHECKS_MAX, self._check),
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        watched = grpc.stream_stream_rpc_method_handler(
            self._limited("Watch", _WATCHES_MAX, self._watch),
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        reflected = grpc.stream_stream_rpc_method_handler(
            self._limited("ServerReflectionInfo", _REFLECTIONS_MAX, self._reflect),
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return {
            HEALTH: {"Check": checked, "Watch": watched},
            reflection.SERVICE_NAME: {"ServerReflectionInfo": reflected},
        }

    async def _check(self, context: Context) -> Any:
        return await self._health.Check(await self._request(context), context)

    async def _watch(self, context: Context) -> None:
        await self._health.Watch(await self._request(context), context)

    async def _reflect(self, context: Context) -> None:
        async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            while (request := await context.read()) is not grpc.aio.EOF:
                yield _checked(request)

        try:
            async with asyncio.timeout(_REFLECTION_SECONDS_MAX):
                async for response in self._reflection.ServerReflectionInfo(requests(), context):
                    await context.write(response)
        except TimeoutError:
            raise LimitExceededError(
                f"a call of reflection lasts {_REFLECTION_SECONDS_MAX:g} seconds at most"
            ) from None

    # --- Limits ---

    def _limited(self, method: str, calls_max: int, answer: _Answering) -> Any:
        async def handle(_: object, context: Context) -> Any:
            try:
                with self._entered(method, calls_max):
                    return await answer(context)
            except RunnelError as error:
                failure = error
            return await refused(context, failure)

        return handle

    @contextmanager
    def _entered(self, method: str, calls_max: int) -> Iterator[None]:
        if self._active[method] >= calls_max:
            raise LimitExceededError(
                f"{calls_max} calls of {method} are under way; no more are allowed"
            )
        self._active[method] += 1
        try:
            yield
        finally:
            self._active[method] -= 1

    async def _request(self, context: Context) -> Any:
        async with self._turn(str(context.peer())):
            return _checked(await single_request(context, seconds_max=_REQUEST_SECONDS_MAX))

    @asynccontextmanager
    async def _turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for a turn to read: first among the calls of the connection, then among all."""
        connection = self._connections.setdefault(peer, _Connection())
        connection.wanted += 1
        try:
            async with connection.reading, self._reading:
                yield
        finally:
            connection.wanted -= 1
            if not connection.wanted:
                del self._connections[peer]


class _Connection:
    """A connection with calls that read, or wait to read, their request."""

    def __init__(self) -> None:
        self.reading = asyncio.Semaphore(_CONNECTION_READ_MAX)
        self.wanted = 0  # turns, including its current ones


def _checked(request: Any) -> Any:
    if request.ByteSize() > _REQUEST_BYTES_MAX:
        raise LimitExceededError(
            f"a request of {request.ByteSize()} bytes; at most {_REQUEST_BYTES_MAX} are allowed"
        )
    return request
