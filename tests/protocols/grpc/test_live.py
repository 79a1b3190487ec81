"""Live reading over gRPC: starts anywhere, resumes without gap or repeat, and never piles up messages."""

from __future__ import annotations

from typing import cast

from grpc import StatusCode

from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import (
    Reader,
    Scene,
    block,
    client,
    failure,
    messages,
    opened,
    publish,
    run,
    until_calls,
)

LAST = pb.Start(kind=pb.Start.KIND_LAST)
EARLIEST = pb.Start(kind=pb.Start.KIND_EARLIEST)


def test_last_values_come_first_and_their_end_is_reported() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t/a", b"1", b"2")
            await publish(scene, "t/b", b"3")
            reader = await Reader(scene.stub, "t/*", start=LAST).begun()
            assert sorted(await reader.payloads(2)) == [b"2", b"3"]
            assert (await reader.event()).WhichOneof("event") == "caught_up"
            await publish(scene, "t/a", b"4")
            assert await reader.payloads(1) == [b"4"]

    run(scenario())


def test_blocks_come_untouched() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            data = block("t/a", b"1", b"2")
            await scene.stub.Publish(pb.PublishRequest(batch=data))
            for pattern in ("t/a", "t/*"):
                reader = await Reader(
                    scene.stub, pattern, start=EARLIEST, format=pb.FORMAT_BLOCKS
                ).begun()
                (came,) = (await reader.event()).delivery.blocks
                assert Batch.unpack(came).body == Batch.unpack(data).body
                assert [message.offset for message in Batch.unpack(came)] == [1, 2]
                reader.call.cancel()

    run(scenario())


def test_a_reader_comes_back_to_every_position_without_gap_or_repeat() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            # Batches of several topics, some of them far larger than one response.
            await publish(scene, "t/a", *(b"a%d" % number for number in range(1200)))
            for topic in ("t/b", "x", "t/c"):
                await publish(scene, topic, *(b"%d" % number for number in range(5)))
            await publish(scene, "t/b", *(b"b%d" % number for number in range(700)))
            for patterns in (("t/*",), ("t/a", "t/b", "t/c")):
                reader = await Reader(scene.stub, *patterns, start=EARLIEST).begun()
                events = [(reader.position, 0)]
                whole: list[bytes] = []
                while len(whole) < 1910:
                    event = await reader.event()
                    whole += [message.payload for message in event.delivery.messages]
                    events.append((event.position, len(whole)))
                reader.call.cancel()
                assert len(events) > 4
                for position, seen in events[:-1]:
                    again = await Reader(scene.stub, *patterns, position=position).begun()
                    left = await again.payloads(len(whole) - seen)
                    assert sorted(left) == sorted(whole[seen:])
                    again.call.cancel()

    run(scenario())


def test_a_gap_is_not_told_again_to_a_reader_that_comes_back_behind_it() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "m*").begun()
            reader.call.cancel()
            both = [Message("m", b"1"), Message("n", b"1")]
            await scene.broker.publish(Batch.from_messages(both))
            await scene.broker.purge_topic("m")
            back = await Reader(scene.stub, "m*", position=reader.position).begun()
            assert (await back.event()).gap.missed == 1
            assert not (await back.event()).delivery.messages
            back.call.cancel()
            again = await Reader(scene.stub, "m*", position=back.position).begun()
            await publish(scene, "m", b"2")
            assert await again.payloads(1) == [b"2"]

    run(scenario())


def test_a_reader_that_was_away_gets_what_came_meanwhile() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for patterns in (("t/*",), ("t/a", "t/new")):
                reader = await Reader(scene.stub, *patterns).begun()
                await publish(scene, "t/a", b"1")
                assert await reader.payloads(1) == [b"1"]
                reader.call.cancel()
                await publish(scene, "t/a", b"2")
                await publish(scene, "t/new", b"3")
                again = await Reader(scene.stub, *patterns, position=reader.position).begun()
                await publish(scene, "t/a", b"4")
                assert sorted(await again.payloads(3)) == [b"2", b"3", b"4"]
                again.call.cancel()
                await scene.stub.DeleteTopic(pb.DeleteTopicRequest(name="t/new"))

    run(scenario())


def test_a_position_in_blocks_serves_a_reader_of_messages_and_the_other_way_round() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t/a", *(b"%d" % number for number in range(1000)))
            reader = await Reader(scene.stub, "t/*", start=EARLIEST).begun()
            part = len((await reader.event()).delivery.messages)
            assert part < 1000
            blocks = await Reader(
                scene.stub, "t/*", position=reader.position, format=pb.FORMAT_BLOCKS
            ).begun()
            (came,) = (await blocks.event()).delivery.blocks
            assert len(Batch.unpack(came)) == 1000 - part
            await publish(scene, "t/a", b"new")
            again = await Reader(scene.stub, "t/*", position=blocks.position).begun()
            assert await again.payloads(1) == [b"new"]

    run(scenario())


def test_a_position_that_fits_nothing_is_refused() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "t/*").begun()
            for patterns, position in (
                (("t/a",), reader.position),
                (("t/*",), b"rubbish"),
                (("t/*",), reader.position[:-1]),
            ):
                request = pb.SubscribeRequest(patterns=patterns, position=position)
                failed = await failure(scene.stub.Subscribe(request).read())
                assert failed.status is StatusCode.INVALID_ARGUMENT
                assert "position" in failed.text

    run(scenario())


def test_a_reader_of_no_pattern_or_a_wrong_one_is_refused() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for request in (
                pb.SubscribeRequest(),
                pb.SubscribeRequest(patterns=["[a"]),
                pb.SubscribeRequest(patterns=["a"], overflow=cast(pb.SubscribeRequest.Overflow, 9)),
                pb.SubscribeRequest(patterns=["a"], start=pb.Start(time_ns=1)),
                pb.SubscribeRequest(patterns=["a"], start=pb.Start(kind=cast(pb.Start.Kind, 9))),
            ):
                failed = await failure(scene.stub.Subscribe(request).read())
                assert failed.status is StatusCode.INVALID_ARGUMENT

    run(scenario())


async def _flood(scene: Scene, topic: str, payload: bytes, count: int) -> None:
    call = scene.stub.PublishStream()
    for number in range(1, count + 1):
        await call.write(pb.PublishRequest(id=number, messages=messages(topic, payload)))
    await call.done_writing()
    async for response in call:
        assert not any(answer.HasField("error") for answer in response.answers)


def test_a_reader_that_vanishes_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            for _ in range(20):
                reader = await Reader(scene.stub, "live/*").begun()
                assert len(scene.listener.server.rows()) == 1
                reader.call.cancel()
                await until_calls(scene, 0)
            async with client(scene) as gone:  # with its connection
                await Reader(gone, "live/*").begun()
            await until_calls(scene, 0)
            response = await publish(scene, "live/a", b"1")
            assert response.receivers == 0
            assert not scene.listener.server.rows()

    run(scenario())


def test_a_stream_is_shown_among_the_connections() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            reader = await Reader(scene.stub, "a").begun()
            await publish(scene, "a", b"1", b"2")
            await reader.take(2)
            (row,) = [read() for read in scene.listener.server.rows().values()]
            assert (row.listener, row.subscriptions, row.flow.messages_out) == ("grpc", 1, 2)
            assert row.peer.startswith("127.0.0.1:")
            assert "grpc" in row.client

    run(scenario())
