"""Runs a two-way stream: one task reads, one task writes, and accepted requests are finished when reading ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.grpc_server import shutting_down

# grpcio reports the end of the requests also when the client is gone. It cancels the call a moment later.
_GONE_SECONDS: Final = 0.01


class Finish(Protocol):
    """Answers what was accepted, and ends the writing task. `is_closing`: the broker shuts down."""

    async def __call__(self, *, is_closing: bool) -> None: ...


async def run_two_way_stream(
    call: GrpcCall,
    read: Coroutine[Any, Any, None],
    write: Coroutine[Any, Any, None],
    finish: Finish,
) -> None:
    """Read and write until the client's requests end or the broker shuts down. Raises the error of either task.

    The call's own task only waits, because it is cancelled when the client leaves.
    """
    reading, writing = call.server.tasks.start_awaited(read), call.start(write)
    call.when_closing(reading.cancel)
    try:
        await asyncio.wait({reading})
        is_closing = reading.cancelled()
        if not is_closing:
            reading.result()
            await asyncio.sleep(_GONE_SECONDS)  # cancelled here if the client has vanished
        await finish(is_closing=is_closing)
        await asyncio.shield(writing)
    finally:
        reading.cancel()
        writing.cancel()
        await asyncio.wait({reading, writing})
        if not reading.cancelled():
            reading.exception()  # retrieved, also if the client left in the same moment
    if is_closing:
        raise shutting_down()
