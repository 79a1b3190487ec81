"""Clients of the gRPC listener's publishing stream: requests are encoded once, and answers checked after the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.empty_grpc import METHOD, SERVICE
from bench.systems.phases import PAYLOAD, PUBLISH, LoadPlan, Meter
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.protocols.grpc.generated import runnel_pb2 as pb

Call = grpc.aio.StreamStreamCall[bytes, bytes]
Answers = Sequence[pb.PublishResponse]


def _request(plan: LoadPlan) -> bytes:
    if plan.is_block:
        batch = Batch.from_messages([Message(plan.name, PAYLOAD)] * plan.messages)
        return pb.PublishRequest(id=1, batch=bytes(batch.pack())).SerializeToString()
    messages = [pb.Message(payload=PAYLOAD)] * plan.messages
    return pb.PublishRequest(id=1, topic=plan.name, messages=messages).SerializeToString()


async def _publish(call: Call, request: bytes, calls: int, window: int) -> Answers:
    """Keep `window` requests without their answers. Several answers may come at once."""
    room = asyncio.Semaphore(window)
    answers: list[pb.PublishResponse] = []

    async def read() -> None:
        while len(answers) < calls:
            data = await call.read()
            if not isinstance(data, bytes):
                raise ConnectionError(f"the stream ended: {await call.details()}")
            come = pb.PublishStreamResponse.FromString(data).answers
            answers.extend(come)
            for _ in come:
                room.release()

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        for _ in range(calls):
            await room.acquire()
            await call.write(request)
    return answers


def _check(answers: Answers, offsets: int) -> None:
    for answer in answers:
        if answer.HasField("error"):
            raise ConnectionError(f"refused: {answer.error.code}: {answer.error.text}")
        if len(answer.offsets) != offsets:
            raise ConnectionError(f"not the {offsets} offsets that were due: {answer}")


def publish(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Each client has a stream; all of them share a connection."""

    async def load() -> RoleReport:
        meter = Meter(plan.pid)
        request = _request(plan)
        metadata = [("authorization", f"Bearer {plan.token}")] if plan.token else None
        async with grpc.aio.insecure_channel(plan.address) as channel:
            open_stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{SERVICE}/{METHOD}"
            )
            calls = [open_stream(metadata=metadata) for _ in range(plan.clients)]

            async def everywhere(each: int) -> Sequence[Answers]:
                return await asyncio.gather(
                    *(_publish(call, request, each, plan.window) for call in calls)
                )

            await everywhere(max(2 * plan.window, plan.calls // 10))
            authenticator.ready()
            authenticator.wait_go()
            with meter.phase(PUBLISH, plan.calls * plan.clients * plan.messages):
                answered = await everywhere(plan.calls)
            for answers in answered:
                _check(answers, 1 if plan.is_block else plan.messages)  # of a run: the first
            for call in calls:
                await call.done_writing()
        return meter.report()

    return uvloop.run(load())
