"""A broker in memory behind the gRPC listener on a loopback port, and clients of it."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import uvloop

from runnel.broker.broker import Broker
from runnel.config import (
    IN_MEMORY,
    Authentication,
    GrpcSettings,
    Keep,
    SecuritySettings,
    Settings,
    TopicRule,
)
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.listener import GrpcListener
from runnel.security.authenticator import Authenticator
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from tests.protocols.grpc.stub import Stub

ANYWHERE = GrpcSettings(listen="127.0.0.1:0")
LIVE = TopicRule(match="live/*", keep=Keep.NONE)
PARTED = TopicRule(match="parted/*", partitions=4)
# Far more than any of these tests takes: a longer wait would be in vain.
PATIENCE_S = 30.0

LOOPS = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run(main: Awaitable[None], new_loop: NewLoop = asyncio.new_event_loop) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
    # grpcio's poller ends with the last call, channel or server that is freed, and some lie in circles.
    gc.collect()


class Scene:
    """What a test has in its hands."""

    def __init__(
        self, broker: Broker, authenticator: Authenticator, listener: GrpcListener
    ) -> None:
        self.broker = broker
        self.authenticator = authenticator
        self.listener = listener
        self.stub: Stub  # of the first client


@asynccontextmanager
async def opened(
    grpc_settings: GrpcSettings = ANYWHERE, *, tokens: Path | None = None, **sections: Any
) -> AsyncIterator[Scene]:
    """A broker, its listener, and one client. With a file of tokens the listener asks for one."""
    security = SecuritySettings()
    if tokens is not None:
        security = SecuritySettings(
            authentication=Authentication.TOKEN, tokens_file=str(tokens), token_connections_max=8
        )
    rules = (LIVE, PARTED)
    settings = Settings(data=IN_MEMORY, grpc=grpc_settings, security=security, topics=rules)
    settings = msgspec.structs.replace(settings, **sections)
    directory = None if settings.data == IN_MEMORY else settings.data
    clock = SystemClock()
    workers = ThreadWorkers(1)
    try:
        authenticator = Authenticator.open(settings, clock)
        broker = await Broker.open(
            settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers
        )
        try:
            authenticator.start()
            listener = await GrpcListener.open(broker, authenticator, settings)
            try:
                scene = Scene(broker, authenticator, listener)
                async with client(scene) as scene.stub:
                    yield scene
            finally:
                await listener.close()
                await authenticator.close()
        finally:
            await broker.close()
    finally:
        workers.close()


def with_token(text: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {text}"),)}


def add_token(path: Path, name: str, *allowed: str, connections_max: int | None = None) -> str:
    token, text = new_token(
        name,
        [Grant.parse(right) for right in allowed],
        now_ns=time.time_ns(),
        connections_max=connections_max,
    )
    with TokenFile(path).changing() as tokens:
        tokens.append(token)
    return text


async def until_calls(scene: Scene, count: int) -> None:
    """Until so many calls are under way at the listener."""
    while scene.listener.connection_count != count:  # noqa: ASYNC110 - the listener's doing
        await asyncio.sleep(0)


@asynccontextmanager
async def channel(
    scene: Scene, credentials: grpc.ChannelCredentials | None = None, **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    chosen = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        *((f"grpc.{name}", value) for name, value in options.items()),
    ]
    address = scene.listener.address
    made = (
        grpc.aio.insecure_channel(address, chosen)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, chosen)
    )
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def client(scene: Scene, **options: Any) -> AsyncIterator[Stub]:
    async with channel(scene, **options) as opened_channel:
        yield Stub(opened_channel)


class Failure(msgspec.Struct):
    """How a call failed, as the client sees it."""

    status: grpc.StatusCode
    text: str
    code: str
    retriable: bool
    details: dict[str, Any]


async def failure(call: Awaitable[Any]) -> Failure:
    """The error that a call ends with; it must end with one."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return failure_of(raised.value)


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    metadata: dict[str, Any] = dict(error.trailing_metadata() or ())
    return Failure(
        error.code(),
        error.details() or "",
        str(metadata.get("runnel-code", "")),
        metadata.get("runnel-retriable") == "true",
        json.loads(metadata.get("runnel-details", "{}")),
    )


async def next_of(call: Any) -> Any:
    response = await call.read()
    assert response is not grpc.aio.EOF
    return response


async def rest_of(call: Any) -> list[Any]:
    """Everything that a stream says until it ends."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def messages(topic: str, *payloads: bytes) -> list[pb.Message]:
    return [pb.Message(topic=topic, payload=payload) for payload in payloads]


def block(topic: str, *payloads: bytes) -> bytes:
    return Batch.from_messages([Message(topic, payload) for payload in payloads]).pack()


async def publish(scene: Scene, topic: str, *payloads: bytes) -> pb.PublishResponse:
    request = pb.PublishRequest(messages=messages(topic, *payloads))
    response: pb.PublishResponse = await scene.stub.Publish(request)
    return response


class Reader:
    """A stream of Subscribe, read one event after the other."""

    def __init__(self, stub: Stub, *patterns: str, **request: Any) -> None:
        self.call = stub.Subscribe(pb.SubscribeRequest(patterns=patterns, **request))
        self.position = b""

    async def event(self) -> pb.SubscribeResponse:
        response: pb.SubscribeResponse = await next_of(self.call)
        self.position = response.position
        return response

    async def begun(self) -> Reader:
        assert (await self.event()).WhichOneof("event") == "subscribed"
        return self

    async def take(self, count: int) -> list[pb.Message]:
        """The next so many messages, in however many deliveries."""
        taken: list[pb.Message] = []
        while len(taken) < count:
            event = await self.event()
            assert event.WhichOneof("event") == "delivery", event
            taken += event.delivery.messages
        assert len(taken) == count
        return taken

    async def payloads(self, count: int) -> list[bytes]:
        return [message.payload for message in await self.take(count)]


class Worker:
    """A stream of Consume."""

    def __init__(self, stub: Stub) -> None:
        self.call = stub.Consume()

    async def say(self, **request: Any) -> None:
        await self.call.write(pb.ConsumeRequest(**request))

    async def open(self, subscription: str, *patterns: str, **request: Any) -> pb.Consuming:
        request.setdefault("mode", pb.MODE_SHARED)
        opening = pb.ConsumeOpen(subscription=subscription, patterns=patterns, **request)
        await self.say(open=opening)
        return (await self.event("consuming")).consuming

    async def event(self, kind: str) -> pb.ConsumeResponse:
        response: pb.ConsumeResponse = await next_of(self.call)
        assert response.WhichOneof("event") == kind, response
        return response

    async def take(self, count: int) -> list[pb.Lease]:
        """Leases with so many messages together."""
        leases: list[pb.Lease] = []
        while sum(len(lease.messages) for lease in leases) < count:
            leases += (await self.event("work")).work.leases
        return leases


def payloads_of(leases: Sequence[pb.Lease]) -> list[bytes]:
    return [message.payload for lease in leases for message in lease.messages]
