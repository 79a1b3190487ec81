"""The gRPC listener: which clients it admits, how much they may request, and how calls end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpc import Compression, StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from runnel.broker.access import Access
from runnel.config import GrpcSettings
from runnel.protocols.grpc import listener
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server import admission
from runnel.security.penalties import Penalties
from runnel.security.tokens import TokenFile
from tests.protocols.grpc.scene import (
    LOOPS,
    NewLoop,
    Reader,
    Scene,
    Worker,
    add_token,
    block,
    channel,
    client,
    failure,
    messages,
    opened,
    publish,
    rest_of,
    run,
    until_calls,
    with_token,
)

SERVICE = "runnel.v1.Runnel"
NS_PER_MS = 1_000_000


def revoke(path: Path, name: str) -> None:
    with TokenFile(path).changing() as tokens:
        tokens[:] = [token for token in tokens if token.name != name]


# --- Limits ---


def test_one_call_more_than_allowed_is_refused_and_let_in_later() -> None:
    async def scenario() -> None:
        async with opened(GrpcSettings(listen="127.0.0.1:0", calls_max=2)) as scene:
            readers = [await Reader(scene.stub, "a").begun() for _ in range(2)]
            failed = await failure(scene.stub.Ping(pb.PingRequest()))
            assert (failed.status, failed.code) == (
                StatusCode.RESOURCE_EXHAUSTED,
                "limit_exceeded",
            )
            assert "grpc.calls_max" in failed.text
            readers[0].call.cancel()
            await until_calls(scene, 1)
            await scene.stub.Ping(pb.PingRequest())
            assert scene.broker.metrics.counters.connections_refused == 1

    run(scenario())


def test_a_request_larger_than_allowed_is_refused() -> None:
    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", message_bytes_max=2**16)
        async with opened(settings) as scene:
            request = pb.PublishRequest(messages=messages("a", bytes(2**17)))
            failed = await failure(scene.stub.Publish(request))
            assert failed.status is StatusCode.RESOURCE_EXHAUSTED
            await publish(scene, "a", bytes(2**15))

    run(scenario())


def test_more_metadata_than_allowed_is_refused() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            metadata = (("x-long", "x" * 20_000),)
            failed = await failure(scene.stub.Ping(pb.PingRequest(), metadata=metadata))
            assert failed.status is StatusCode.RESOURCE_EXHAUSTED
            await scene.stub.Ping(pb.PingRequest())

    run(scenario())


async def raw(scene: Scene, method: str, data: bytes) -> Any:
    """A call with bytes as they are."""
    async with channel(scene, max_send_message_length=-1) as opened_channel:
        call: Any = opened_channel.unary_unary(f"/{SERVICE}/{method}")
        return await call(data)


def _nested(depth: int) -> bytes:
    """Groups within groups: unknown fields, each inside the last."""
    return b"\xfb\x3e" * depth + b"\xfc\x3e" * depth


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\x0a\x05ab", b"\x0a" * 1000, b"\x1a\xff\xff\xff\xff\x0f", _nested(100_000)],
    ids=["a byte", "cut", "lengths", "beyond", "deep"],
)
def test_rubbish_is_answered_as_malformed(data: bytes) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for method in ("Publish", "Fetch", "SetCursor"):
                failed = await failure(raw(scene, method, data))
                assert (failed.status, failed.code) == (
                    StatusCode.INVALID_ARGUMENT,
                    "malformed",
                ), failed
            async with channel(scene) as opened_channel:
                for method in ("PublishStream", "Consume"):
                    call: Any = opened_channel.stream_stream(f"/{SERVICE}/{method}")()
                    await call.write(data)
                    assert (await failure(rest_of(call))).code == "malformed"
            await scene.stub.Ping(pb.PingRequest())

    run(scenario())


def test_bombs_end_at_the_limits() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for method, data in (
                ("Publish", b"\x1a\x00" * 5_000_000),  # empty messages
                ("SetCursor", b"\x12\x00" * 3_000_000),  # empty places
                ("ListTopics", b"\x0a" + b"\x80\x80\x80\x02" + bytes(2**22)),
            ):
                failed = await failure(raw(scene, method, data))
                assert (failed.status, failed.code) == (
                    StatusCode.RESOURCE_EXHAUSTED,
                    "limit_exceeded",
                ), failed
            cut = await failure(raw(scene, "Publish", b"\x1a\x00" * 40_000 + b"\x1a\x80"))
            assert cut.code == "malformed"
            large = pb.PublishRequest(batch=block("a", bytes(900_000)), id=2**60)
            await scene.stub.Publish(large)
            many = pb.PublishRequest(topic="a", messages=[pb.Message()] * 50_000)
            assert len((await scene.stub.Publish(many)).offsets) == 50_000

    run(scenario())


def test_a_compressed_bomb_ends_at_the_limit() -> None:
    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", message_bytes_max=2**20)
        async with opened(settings) as scene, channel(scene) as opened_channel:
            call: Any = opened_channel.unary_unary(f"/{SERVICE}/Publish")
            bomb = call(bytes(2**24), compression=Compression.Gzip)
            assert (await failure(bomb)).status is StatusCode.RESOURCE_EXHAUSTED
            request = pb.PublishRequest(messages=messages("a", bytes(2**19)))
            await scene.stub.Publish(request, compression=Compression.Gzip)

    run(scenario())


def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_OTHER_CONNECTIONS_MAX", 1)

    async def scenario() -> None:
        async with opened(GrpcSettings(listen="127.0.0.1:0", calls_max=3)) as scene:
            await scene.stub.Ping(pb.PingRequest())
            host, _, port = scene.listener.address.rpartition(":")
            others = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
            waits = [asyncio.ensure_future(_until_closed(reader)) for reader, _ in others]
            refused, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            while len(refused) < 5:
                more, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                refused |= more
            await scene.stub.Ping(pb.PingRequest())
            for _, writer in others:
                writer.close()
            await asyncio.wait(waits)

    run(scenario())


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(4096):
            pass


def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            failed = await failure(raw(scene, "Nonsense", b""))
            assert failed.status is StatusCode.UNIMPLEMENTED

    run(scenario())


def test_a_bug_is_told_without_its_text_and_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[tuple[str, int]] = []

    class Lines(logging.Handler):
        """Without the records: their tracebacks would keep grpcio's poller alive."""

        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.event, record.levelno))  # type: ignore[attr-defined]

    logger = logging.getLogger("runnel.grpc")
    monkeypatch.setattr(logger, "handlers", [Lines()])
    monkeypatch.setattr(logger, "propagate", False)

    async def scenario() -> None:
        async def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret of ours")

        async with opened() as scene:
            monkeypatch.setattr(Access, "describe_topic", broken)
            monkeypatch.setattr(Access, "subscribe", broken)
            monkeypatch.setattr(Access, "consume", broken)
            for begin in (describe, subscribe, consume):
                failed = await failure(begin(scene))
                assert (failed.status, failed.code) == (StatusCode.INTERNAL, "internal")
                assert "secret" not in failed.text
                assert lines == [("a call failed", logging.ERROR)]
                lines.clear()

    async def describe(scene: Scene) -> None:
        await scene.stub.DescribeTopic(pb.DescribeTopicRequest(name="a"))

    async def subscribe(scene: Scene) -> None:
        await Reader(scene.stub, "a").event()

    async def consume(scene: Scene) -> None:
        worker = Worker(scene.stub)
        await worker.say(open=pb.ConsumeOpen(subscription="s"))
        await worker.event("consuming")

    run(scenario())


