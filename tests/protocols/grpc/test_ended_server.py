"""A call whose method is not UTF-8 ends grpcio's server. Ours survives it, or is replaced by another."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from grpc import StatusCode, aio

from runnel.config import GrpcSettings
from runnel.protocols.grpc import listener
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server import sturdy_server
from tests.protocols.grpc.scene import (
    LOOPS,
    NewLoop,
    Reader,
    Scene,
    channel,
    client,
    opened,
    publish,
    run,
)
from tests.protocols.grpc.test_hostile import endless_calls

# The library has one thread, and what it logs of the end keeps it: begun here, it is there before any test, and stays.
aio.init_grpc_aio()


async def _end_server(scene: Scene) -> None:
    """By a call of a method that is no text."""
    host, _, port = scene.listener.address.rpartition(":")
    before = scene.broker.metrics.counters.protocol_errors
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(endless_calls(b"/runnel.v1.Runnel/P\xf4", 1))
    while scene.broker.metrics.counters.protocol_errors == before:  # noqa: ASYNC110 - the listener's doing
        await asyncio.sleep(0.001)
    writer.close()


async def _ping(scene: Scene) -> None:
    """As a client that has just come, and tries again if it must."""
    async with client(scene) as stub:
        await stub.Ping(pb.PingRequest(), wait_for_ready=True)


@LOOPS
def test_methods_that_are_no_text_disturb_nobody(
    new_loop: NewLoop, caplog: pytest.LogCaptureFixture
) -> None:
    problems: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: problems.append(context)
        )
        async with opened() as scene:
            reader = await Reader(scene.stub, "t").begun()
            server = scene.listener._aio_server
            counters = scene.broker.metrics.counters
            host, _, port = scene.listener.address.rpartition(":")
            for number in range(20):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(endless_calls(b"/runnel.v1.Runnel/P\xf4", 10))
                async with asyncio.timeout(20):
                    while counters.protocol_errors < 10 * (number + 1):
                        await scene.stub.Ping(pb.PingRequest(), timeout=5)
                writer.close()
                # On the connection that was there, and on a new one that does not wait to be let in.
                await publish(scene, "t", b"%d" % number)
                assert await reader.payloads(1) == [b"%d" % number]
                async with client(scene) as another:
                    await another.Ping(pb.PingRequest(), timeout=5)
            assert scene.listener._aio_server is server
            assert counters.protocol_errors == 200

    with caplog.at_level(logging.WARNING):
        run(scenario(), new_loop)
    assert problems == []
    told = [r for r in caplog.records if "method" in r.getMessage() or r.levelno > logging.WARNING]
    assert [r.getMessage() for r in told] == ["a method was called that does not exist times=1"]


def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async def scenario() -> None:
        async with opened() as scene, channel(scene) as open_channel:
            for method in ("/runnel.v1.Runnel/Pong", "/no.such.Service/Ping", "/"):
                call: Any = open_channel.unary_unary(method)
                with pytest.raises(aio.AioRpcError) as raised:
                    await call(b"")
                assert raised.value.code() is StatusCode.UNIMPLEMENTED
                assert "no such method" in str(raised.value.details())

    run(scenario())


# --- With a version of grpcio that cannot be made sturdy ---


@LOOPS
def test_a_method_that_is_no_text_does_not_close_the_listener(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(sturdy_server, "IS_STURDY", False)

    async def scenario() -> None:
        # grpcio leaves a task whose failure it never retrieves.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        async with opened(GrpcSettings(listen="127.0.0.1:0")) as scene:
            for _ in range(3):
                await _end_server(scene)
                await _ping(scene)

    run(scenario(), new_loop)


def test_calls_under_way_outlive_the_server_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(sturdy_server, "IS_STURDY", False)

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
