"""Publishing over gRPC: one request, many, batches, and streams of them."""

from __future__ import annotations

import asyncio
from itertools import chain, pairwise
from pathlib import Path
from typing import cast

import pytest

from runnel.config import LimitSettings, LogSettings
from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.methods import publish_stream
from tests.protocols.grpc.scene import (
    LOOPS,
    PATIENCE_S,
    NewLoop,
    block,
    client,
    failure,
    messages,
    opened,
    publish,
    rest_of,
    run,
)


@LOOPS
def test_a_message_is_published_and_fetched(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            message = pb.Message(
                topic="a",
                payload=b"21.5",
                key=b"k",
                partition_key=b"p",
                tags={"unit": "C"},
                event_time_ns=5,
                transmit_time_ns=6,
                uid=bytes(range(20)),
            )
            response = await scene.stub.Publish(pb.PublishRequest(messages=[message], id=7))
            assert (response.id, list(response.offsets), list(response.partitions)) == (7, [1], [0])
            assert response.level == pb.LEVEL_RECEIVED  # memory stores nothing
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a", offset=1))
            message.MergeFrom(
                pb.Message(partition=0, offset=1, receive_time_ns=response.receive_time_ns)
            )
            assert list(fetched.messages) == [message]
            assert (fetched.next_offset, fetched.first_offset, fetched.end_offset) == (2, 1, 2)

    run(scenario(), new_loop)


def test_messages_of_one_request_get_their_offsets_in_order() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            keyed = [
                pb.Message(topic="parted/a", payload=bytes([row]), key=bytes([row % 3]))
                for row in range(12)
            ]
            others = messages("other", b"x", b"y")
            request = pb.PublishRequest(messages=[*keyed[:6], *others, *keyed[6:]])
            response = await scene.stub.Publish(request)
            for message, partition, offset in zip(
                request.messages, response.partitions, response.offsets, strict=True
            ):
                fetched = await scene.stub.Fetch(
                    pb.FetchRequest(
                        topic=message.topic, partition=partition, offset=offset, messages_max=1
                    )
                )
                assert fetched.messages[0].payload == message.payload

    run(scenario())


def test_messages_without_a_key_take_turns_through_the_partitions_request_by_request() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            partitions: list[int] = []
            for _ in range(4):
                response = await publish(scene, "parted/a", b"1", b"2")
                assert len(set(response.partitions)) == 1
                partitions += {*response.partitions}
                (alone,) = (await publish(scene, "parted/b", b"1")).partitions
                partitions.append(alone)
            assert sorted(partitions) == [0, 0, 1, 1, 2, 2, 3, 3]
            given = pb.Message(topic="parted/a", partition=2)
            response = await scene.stub.Publish(pb.PublishRequest(messages=[given, given]))
            assert list(response.partitions) == [2, 2]

    run(scenario())


def test_a_request_names_the_topic_of_messages_that_name_none() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            given = [pb.Message(payload=b"1"), pb.Message(topic="b", payload=b"2")]
            await scene.stub.Publish(pb.PublishRequest(topic="a", messages=given))
            for topic, payload in (("a", b"1"), ("b", b"2")):
                fetched = await scene.stub.Fetch(pb.FetchRequest(topic=topic))
                assert [message.payload for message in fetched.messages] == [payload]

    run(scenario())


def test_a_batch_crosses_untouched() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            data = block("a", b"1", b"2", b"3")
            response = await scene.stub.Publish(pb.PublishRequest(batch=data))
            assert (list(response.offsets), list(response.partitions)) == ([1], [])
            request = pb.FetchRequest(topic="a", format=pb.FORMAT_BLOCKS)
            (stored,) = (await scene.stub.Fetch(request)).blocks
            assert Batch.unpack(stored).body == Batch.unpack(data).body
            assert [message.offset for message in Batch.unpack(stored)] == [1, 2, 3]

    run(scenario())


def test_what_cannot_be_published_is_refused_with_a_reason() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            cases = (
                (pb.PublishRequest(), "bad_request", "neither"),
                (
                    pb.PublishRequest(messages=messages("a", b"1"), batch=block("a", b"1")),
                    "bad_request",
                    "not both",
                ),
                (pb.PublishRequest(messages=messages("", b"1")), "invalid_name", "topic"),
                (pb.PublishRequest(messages=messages("a\n", b"1", b"2")), "invalid_name", "topic"),
                (pb.PublishRequest(messages=messages("!system/x", b"1")), "bad_request", "system"),
                (pb.PublishRequest(messages=messages("a", bytes(2**21))), "limit_exceeded", ""),
                (
                    pb.PublishRequest(messages=messages("a", b""), level=cast(pb.Level, 9)),
                    "bad_request",
                    "level 9",
                ),
                (pb.PublishRequest(batch=b"rubbish"), "malformed", "block"),
                (pb.PublishRequest(batch=block("a", b"") + b"!"), "malformed", "follow the block"),
                (
                    pb.PublishRequest(messages=[pb.Message(topic="a", partition=7)]),
                    "unknown_topic",
                    "partition",
                ),
                (pb.PublishRequest(messages=[pb.Message(topic="a", uid=b"x")]), "malformed", "uid"),
            )
            for request, code, text in cases:
                failed = await failure(scene.stub.Publish(request))
                assert (failed.code, text in failed.text) == (code, True), failed
                assert not failed.retriable

    run(scenario())


def test_the_trace_of_a_call_becomes_tags() -> None:
    async def scenario() -> None:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with opened() as scene:
            own = pb.Message(topic="a", tags={"traceparent": "mine"})
            request = pb.PublishRequest(messages=[*messages("a", b""), own])
            metadata = (("traceparent", parent), ("tracestate", "vendor=1"))
            await scene.stub.Publish(request, metadata=metadata)
            call = scene.stub.PublishStream(metadata=(("traceparent", "rubbish"),))
            await call.write(request)
            await call.done_writing()
            await rest_of(call)
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a"))
            assert [dict(message.tags) for message in fetched.messages] == [
                {"traceparent": parent, "tracestate": "vendor=1"},
                {"traceparent": "mine"},
                {},
                {"traceparent": "mine"},
            ]

    run(scenario())


# --- Streams ---


@LOOPS
def test_a_stream_is_answered_by_id_and_stored_in_order(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 501):
                request = pb.PublishRequest(id=number, messages=messages("a", b"%d" % number))
                await call.write(request)
            await call.done_writing()
            answers = [answer for response in await rest_of(call) for answer in response.answers]
            assert sorted(answer.id for answer in answers) == list(range(1, 501))
            assert {(answer.id, *answer.offsets) for answer in answers} == {
                (number, number) for number in range(1, 501)
            }
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a"))
            assert [int(message.payload) for message in fetched.messages] == list(range(1, 501))

    run(scenario(), new_loop)


def test_a_client_that_waits_for_each_answer_gets_it() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 20):
                await call.write(pb.PublishRequest(id=number, batch=block("a", b"1", b"2")))
                (answer,) = (await call.read()).answers
                assert (answer.id, list(answer.offsets)) == (number, [2 * number - 1])

    run(scenario())


