"""The ceiling of the gRPC listener: the same bidirectional stream in grpcio, with nothing behind it.

It sends a small answer for each request. Both are the listener's own messages, so that both sides of the comparison
decode and encode the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.systems.system import RunningServer, free_port, scratch, serving
from runnel.protocols.grpc.generated import runnel_pb2 as pb

SERVICE, METHOD = "runnel.v1.Runnel", "PublishStream"

_ROOT = Path(__file__).parents[2]


async def _publish_stream(
    _: AsyncIterator[pb.PublishRequest], context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        offsets = range(1, 1 + max(1, len(request.messages)))
        answer = pb.PublishResponse(id=request.id, level=pb.LEVEL_STORED, offsets=offsets)
        await context.write(pb.PublishStreamResponse(answers=(answer,)))


async def _serve(port: int) -> None:
    handler = grpc.stream_stream_rpc_method_handler(
        _publish_stream,
        request_deserializer=pb.PublishRequest.FromString,
        response_serializer=pb.PublishStreamResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


@contextmanager
def serve() -> Iterator[RunningServer]:
    with scratch() as directory:
        port = free_port()
        command = [sys.executable, "-m", "bench.systems.empty_grpc", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        with serving(command, port, "grpc", directory, environment=environment) as served:
            yield served


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
