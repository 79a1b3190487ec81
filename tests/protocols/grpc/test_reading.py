"""Replayed reading over gRPC: fetches, waiting ones too, and shards."""

from __future__ import annotations

from typing import cast

from grpc import StatusCode

from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import failure, opened, publish, run


def test_a_large_page_of_messages_stays_below_what_clients_take() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for number in range(6):
                await publish(scene, "a", bytes([number]) * 900_000)
            request = pb.FetchRequest(topic="a", bytes_max=2**30)
            offsets: list[int] = []
            while len(offsets) < 6:
                fetched = await scene.stub.Fetch(request)
                assert fetched.ByteSize() < 4 * 2**20
                offsets += [message.offset for message in fetched.messages]
                request.offset = fetched.next_offset
            assert offsets == [1, 2, 3, 4, 5, 6]

    run(scenario())


def test_what_cannot_be_fetched_is_refused_with_the_details() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            failed = await failure(scene.stub.Fetch(pb.FetchRequest(topic="a", offset=9)))
            assert (failed.status, failed.code) == (StatusCode.OUT_OF_RANGE, "offset_ahead")
            assert failed.details == {"topic": "a", "partition": 0, "offset": 9, "next_offset": 2}
            failed = await failure(scene.stub.Fetch(pb.FetchRequest(topic="b")))
            assert (failed.status, failed.code) == (StatusCode.NOT_FOUND, "unknown_topic")
            failed = await failure(scene.stub.Fetch(pb.FetchRequest(topic="a", partition=3)))
            assert failed.code == "unknown_topic"
            failed = await failure(
                scene.stub.Fetch(pb.FetchRequest(topic="a", format=cast(pb.Format, 7)))
            )
            assert (failed.code, "format 7" in failed.text) == ("bad_request", True)
            for field in ("offset", "messages_max", "bytes_max", "wait_ms"):
                request = pb.FetchRequest(topic="a")
                setattr(request, field, 2**64 - 1)
                failed = await failure(scene.stub.Fetch(request))
                assert (failed.code, field in failed.text) == ("bad_request", True)

    run(scenario())


def test_an_offset_that_is_gone_is_answered_with_the_first_there_is() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1", b"2")
            await scene.stub.PurgeTopic(pb.PurgeTopicRequest(name="a"))
            await publish(scene, "a", b"3")
            failed = await failure(scene.stub.Fetch(pb.FetchRequest(topic="a", offset=1)))
            assert (failed.status, failed.code) == (StatusCode.OUT_OF_RANGE, "offset_gone")
            assert failed.details == {"topic": "a", "partition": 0, "offset": 1, "first_offset": 3}

    run(scenario())