def test_a_client_that_goes_no_further_is_not_kept_waiting_for_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publish_stream, "_GATHER_SECONDS", 10 * PATIENCE_S)

    async def scenario() -> None:
        async with opened(data=str(tmp_path)) as scene:
            call = scene.stub.PublishStream()
            unanswered = 0
            for number in range(1, 101):
                while unanswered >= 3:
                    unanswered -= len((await call.read()).answers)
                await call.write(pb.PublishRequest(id=number, messages=messages("a", b"1", b"2")))
                unanswered += 1

    run(scenario())


def test_a_refused_request_does_not_end_the_stream() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            await call.write(pb.PublishRequest(id=1, messages=messages("a", b"1")))
            await call.write(pb.PublishRequest(id=2, messages=messages("", b"1")))
            await call.write(pb.PublishRequest(id=3, messages=messages("a", b"1", b"2")))
            await call.done_writing()
            answers = {
                answer.id: answer for response in await rest_of(call) for answer in response.answers
            }
            assert answers[2].error.code == "invalid_name"
            assert not answers[2].error.retriable
            assert (list(answers[1].offsets), list(answers[3].offsets)) == ([1], [2, 3])

    run(scenario())


@LOOPS
def test_requests_that_are_stored_together_are_answered_apart(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with opened(data=str(tmp_path)) as scene:
            call = scene.stub.PublishStream()
            sent: list[list[bytes]] = []
            answers: list[pb.PublishResponse] = []
            for number in range(1, 301):
                # Of one length, of several, and not plain at all.
                payloads = [b"%d/%d" % (number, row) for row in range(2 + number % 12)]
                key = b"k" if number % 50 == 0 else None
                made = [pb.Message(payload=payload, key=key) for payload in payloads]
                await call.write(pb.PublishRequest(id=number, topic="a", messages=made))
                sent.append(payloads)
                while number == 100 and len(answers) < 100:
                    # How far the client goes ahead is known from here on: what follows is gathered.
                    answers += (await call.read()).answers
            await call.done_writing()
            answers += [answer for response in await rest_of(call) for answer in response.answers]
            assert sorted(answer.id for answer in answers) == list(range(1, 301))
            first = 1
            for answer, payloads in zip(
                sorted(answers, key=lambda each: each.id), sent, strict=True
            ):
                assert list(answer.offsets) == list(range(first, first + len(payloads)))
                assert list(answer.partitions) == [0] * len(payloads)
                assert answer.level == pb.LEVEL_STORED
                first += len(payloads)
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a", bytes_max=2**20))
            assert [message.payload for message in fetched.messages] == list(chain(*sent))
            assert scene.broker.metrics.counters.batches_in < len(sent)

    run(scenario(), new_loop)


def test_messages_without_offsets_are_answered_with_zeros() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            plain = [pb.Message(payload=b"1"), pb.Message(payload=b"2")]
            keyed = [pb.Message(payload=b"1", key=b"k"), pb.Message(payload=b"2", key=b"k")]
            for sent in (plain, keyed):  # the topic is ephemeral and has no reader
                request = pb.PublishRequest(topic="live/a", messages=sent)
                assert list((await scene.stub.Publish(request)).offsets) == [0, 0]

    run(scenario())


def test_a_message_that_is_too_large_takes_no_other_request_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = LimitSettings(message_bytes_max=1000)
        async with opened(limits=limits, data=str(tmp_path)) as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 101):
                size = 2000 if number % 10 == 0 else 100
                made = [pb.Message(payload=bytes(size))] * 2
                await call.write(pb.PublishRequest(id=number, topic="a", messages=made))
            await call.done_writing()
            answers = [answer for response in await rest_of(call) for answer in response.answers]
            refused = sorted(answer.id for answer in answers if answer.HasField("error"))
            assert refused == list(range(10, 101, 10))
            stored = [answer for answer in answers if not answer.HasField("error")]
            assert sorted(chain(*(answer.offsets for answer in stored))) == list(range(1, 181))

    run(scenario())