# --- Tokens ---


def test_a_token_is_needed_and_its_rights_hold(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "writer", "publish:a/*", "read:a/x")

    async def scenario() -> None:
        async with opened(tokens=tokens) as scene:
            request = pb.PublishRequest(messages=messages("a/x", b"1"))
            for metadata in (
                {},
                with_token("runnel_0000_wrong"),
                {"metadata": (("authorization", f"Basic {text}"),)},
            ):
                failed = await failure(scene.stub.Publish(request, **metadata))
                assert (failed.status, failed.code) == (
                    StatusCode.UNAUTHENTICATED,
                    "unauthenticated",
                )
                assert text not in failed.text
            await scene.stub.Publish(request, **with_token(text))
            refused = (
                scene.stub.Publish(
                    pb.PublishRequest(messages=messages("b", b"1", b"2")), **with_token(text)
                ),
                scene.stub.Publish(pb.PublishRequest(batch=block("b", b"1")), **with_token(text)),
                scene.stub.Fetch(pb.FetchRequest(topic="a/y"), **with_token(text)),
                scene.stub.Subscribe(
                    pb.SubscribeRequest(patterns=["a/*"]), **with_token(text)
                ).read(),
                scene.stub.DeleteTopic(pb.DeleteTopicRequest(name="a/x"), **with_token(text)),
                scene.stub.GetStatistics(pb.GetStatisticsRequest(), **with_token(text)),
            )
            for call in refused:
                failed = await failure(call)
                assert (failed.status, failed.code) == (
                    StatusCode.PERMISSION_DENIED,
                    "forbidden",
                )
            stream = scene.stub.PublishStream(**with_token(text))
            await stream.write(pb.PublishRequest(id=1, messages=messages("b", b"1")))
            assert (await stream.read()).answers[0].error.code == "forbidden"
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a/x"), **with_token(text))
            assert len(fetched.messages) == 1

    run(scenario())


