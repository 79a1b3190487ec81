"""A call in which both sides talk: one task reads, one writes, and what was begun is finished when reading ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.grpc_server import shutting_down

# grpcio says that the requests have ended also where the client is gone, and a moment later that it is.
_GONE_SECONDS: Final = 0.01


class Finish(Protocol):
    """See to it that what was begun is answered and that the writing task ends. `is_closing`: the broker goes."""

    async def __call__(self, *, is_closing: bool) -> None: ...


async def talk(
    call: GrpcCall,
    read: Coroutine[Any, Any, None],
    write: Coroutine[Any, Any, None],
    finish: Finish,
) -> None:
    """Until the client has said everything, or the broker goes; raises what either task failed with.

    The call's own task only waits: it is the one that is cancelled when the client leaves.
    """
    reading, writing = call.server.tasks.start_awaited(read), call.start(write)
    call.when_closing(reading.cancel)
    try:
        await asyncio.wait({reading})
        is_closing = reading.cancelled()
        if not is_closing:
            reading.result()
            await asyncio.sleep(_GONE_SECONDS)  # cancelled within it, if the client just vanished
        await finish(is_closing=is_closing)
        await asyncio.shield(writing)
    finally:
        reading.cancel()
        writing.cancel()
        await asyncio.wait({reading, writing})
        if not reading.cancelled():
            reading.exception()  # looked at, also where the client left in the same moment
    if is_closing:
        raise shutting_down()
