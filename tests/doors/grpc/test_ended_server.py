"""A call whose method is not UTF-8 ends grpcio's server for good: the door opens another, and nobody loses a call."""

from __future__ import annotations

import asyncio

import pytest
from grpc import aio

from runnel.config import GrpcSettings
from runnel.doors.grpc import listener
from runnel.doors.grpc.generated import runnel_pb2 as pb
from tests.doors.grpc.scene import LOOPS, NewLoop, Reader, Scene, client, opened, publish, run
from tests.doors.grpc.test_hostile import endless_calls

# The library has one thread, and what it logs of the end keeps it: begun here, it is there before any test, and stays.
aio.init_grpc_aio()


async def _end_server(scene: Scene) -> None:
    """By a call of a method that is no text."""
    host, _, port = scene.listener.address.rpartition(":")
    before = scene.broker.metrics.counters.protocol_errors
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(endless_calls(b"/runnel.v1.Runnel/P\xf4", 1))
    while scene.broker.metrics.counters.protocol_errors == before:  # noqa: ASYNC110 - the door's doing
        await asyncio.sleep(0.001)
    writer.close()


async def _ping(scene: Scene) -> None:
    """As a client that has just come, and tries again if it must."""
    async with client(scene) as stub:
        await stub.Ping(pb.PingRequest(), wait_for_ready=True)


@LOOPS
def test_a_method_that_is_no_text_does_not_close_the_door(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_LOOK_SECONDS", 0.01)

    async def scenario() -> None:
        # grpcio leaves a task whose failure nobody asks for.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        async with opened(GrpcSettings(listen="127.0.0.1:0")) as scene:
            for _ in range(3):
                await _end_server(scene)
                await _ping(scene)

    run(scenario(), new_loop)


def test_calls_under_way_outlive_the_server_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_LOOK_SECONDS", 0.01)

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        async with opened() as scene, client(scene) as other:
            reader = await Reader(other, "t").begun()
            await _end_server(scene)
            await _ping(scene)
            for payload in (b"1", b"2"):
                await publish(scene, "t", payload)
                assert await reader.payloads(1) == [payload]

    run(scenario())