def test_a_revoked_token_ends_its_streams(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "reader", "read:*", "publish:*", "consume:*")

    async def scenario() -> None:
        async with opened(tokens=tokens) as scene:
            subscribe = pb.SubscribeRequest(patterns=["a"])
            reading = scene.stub.Subscribe(subscribe, **with_token(text))
            await reading.read()
            publishing = scene.stub.PublishStream(**with_token(text))
            await publishing.write(pb.PublishRequest(id=1, messages=messages("a", b"1")))
            await publishing.read()
            consuming = scene.stub.Consume(**with_token(text))
            opening = pb.ConsumeOpen(subscription="s", patterns=["a"], mode=pb.MODE_SHARED)
            await consuming.write(pb.ConsumeRequest(open=opening))
            await consuming.read()
            await reading.read()
            fetch = pb.FetchRequest(topic="a", offset=2, wait_ms=20_000)
            waiting = asyncio.ensure_future(scene.stub.Fetch(fetch, **with_token(text)))
            await until_calls(scene, 4)
            revoke(tokens, "reader")
            for call in (reading.read(), publishing.read(), rest_of(consuming), waiting):
                failed = await failure(call)
                assert (failed.status, failed.code) == (
                    StatusCode.UNAUTHENTICATED,
                    "unauthenticated",
                )
            assert scene.listener.connection_count == 0

    run(scenario())


def test_a_token_has_only_so_many_calls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "reader", "read:*", connections_max=1)

    async def scenario() -> None:
        async with opened(tokens=tokens) as scene:
            request = pb.SubscribeRequest(patterns=["a"])
            reading = scene.stub.Subscribe(request, **with_token(text))
            await reading.read()
            failed = await failure(scene.stub.Ping(pb.PingRequest(), **with_token(text)))
            assert (failed.code, "'reader'" in failed.text) == ("limit_exceeded", True)
            reading.cancel()
            await until_calls(scene, 0)
            await scene.stub.Ping(pb.PingRequest(), **with_token(text))

    run(scenario())


def test_wrong_tokens_wait_but_not_too_many_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_PUNISHED_MAX", 2)

    async def scenario() -> None:
        async with opened(tokens=tmp_path / "tokens.json") as scene:
            began = asyncio.get_running_loop().time()
            wrong = with_token("runnel_0000_wrong")
            calls = [failure(scene.stub.Ping(pb.PingRequest(), **wrong)) for _ in range(20)]
            await asyncio.gather(*calls)
            assert 0.1 < asyncio.get_running_loop().time() - began < 2.0

    run(scenario())


def test_missing_tokens_do_not_wait_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    async def wait(penalties: Penalties, address: str) -> None:
        waits.append(address)

    monkeypatch.setattr(Penalties, "wait", wait)

    async def scenario() -> None:
        async with opened(tokens=tmp_path / "tokens.json") as scene:
            await failure(scene.stub.Ping(pb.PingRequest()))
            assert waits == []
            await failure(scene.stub.Ping(pb.PingRequest(), **with_token("runnel_0000_wrong")))
            assert waits == ["127.0.0.1"]

    run(scenario())


# --- The end ---


@LOOPS
def test_a_drain_tells_streams_and_lets_nobody_in(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "a").begun()
            worker = Worker(scene.stub)
            await worker.open("s", "a", options=pb.WorkOptions(retry_delay_ms=0))
            publisher = scene.stub.PublishStream()
            await publisher.write(pb.PublishRequest(id=1, messages=messages("a", b"1")))
            await publisher.read()
            await worker.take(1)
            await reader.take(1)
            fetch = pb.FetchRequest(topic="a", offset=2, wait_ms=20_000)
            waiting = asyncio.ensure_future(scene.stub.Fetch(fetch))
            await until_calls(scene, 4)
            draining = asyncio.ensure_future(scene.listener.drain())
            closing = await reader.event()
            assert closing.closing.within_ms == 10_000
            assert (await worker.event("closing")).closing.text
            assert (await publisher.read()).HasField("closing")
            for call in (reader.call.read(), worker.call.read(), publisher.read(), waiting):
                failed = await failure(call)
                assert (failed.status, failed.code, failed.retriable) == (
                    StatusCode.UNAVAILABLE,
                    "closed",
                    True,
                )
            assert await draining is True
            failed = await failure(scene.stub.Ping(pb.PingRequest()))
            assert (failed.status, failed.code) == (StatusCode.UNAVAILABLE, "closed")
            # What the consumer had does not count as failed.
            assert scene.broker.metrics.counters.work_failed == 0

    run(scenario(), new_loop)


