"""Clients without a token, that never finish, or that send too much to store: others do not notice them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runnel.broker.broker import Published
from runnel.config import GrpcSettings
from runnel.protocols.grpc import service
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.methods import live, publish_stream
from runnel.protocols.grpc.methods.publish_requests import RequestPart
from runnel.protocols.grpc.server import public
from runnel.protocols.grpc.server.calls import GrpcCall
from tests.protocols.grpc.scene import (
    LOOPS,
    NewLoop,
    Reader,
    Scene,
    add_token,
    channel,
    client,
    failure,
    messages,
    next_of,
    opened,
    publish,
    run,
    until_calls,
    with_token,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def unfinished(opened_channel: grpc.aio.Channel, method: str) -> Any:
    """A call of a method with one request, which does not come."""
    return opened_channel.stream_unary(method)()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def endless_calls(path: bytes, count: int) -> bytes:
    """Of a client that does not even hear what the server allows: each has the first bytes of a request."""

    def field(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = (
        field(b":method", b"POST")
        + field(b":scheme", b"http")
        + field(b":path", path)
        + field(b":authority", b"broker")
        + field(b"te", b"trailers")
        + field(b"content-type", b"application/grpc")
    )
    calls = (
        frame(1, 4, stream, headers) + frame(0, 0, stream, b"\0\0\0\0\x40abc")
        for stream in range(1, 2 * count, 2)
    )
    return PREFACE + frame(4, 0, 0, b"") + b"".join(calls)


# --- Without a token ---


@LOOPS
def test_a_caller_without_a_token_is_refused_before_its_request_has_come(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with opened(tokens=tmp_path / "tokens.json") as scene, channel(scene) as own:
            for method in ("Publish", "Ping"):
                call = unfinished(own, f"/runnel.v1.Runnel/{method}")
                failed = await failure(call)
                assert failed.status is StatusCode.UNAUTHENTICATED
            call = own.stream_stream("/runnel.v1.Runnel/Subscribe")()
            assert (await failure(call.read())).status is StatusCode.UNAUTHENTICATED

    run(scenario(), new_loop)


def test_those_who_watch_health_take_no_place_of_a_callers(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "reader", "read:*")

    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", calls_max=1)
        async with opened(settings, tokens=tokens) as scene, channel(scene) as own:
            stub = health_pb2_grpc.HealthStub(own)
            calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(80)]
            told = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
            assert Counter(type(each) for each in told) == {
                health_pb2.HealthCheckResponse: 64,
                grpc.aio.AioRpcError: 16,
            }
            await scene.stub.Ping(pb.PingRequest(), **with_token(text))
            await stub.Check(health_pb2.HealthCheckRequest())
            # A client that leaves makes room.
            for call in calls:
                call.cancel()
            async with channel(scene) as other:
                watching = health_pb2_grpc.HealthStub(other).Watch
                while await _is_refused(watching(health_pb2.HealthCheckRequest())):
                    pass

    run(scenario())


async def _is_refused(call: Any) -> bool:
    try:
        await next_of(call)
    except grpc.aio.AioRpcError as error:
        return error.code() is StatusCode.RESOURCE_EXHAUSTED
    return False


def test_who_asks_for_health_without_end_keeps_only_himself_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with opened() as scene, channel(scene) as own, channel(scene) as other:
            calls = [unfinished(own, "/grpc.health.v1.Health/Check") for _ in range(60)]
            for call in calls:
                await call.wait_for_connection()
            await health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest())
            for call in calls:
                call.cancel()
            monkeypatch.setattr(public, "_REQUEST_SECONDS_MAX", 0.01)
            failed = await failure(unfinished(other, "/grpc.health.v1.Health/Check"))
            assert (failed.status, failed.code) == (StatusCode.UNAVAILABLE, "timeout")

    run(scenario())


def test_health_is_not_asked_for_with_long_names() -> None:
    async def scenario() -> None:
        async with opened() as scene, channel(scene) as own:
            request = health_pb2.HealthCheckRequest(service="x" * 5000)
            failed = await failure(health_pb2_grpc.HealthStub(own).Check(request))
            assert failed.status is StatusCode.RESOURCE_EXHAUSTED

    run(scenario())


# --- Requests that do not end ---


@LOOPS
def test_a_request_that_does_not_come_whole_is_not_waited_for_for_ever(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_REQUEST_SECONDS_MAX", 0.05)

    async def scenario() -> None:
        async with opened() as scene, channel(scene) as own:
            for method in ("Ping", "Publish"):
                failed = await failure(unfinished(own, f"/runnel.v1.Runnel/{method}"))
                assert (failed.status, failed.code) == (StatusCode.UNAVAILABLE, "timeout")
                assert "0.05 seconds" in failed.text
            await until_calls(scene, 0)
            await scene.stub.Ping(pb.PingRequest())

    run(scenario(), new_loop)


def test_a_call_without_its_request_is_malformed() -> None:
    async def scenario() -> None:
        async with opened() as scene, channel(scene) as own:
            call = unfinished(own, "/runnel.v1.Runnel/Ping")
            await call.done_writing()
            failed = await failure(call)
            assert (failed.status, failed.code) == (StatusCode.INVALID_ARGUMENT, "malformed")

    run(scenario())


def test_one_connection_takes_only_a_part_of_the_calls() -> None:
    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", calls_max=200)
        async with opened(settings) as scene:
            host, _, port = scene.listener.address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(endless_calls(b"/runnel.v1.Runnel/Ping", 1000))
            await writer.drain()
            while scene.listener.connection_count < 50:  # noqa: ASYNC110 - the listener's doing
                await asyncio.sleep(0)
            for _ in range(50):
                await scene.stub.Ping(pb.PingRequest())
            assert scene.listener.connection_count <= 150
            writer.close()
            await until_calls(scene, 0)

    run(scenario())


def test_a_client_with_more_calls_than_a_connection_has_waits_and_is_served() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for _ in range(2):
                pings = (scene.stub.Ping(pb.PingRequest()) for _ in range(300))
                assert len(await asyncio.gather(*pings)) == 300

    run(scenario())


# --- More than can be stored ---


def test_a_stream_is_read_no_further_than_so_many_bytes_ahead_of_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = publish_stream._appended
    stored = asyncio.Event()

    async def slowly(call: GrpcCall, part: RequestPart) -> asyncio.Future[Published]:
        async def when_stored() -> Published:
            await stored.wait()
            return await (await append(call, part))

        return asyncio.ensure_future(when_stored())

    monkeypatch.setattr(publish_stream, "_appended", slowly)
    monkeypatch.setattr(publish_stream, "_UNSTORED_BYTES_MAX", 250_000)

    async def scenario() -> None:
        async with opened() as scene:
            counters = scene.broker.metrics.counters
            before = counters.requests
            call = scene.stub.PublishStream()
            sending = asyncio.ensure_future(_send(call, 20))
            # The call itself is counted too.
            while counters.requests < before + 4:  # noqa: ASYNC110 - the listener's doing
                await asyncio.sleep(0)
            for _ in range(20):
                await scene.stub.Ping(pb.PingRequest())
            assert counters.requests == before + 4 + 20
            stored.set()
            answered: list[int] = []
            while len(answered) < 20:
                answered += [answer.id for answer in (await next_of(call)).answers]
            assert answered == list(range(1, 21))
            await sending

    async def _send(call: Any, count: int) -> None:
        for number in range(1, count + 1):
            request = pb.PublishRequest(id=number, messages=messages("t", bytes(100_000)))
            await call.write(request)
        await call.done_writing()

    run(scenario())


def test_a_request_larger_than_what_may_wait_is_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish_stream, "_UNSTORED_BYTES_MAX", 10)

    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            for topic in ("t", "!", "t"):  # the second is refused
                await call.write(pb.PublishRequest(messages=messages(topic, bytes(1000))))
                (answer,) = (await next_of(call)).answers
                assert answer.HasField("error") == (topic == "!")

    run(scenario())


# --- Long positions ---


def test_a_long_position_comes_now_and_then_and_leads_back_without_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_POSITION_BYTES_MAX", 0)
    monkeypatch.setattr(live, "_POSITION_SECONDS", 3600.0)

    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "t/a", "t/b").begun()
            first = reader.position
            assert first
            for number in range(3):
                await publish(scene, "t/a", b"%d" % number)
                await reader.take(1)
                assert not reader.position
            again = await Reader(scene.stub, "t/a", "t/b", position=first).begun()
            assert await again.payloads(3) == [b"0", b"1", b"2"]

    run(scenario())


def test_a_long_position_that_is_owed_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_POSITION_BYTES_MAX", 0)
    monkeypatch.setattr(live, "_POSITION_SECONDS", 0.05)

    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "t/a").begun()
            await publish(scene, "t/a", b"1")
            event = await reader.event()
            assert event.delivery.messages
            if not event.position:
                owed = await reader.event()
                assert owed.HasField("delivery")
                assert not owed.delivery.messages
            await publish(scene, "t/a", b"2")
            again = await Reader(scene.stub, "t/a", position=reader.position).begun()
            assert await again.payloads(1) == [b"2"]

    run(scenario())


def test_a_reader_that_closes_is_told_its_position_however_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_POSITION_BYTES_MAX", 0)
    monkeypatch.setattr(live, "_POSITION_SECONDS", 3600.0)

    async def scenario() -> None:
        async with opened() as scene, client(scene) as other:
            reader = await Reader(other, "t/a").begun()
            await publish(scene, "t/a", b"1")
            await reader.take(1)
            draining = asyncio.ensure_future(_drained(scene))
            event = await reader.event()
            assert event.HasField("closing")
            assert event.position
            assert await draining

    async def _drained(scene: Scene) -> bool:
        return await scene.listener.drain()

    run(scenario())
