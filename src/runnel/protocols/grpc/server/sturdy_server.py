"""grpcio's server, made to outlive calls of methods whose name is no text.

grpcio decodes the name of a method in the loop that takes all calls, and that loop ends where the name is not UTF-8. It
does not decode the names of registered methods: the core finds those by their bytes. So all methods are registered, and
a call of any other is answered here, before grpcio has looked at its name.

This reaches into grpcio's own parts. Where a version has other parts, its server is used as it is, and the listener
puts another in its place whenever one has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[import-untyped,attr-defined,unused-ignore]
from grpc.aio import _server  # type: ignore[import-untyped,attr-defined,unused-ignore]

Services: TypeAlias = Mapping[str, Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]]
"""By the name of a service and of a method."""

_PARTS: Final = (
    (cygrpc.AioServer, "_request_call"),
    (cygrpc.AioServer, "_request_registered_call"),
    (cygrpc, "_send_error_status_from_server"),
    (cygrpc, "SendInitialMetadataOperation"),
    (cygrpc, "get_working_loop"),
    (_server, "_augment_channel_arguments"),
)
IS_STURDY: Final = all(hasattr(owner, name) for owner, name in _PARTS)
"""Whether this version of grpcio has the parts that are needed."""
_FLAGS: Final = 0


def new_server(
    services: Services,
    options: Sequence[tuple[str, Any]],
    calls_max: int,
    on_unknown: Callable[[], object],
) -> grpc.aio.Server:
    """A server with these services, whose port is still to be added. `on_unknown`: a call named no method of theirs."""
    if IS_STURDY:
        sturdy = _SturdyServer(options, calls_max, on_unknown)
        for service, handlers in services.items():
            sturdy.add_registered_method_handlers(service, dict(handlers))
        return cast("grpc.aio.Server", sturdy)
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls_max)
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(service, dict(handlers))
            for service, handlers in services.items()
        )
    )
    return server


class _SturdyServer(_server.Server):  # type: ignore[misc,unused-ignore]
    def __init__(
        self,
        options: Sequence[tuple[str, Any]],
        calls_max: int,
        on_unknown: Callable[[], object],
    ) -> None:
        # What the constructor above it does, but for the class: one that is made and not used would leak.
        self._loop = cygrpc.get_working_loop()
        options = _server._augment_channel_arguments(options, None)  # noqa: SLF001
        self._server = _Calls(self._loop, None, (), (), options, calls_max)
        self._server.on_unknown = on_unknown


class _Calls(cygrpc.AioServer):  # type: ignore[misc,unused-ignore]
    """Takes calls of registered methods only."""

    on_unknown: Callable[[], object]

    async def _request_call(self) -> Any:
        """grpcio awaits a call of a method that is not registered. It is never given one."""
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            self.on_unknown()
            task = asyncio.get_running_loop().create_task(_answer_unknown(call))
            answering.add(task)
            task.add_done_callback(answering.discard)


async def _answer_unknown(call: Any) -> None:
    try:
        await cygrpc._send_error_status_from_server(  # noqa: SLF001
            call,
            cygrpc.StatusCode.unimplemented,
            "there is no such method",
            (),
            cygrpc.SendInitialMetadataOperation(None, _FLAGS),
            cygrpc.get_working_loop(),
        )
    except cygrpc.ExecuteBatchError:
        return  # the client has left meanwhile