def test_a_drain_waits_no_longer_than_it_may_and_hurries_if_told() -> None:
    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", drain_timeout_ns=100 * NS_PER_MS)
        async with opened(settings) as scene, client(scene) as stuck:
            await _stick(scene, stuck)
            assert await scene.listener.drain() is False
        patient = GrpcSettings(listen="127.0.0.1:0", drain_timeout_ns=3_600_000 * NS_PER_MS)
        async with opened(patient) as scene, client(scene) as stuck:
            await _stick(scene, stuck)
            draining = asyncio.ensure_future(scene.listener.drain())
            await asyncio.sleep(0)
            scene.listener.hurry()
            assert await draining is False

    run(scenario())


async def _stick(scene: Scene, stub: Any) -> None:
    """A reader that is in the middle of a write which it does not take."""
    await Reader(stub, "a").begun()
    for _ in range(40):
        await publish(scene, "a", bytes(1_000_000))


def test_what_was_sent_before_a_drain_is_stored_and_answered() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 101):
                await call.write(pb.PublishRequest(id=number, messages=messages("a", b"1")))
            first = await call.read()
            draining = asyncio.ensure_future(scene.listener.drain())
            answered = list(first.answers)

            async def read_on() -> None:
                while True:
                    answered.extend((await call.read()).answers)

            assert (await failure(read_on())).status is StatusCode.UNAVAILABLE
            assert await draining
            topic = await scene.broker.topics.describe("a")
            assert topic.partitions[0].next_offset == len(answered) + 1

    run(scenario())


def test_a_stream_that_begins_while_the_broker_goes_is_told() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            readers = [Reader(scene.stub, "a") for _ in range(3)]
            workers = [Worker(scene.stub) for _ in range(3)]
            for worker in workers:
                opening = pb.ConsumeOpen(subscription="s", patterns=["a"], mode=pb.MODE_SHARED)
                await worker.say(open=opening)
            while not scene.listener.connection_count:  # noqa: ASYNC110 - the listener's doing
                await asyncio.sleep(0)
            assert await scene.listener.drain() is True
            for call in (*(each.call for each in readers), *(each.call for each in workers)):
                assert (await failure(rest_of(call))).code == "closed"
            (state,) = await scene.broker.consumer_groups.subscriptions() or (None,)
            assert state is None or state.members[0].consumers == 0

    run(scenario())


def test_closing_ends_whoever_is_left() -> None:
    async def scenario() -> None:
        async with opened() as scene, client(scene) as stuck:
            await _stick(scene, stuck)
            reader = await Reader(scene.stub, "live/*").begun()
            await scene.listener.close()
            failed = await failure(reader.call.read())
            assert failed.status is StatusCode.UNAVAILABLE
            assert not scene.listener.connection_count
            assert not scene.listener.server.tasks

    run(scenario())


# --- Health and reflection ---


async def _check_health(scene: Scene, service: str) -> int:
    async with channel(scene) as opened_channel:
        check = opened_channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        response = await check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)


def test_health_is_told_without_a_token_and_ends_with_a_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tokens=tmp_path / "tokens.json") as scene:
            for service in ("", SERVICE):
                assert await _check_health(scene, service) == 1
            assert await scene.listener.drain()
            for service in ("", SERVICE):
                assert await _check_health(scene, service) == 2

    run(scenario())


def test_reflection_shows_the_service() -> None:
    async def scenario() -> None:
        async with opened() as scene, channel(scene) as opened_channel:
            reflect = opened_channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            call: Any = reflect()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await call.read()).list_services_response.service
            assert SERVICE in [service.name for service in listed]
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
            await call.write(request)
            files: Sequence[bytes] = (
                await call.read()
            ).file_descriptor_response.file_descriptor_proto
            assert pb.DESCRIPTOR.serialized_pb in files
            await call.done_writing()

    run(scenario())
