"""grpcio's server, made to survive calls of methods whose name is not UTF-8.

grpcio decodes the name of a method in the loop that accepts all calls, and that loop ends if the name is not UTF-8. It
does not decode the names of registered methods: the core finds them by their bytes. So all methods are registered, and
a call of any other method is answered here, before grpcio decodes its name.

This uses grpcio's internals. If a version lacks them, its server is used unchanged, and the listener replaces it
whenever it has ended.
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
"""Handlers by the names of service and method."""

_PARTS: Final = (
    (cygrpc.AioServer, "_request_call"),
    (cygrpc.AioServer, "_request_registered_call"),
    (cygrpc, "_send_error_status_from_server"),
    (cygrpc, "SendInitialMetadataOperation"),
    (cygrpc, "get_working_loop"),
    (_server, "_augment_channel_arguments"),
)
IS_STURDY: Final = all(hasattr(owner, name) for owner, name in _PARTS)
"""Whether this version of grpcio has the internals that `_SturdyServer` needs."""
_FLAGS: Final = 0


def new_server(
    services: Services,
    options: Sequence[tuple[str, Any]],
    calls_max: int,
    on_unknown: Callable[[], object],
) -> grpc.aio.Server:
    """A server with these services, without a port. `on_unknown` is called when a call names no method of theirs."""
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
    """grpcio's server over `_Calls`."""

    def __init__(
        self,
        options: Sequence[tuple[str, Any]],
        calls_max: int,
        on_unknown: Callable[[], object],
    ) -> None:
        # Repeats the base's constructor with another class of server: one that is made and not used would leak.
        self._loop = cygrpc.get_working_loop()
        options = _server._augment_channel_arguments(options, None)  # noqa: SLF001
        self._server = _Calls(self._loop, None, (), (), options, calls_max)
        self._server.on_unknown = on_unknown


class _Calls(cygrpc.AioServer):  # type: ignore[misc,unused-ignore]
    """grpcio's core server, which accepts calls of registered methods only."""

    on_unknown: Callable[[], object]

    async def _request_call(self) -> Any:
        """Answer calls of methods that are not registered. This never returns: grpcio gets none of them."""
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