def test_plain_requests_of_a_stream_take_turns_through_the_partitions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(data=str(tmp_path)) as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 41):
                made = [pb.Message(payload=b"1")] * 3
                await call.write(pb.PublishRequest(id=number, topic="parted/a", messages=made))
            await call.done_writing()
            answers = [answer for response in await rest_of(call) for answer in response.answers]
            chosen = [
                set(answer.partitions) for answer in sorted(answers, key=lambda each: each.id)
            ]
            assert all(len(each) == 1 for each in chosen)
            turns = [partition for (partition,) in chosen]
            assert all((one + 1) % 4 == next_one for one, next_one in pairwise(turns))

    run(scenario())


def test_level_none_is_not_answered_unless_it_fails() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            call = scene.stub.PublishStream()
            for number, topic in enumerate(("a", "", "a"), 1):
                request = pb.PublishRequest(
                    id=number, messages=messages(topic, b"1"), level=pb.LEVEL_NONE
                )
                await call.write(request)
            await call.done_writing()
            answers = [answer for response in await rest_of(call) for answer in response.answers]
            assert [(answer.id, answer.error.code) for answer in answers] == [(2, "invalid_name")]
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a"))
            assert len(fetched.messages) == 2

    run(scenario())


def test_a_busy_log_makes_a_stream_wait_and_keeps_its_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = LogSettings(write_queue_batches_max=2, allocate_bytes=0, disk_reserve_bytes=0)
        async with opened(log=log, data=str(tmp_path)) as scene:
            call = scene.stub.PublishStream()
            for number in range(1, 201):
                await call.write(pb.PublishRequest(id=number, batch=block("a", b"%d" % number)))
            await call.done_writing()
            answers = [answer for response in await rest_of(call) for answer in response.answers]
            assert {answer.level for answer in answers} == {pb.LEVEL_STORED}
            assert sorted(answer.offsets[0] for answer in answers) == list(range(1, 201))
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a"))
            assert [int(message.payload) for message in fetched.messages] == list(range(1, 201))

    run(scenario())


def test_a_client_that_takes_no_answers_is_read_no_further() -> None:
    async def scenario() -> None:
        narrow = {"http2.bdp_probe": 0, "http2.lookahead_bytes": 2**16}
        async with opened() as scene, client(scene, **narrow) as stub:
            call = stub.PublishStream()
            counters = scene.broker.metrics.counters
            refused = pb.PublishRequest(messages=messages("\n" * 400, b"1"))

            async def flood() -> None:
                while True:
                    await call.write(refused)

            flooding = asyncio.ensure_future(flood())
            read = -1
            while read != counters.requests:  # it stands still
                read = counters.requests
                await asyncio.wait({flooding}, timeout=0.1)
            assert not flooding.done()
            flooding.cancel()
            await asyncio.wait({flooding})
            call.cancel()

    run(scenario())
