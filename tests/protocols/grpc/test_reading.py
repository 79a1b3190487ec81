"""Replayed reading over gRPC: fetches, waiting ones too, and shards."""

from __future__ import annotations

import asyncio
from typing import cast

from grpc import StatusCode

from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import failure, opened, publish, run, until_calls


def test_a_fetch_begins_at_an_offset_and_goes_on_where_it_ended() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", *(b"%d" % number for number in range(1, 11)))
            request = pb.FetchRequest(topic="a", offset=4, messages_max=3)
            first = await scene.stub.Fetch(request)
            assert [message.offset for message in first.messages] == [4, 5, 6]
            request.offset = first.next_offset
            request.messages_max = 0
            second = await scene.stub.Fetch(request)
            assert [int(message.payload) for message in second.messages] == [7, 8, 9, 10]
            assert (second.first_offset, second.end_offset) == (1, 11)

    run(scenario())


def test_a_fetch_begins_at_a_time() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            second = await publish(scene, "a", b"2")
            request = pb.FetchRequest(topic="a", time_ns=second.receive_time_ns)
            fetched = await scene.stub.Fetch(request)
            assert [message.payload for message in fetched.messages][-1] == b"2"
            request.time_ns = second.receive_time_ns + 10**12
            assert not (await scene.stub.Fetch(request)).messages

    run(scenario())


def test_a_fetch_waits_for_a_message() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            request = pb.FetchRequest(topic="a", offset=2, wait_ms=20_000)
            waiting = asyncio.ensure_future(scene.stub.Fetch(request))
            await until_calls(scene, 1)
            await publish(scene, "a", b"2")
            assert [message.payload for message in (await waiting).messages] == [b"2"]

    run(scenario())


def test_a_fetch_that_waits_in_vain_is_empty() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a", offset=2, wait_ms=10))
            assert (list(fetched.messages), fetched.next_offset) == ([], 2)

    run(scenario())


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


def test_shards_are_listed_and_read_as_blocks() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for number in range(3):
                await publish(scene, f"t/{number}", b"1", b"2")
            request = pb.ListShardsRequest(patterns=["t/*"], time_ns=0)
            (shard,) = (await scene.stub.ListShards(request)).shards
            assert (shard.first_entry, shard.next_entry, shard.time_entry) == (1, 4, 1)
            read = pb.FetchShardRequest(
                journal=shard.journal, shard=shard.shard, entry=2, patterns=["t/[12]"]
            )
            fetched = await scene.stub.FetchShard(read)
            topics = [message.topic for each in fetched.blocks for message in Batch.unpack(each)]
            assert topics == ["t/1", "t/1", "t/2", "t/2"]
            assert (fetched.messages, fetched.next_entry, fetched.end_entry) == (4, 4, 4)
            read.journal = "none"
            failed = await failure(scene.stub.FetchShard(read))
            assert failed.status is StatusCode.NOT_FOUND

    run(scenario())
