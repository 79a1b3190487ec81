"""Requests for a shard that is elsewhere, over gRPC: UNAVAILABLE, which may be repeated."""

from __future__ import annotations

import grpc

from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import failure, next_of, opened, run

MAIN = ShardId("main")


def test_each_call_ends_as_one_to_be_repeated() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            message = pb.Message(topic="a", payload=b"1")
            publishing = pb.PublishRequest(messages=[message])
            await scene.stub.Publish(publishing)
            log = scene.broker._stores.main
            assert isinstance(log, MemoryLog)
            reading = scene.stub.Subscribe(pb.SubscribeRequest(patterns=["*"]))
            await next_of(reading)  # it has begun
            await log.release(MAIN)
            for call in (
                scene.stub.Publish(publishing),
                scene.stub.Fetch(pb.FetchRequest(topic="a", offset=1)),
                scene.stub.Subscribe(pb.SubscribeRequest(patterns=["a"])).read(),
                reading.read(),
            ):
                failed = await failure(call)
                assert (failed.status, failed.code) == (grpc.StatusCode.UNAVAILABLE, "moved")
                assert failed.retriable
            await log.acquire(MAIN)
            assert list((await scene.stub.Publish(publishing)).offsets) == [2]

    run(scenario())
