"""Clients that connect, talk and vanish at any moment leave nothing, disturb no other client and log nothing."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import grpc.aio
import pytest

from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import (
    LOOPS,
    NewLoop,
    Reader,
    Scene,
    Worker,
    client,
    messages,
    opened,
    publish,
    run,
    until_calls,
)
from tests.protocols.grpc.stub import Stub

CLIENTS = 24
TOPICS = ("a", "live/a", "parted/x", "\n")  # the last is refused


async def _publish(stub: Stub, random: Random) -> None:
    call = stub.PublishStream()

    async def read() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        for number in range(random.randrange(300)):
            payload = bytes(random.randrange(3000))
            request = pb.PublishRequest(
                id=number, messages=messages(random.choice(TOPICS), payload)
            )
            await call.write(request)
        await call.done_writing()


async def _subscribe(stub: Stub, random: Random) -> None:
    start = pb.Start(kind=random.choice((pb.Start.KIND_LAST, pb.Start.KIND_EARLIEST)))
    reader = Reader(stub, "*", start=start)
    while True:
        await reader.event()


async def _consume(stub: Stub, random: Random) -> None:
    worker = Worker(stub)
    await worker.open("s", "a", options=pb.WorkOptions(retry_delay_ms=0, deliveries_max=0))
    while True:
        response = await worker.call.read()
        for lease in response.work.leases:
            if random.random() < 0.7:
                answer = random.choice((0, lease.delivery))
                await worker.say(ack=pb.Ack(id=answer, deliveries=[lease.delivery]))
            else:
                await worker.say(nack=pb.Nack(deliveries=[lease.delivery]))


async def _fetch(stub: Stub, random: Random) -> None:
    wait_ms = random.randrange(1000)
    await stub.Fetch(pb.FetchRequest(topic="a", offset=1, wait_ms=wait_ms))


async def _come_and_go(scene: Scene, random: Random) -> None:
    async with client(scene) as stub:
        for _ in range(3):
            talk = random.choice((_publish, _subscribe, _consume, _fetch))
            talking = asyncio.ensure_future(talk(stub, random))
            await asyncio.wait({talking}, timeout=random.random() * 0.1)
            talking.cancel()
            await asyncio.wait({talking})
            if not talking.cancelled():
                talking.exception()  # whatever became of it


@LOOPS
def test_clients_that_come_and_go_leave_nothing_behind(
    new_loop: NewLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        problems: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        async with opened() as scene:
            await publish(scene, "a", b"1")
            async with asyncio.TaskGroup() as tasks:
                for seed in range(CLIENTS):
                    tasks.create_task(_come_and_go(scene, Random(seed)))
            await until_calls(scene, 0)
            while scene.listener.server.tasks:  # noqa: ASYNC110 - the listener's doing
                await asyncio.sleep(0)
            states = await scene.broker.consumer_groups.subscriptions()
            assert not any(member.consumers for state in states for member in state.members)
            assert (await publish(scene, "live/b", b"1")).receivers == 0
            await scene.stub.Ping(pb.PingRequest())
        assert not problems

    with caplog.at_level(logging.WARNING):
        run(scenario(), new_loop)
    strange = [record for record in caplog.records if record.name != "runnel"]
    assert not strange
