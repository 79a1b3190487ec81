"""Clients of the native listener: Runnel's own client, and ready-made frames that cost the load process little."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import cast

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.phases import PAYLOAD, PUBLISH, TOGETHER, LoadPlan, Meter
from runnel.client import Bus, connect
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message

_WARM_UP_CALLS = 20
_CHUNK = 32  # requests that are written at a time
_FRAME_BYTES_MAX = 2**20


# --- Message by message ---


async def _publish(bus: Bus, topic: str, calls: int) -> None:
    for _ in range(calls):
        await bus.publish(topic, PAYLOAD)


async def _work(bus: Bus, plan: LoadPlan, calls: int) -> None:
    """Publish one, take one, acknowledge it: each is answered before the next is asked for."""
    topic = f"work-{plan.name}"
    async with bus.consume(plan.name, topic, window_messages=1) as consumer:
        taking = aiter(consumer)
        for _ in range(calls):
            await bus.publish(topic, PAYLOAD)
            await consumer.ack(await anext(taking), stored=True)
    # Left at once: what it has been leased since is somebody else's to take.


def work(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Each client has a connection."""

    async def load() -> RoleReport:
        meter = Meter(plan.pid)
        total = plan.calls * plan.clients
        async with AsyncExitStack() as stack:
            buses = [
                await stack.enter_async_context(
                    connect(f"runnel://{plan.address}", token=plan.token)
                )
                for _ in range(plan.clients)
            ]
            await asyncio.gather(*(_work(bus, plan, _WARM_UP_CALLS) for bus in buses))
            authenticator.ready()
            authenticator.wait_go()
            with meter.phase(PUBLISH, total):
                await asyncio.gather(
                    *(_publish(bus, f"single-{plan.name}", plan.calls) for bus in buses)
                )
            with meter.phase(TOGETHER, total):
                await asyncio.gather(*(_work(bus, plan, plan.calls) for bus in buses))
        return meter.report((_WARM_UP_CALLS + plan.calls) * plan.clients)

    return uvloop.run(load())


# --- Ready-made frames ---


class Frames(asyncio.Protocol):
    """Keeps `window` requests without their answers, until all are answered."""

    def __init__(self, hello: bytes, requests: Sequence[bytes], window: int) -> None:
        self._hello = hello
        self._chunk = b"".join(requests)
        self._chunk_frames = len(requests)
        self._window = window
        self._reader = FrameReader(_FRAME_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._to_send = self._to_come = 1
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._to_send = 0
        self._transport.write(self._hello)

    def start(self, chunks: int) -> asyncio.Future[None]:
        """Once what came before is finished."""
        assert self.finished.done()
        self.finished = asyncio.get_running_loop().create_future()
        self._to_send = self._to_come = chunks * self._chunk_frames
        self._write()
        return self.finished

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            answer = bytes(frame.head)
            if b"published" not in answer and b"welcome" not in answer:
                self._fail(ConnectionError(f"refused: {wire.decode_answer(frame)}"))
                return
            self._to_come -= 1
        if self._to_come:
            self._write()
        elif not self.finished.done():
            self.finished.set_result(None)

    def _write(self) -> None:
        assert self._transport is not None
        while self._to_send and self._to_come - self._to_send + self._chunk_frames <= self._window:
            self._transport.write(self._chunk)
            self._to_send -= self._chunk_frames

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionResetError("the broker closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


def singles(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    topic = f"live-{plan.name}"
    requests = [
        wire.encode(wire.Send(number, None, topic, PAYLOAD, transmit_time_ns=1))
        for number in range(_CHUNK)
    ]
    return _sent(plan, authenticator, requests)


def batches(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    topic = f"live-{plan.name}"
    return _sent(plan, authenticator, _publishes([Message(topic, PAYLOAD)] * plan.messages))


def wide(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Every message of a batch has a topic of its own."""
    topics = [f"live-{plan.name}-{number}" for number in range(plan.messages)]
    return _sent(plan, authenticator, _publishes([Message(topic, PAYLOAD) for topic in topics]))


def spread(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Single messages, each client to a topic of its own, at the node that serves it."""

    async def load() -> RoleReport:
        meter = Meter(plan.pid)
        topics = [f"live-{plan.name}-{number}" for number in range(plan.clients)]
        async with connect(f"runnel://{plan.address}", token=plan.token) as bus:
            routes = await bus.routes(*topics)
        hello = wire.encode(wire.Hello(0, wire.VERSION, (wire.PARTS,), "runnel-bench", plan.token))
        loop = asyncio.get_running_loop()
        own_host = plan.address.rpartition(":")[0]
        clients = []
        for topic in topics:
            requests = [
                wire.encode(wire.Send(number, None, topic, PAYLOAD, transmit_time_ns=1))
                for number in range(_CHUNK)
            ]
            host, _, port = (routes[topic].owners[0].address or plan.address).rpartition(":")
            client = Frames(hello, requests, plan.window)
            await loop.create_connection(lambda made=client: made, host or own_host, int(port))  # type: ignore[misc]
            await client.finished
            clients.append(client)
        chunks = max(1, plan.calls // _CHUNK)
        await asyncio.gather(*(client.start(max(1, chunks // 10)) for client in clients))
        authenticator.ready()
        authenticator.wait_go()
        with meter.phase(PUBLISH, chunks * _CHUNK * plan.clients):
            await asyncio.gather(*(client.start(chunks) for client in clients))
        for client in clients:
            client.close()
        return meter.report()

    return uvloop.run(load())


def _publishes(messages: Sequence[Message]) -> list[bytes]:
    block = bytes(Batch.from_messages(messages).pack())
    return [wire.encode(wire.Publish(number), len(block)) + block for number in range(_CHUNK)]


def _sent(plan: LoadPlan, authenticator: RolePipe, requests: Sequence[bytes]) -> RoleReport:
    hello = wire.encode(wire.Hello(0, wire.VERSION, (), "runnel-bench", plan.token))

    async def load() -> RoleReport:
        meter = Meter(plan.pid)
        host, _, port = plan.address.rpartition(":")
        loop = asyncio.get_running_loop()
        clients = []
        for _ in range(plan.clients):
            _, client = await loop.create_connection(
                lambda: Frames(hello, requests, plan.window), host, int(port)
            )
            await client.finished
            clients.append(client)
        chunks = max(1, plan.calls // _CHUNK)
        await asyncio.gather(*(client.start(max(1, chunks // 10)) for client in clients))
        authenticator.ready()
        authenticator.wait_go()
        with meter.phase(PUBLISH, chunks * _CHUNK * plan.clients * plan.messages):
            await asyncio.gather(*(client.start(chunks) for client in clients))
        for client in clients:
            client.close()
        return meter.report()

    return uvloop.run(load())
