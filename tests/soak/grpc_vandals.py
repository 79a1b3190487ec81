"""Ways of being a burden to the gRPC door: rubbish in HTTP/2 frames, broken protobufs, calls opened and dropped.

They speak HTTP/2 by hand, so that every byte is theirs. All they do comes from a seed, and topics and subscriptions of
theirs begin with `vandal`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from enum import IntEnum
from random import Random
from typing import Final

from google.protobuf.message import Message as Proto

from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.fuzz.formats import mutate, seeds
from tests.soak.lines import (
    CROWD,
    Entrance,
    Vandal,
    crowd,
    drip,
    end_writing,
    hear_out,
    hear_something,
    line,
    push,
)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM: Final = 1
END_HEADERS: Final = 4


class Kind(IntEnum):
    """Frames of HTTP/2."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


GREETING: Final = PREFACE + frame(Kind.SETTINGS, 0, 0, b"")


def _field(name: bytes, value: bytes) -> bytes:
    """A header that is not indexed; lengths of more than 126 in the second byte, as HPACK has them."""

    def sized(text: bytes) -> bytes:
        if len(text) < 127:
            return bytes((len(text),)) + text
        rest, more = len(text) - 127, bytearray((127,))
        while rest > 127:
            more.append(rest % 128 + 128)
            rest //= 128
        return bytes(more) + bytes((rest,)) + text

    return b"\0" + sized(name) + sized(value)


def headers(method: str, *more: tuple[bytes, bytes]) -> bytes:
    return b"".join(
        _field(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/runnel.v1.Runnel/" + method.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *more,
        )
    )


def call(stream: int, method: str, *messages: bytes, ends: bool = True) -> bytes:
    """A whole call, or one that could go on."""
    body = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    # No larger than every peer has to take.
    pieces = [body[begin : begin + 16_384] for begin in range(0, len(body), 16_384)] or [b""]
    said = frame(Kind.HEADERS, END_HEADERS, stream, headers(method))
    for piece in pieces[:-1]:
        said += frame(Kind.DATA, 0, stream, piece)
    return said + frame(Kind.DATA, END_STREAM if ends else 0, stream, pieces[-1])


def requests(random: Random) -> list[tuple[str, Proto]]:
    """What a client might ask, with something of everything."""
    topic = f"vandal/{random.randrange(20)}"
    work = f"vandal-{random.randrange(5)}"
    payload = random.randbytes(random.randrange(2000))
    block = Batch.from_messages([Message(topic, payload)]).pack()
    start = pb.Start(kind=random.choice(pb.Start.Kind.keys()), time_ns=1)
    number = random.choice((0, 1, 2**32, 2**63))
    one = pb.Message(topic=topic, payload=payload, key=b"k", tags={"a": "b"})
    return [
        ("Publish", pb.PublishRequest(messages=[one] * random.choice((1, 5, 200)))),
        ("Publish", pb.PublishRequest(batch=block)),
        ("Publish", pb.PublishRequest(batch=random.choice(seeds()))),
        ("PublishStream", pb.PublishRequest(id=1, messages=[one])),
        ("NewTerm", pb.NewTermRequest(producer=work)),
        ("Fetch", pb.FetchRequest(topic=topic, offset=number, wait_ms=random.choice((0, 200)))),
        ("Subscribe", pb.SubscribeRequest(patterns=["vandal/*"], start=start)),
        ("Subscribe", pb.SubscribeRequest(patterns=[topic], position=random.randbytes(20))),
        ("ListShards", pb.ListShardsRequest(patterns=["*"])),
        ("FetchShard", pb.FetchShardRequest(journal="vandal", entry=number)),
        ("Consume", opening(random)),
        ("ListSubscriptions", pb.ListSubscriptionsRequest()),
        ("DeleteSubscription", pb.DeleteSubscriptionRequest(name=work)),
        ("ListDeadLetters", pb.ListDeadLettersRequest(subscription=work, offset=number)),
        ("ListTopics", pb.ListTopicsRequest(pattern="*")),
        ("DescribeTopic", pb.DescribeTopicRequest(name=topic)),
        ("PurgeTopic", pb.PurgeTopicRequest(name=topic)),
        ("DeleteTopic", pb.DeleteTopicRequest(name=topic)),
        ("GetStatistics", pb.GetStatisticsRequest()),
        ("Ping", pb.PingRequest()),
        ("NoSuchMethod", pb.PingRequest()),
    ]


def opening(random: Random) -> pb.ConsumeRequest:
    opened = pb.ConsumeOpen(
        subscription=f"vandal-{random.randrange(5)}",
        patterns=["vandal/*"],
        mode=random.choice((pb.MODE_SHARED, pb.MODE_KEY_SHARED, pb.MODE_MULTICAST)),
        window=pb.Window(messages=random.choice((1, 100, 10_000))),
    )
    return pb.ConsumeRequest(open=opened)


# --- The ways ---


async def say_no_http2(entrance: Entrance, random: Random) -> None:
    """Noise before, instead of, or behind the preface; frames of every kind with contents of none."""
    async with line(entrance) as (reader, writer):
        match random.randrange(4):
            case 0:
                writer.write(random.randbytes(random.choice((1, 24, 3000, 200_000))))
            case 1:
                writer.write(GREETING[: random.randrange(len(GREETING))])
            case 2:
                writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            case _:
                writer.write(GREETING)
                for _ in range(random.randrange(200)):
                    kind, flags = random.randrange(12), random.randrange(256)
                    stream = random.choice((0, 0, 1, 2, 3, 2**31 - 1))
                    size = random.choice((0, 1, 4, 5, 8, 100, 20_000))
                    await push(writer, frame(kind, flags, stream, random.randbytes(size)))
        await hear_out(reader)


async def flood_with_frames(entrance: Entrance, random: Random) -> None:
    """Frames that cost the sender nothing: resets, pings, settings, headers that do not end."""
    opened = frame(Kind.HEADERS, END_HEADERS, 1, headers("Ping"))
    floods = (
        b"".join(
            frame(Kind.HEADERS, END_HEADERS, stream, headers("Subscribe"))
            + frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", 8))
            for stream in range(1, 2000, 2)
        ),
        frame(Kind.PING, 0, 0, bytes(8)) * 20_000,
        frame(Kind.SETTINGS, 0, 0, b"") * 5000,
        frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) * 100,
        opened + frame(Kind.WINDOW_UPDATE, 0, 1, bytes(4)) * 1000,
        frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 10,
        frame(Kind.HEADERS, 0, 1, headers("Ping"))
        + frame(Kind.CONTINUATION, 0, 1, _field(b"x", b"y" * 8000)) * 500,
        frame(Kind.HEADERS, END_HEADERS, 1, headers("Ping", (b"x-big", b"y" * 15_000))),
        opened + frame(Kind.DATA, 0, 1, b"\0" + struct.pack(">I", 2**32 - 1) + bytes(1000)),
        opened + frame(Kind.DATA, 0, 1, b"\1" + struct.pack(">I", 5) + b"abcde"),
        opened + frame(Kind.DATA, 0, 1, b"") * 20_000,
        frame(Kind.GOAWAY, 0, 0, bytes(8)) + opened,
    )
    async with line(entrance) as (reader, writer):
        await push(writer, GREETING + random.choice(floods))
        await hear_out(reader)


async def send_broken_protobufs(entrance: Entrance, random: Random) -> None:
    """Calls of every method, whose requests have changed on the way, or are another method's."""
    asked = requests(random)
    random.shuffle(asked)
    async with line(entrance) as (reader, writer):
        writer.write(GREETING)
        for number, (method, asking) in enumerate(asked):
            sent = asking.SerializeToString()
            if random.random() < 0.6:
                sent = mutate(random, sent, random.choice(asked)[1].SerializeToString())
            if random.random() < 0.1:
                method = random.choice(asked)[0]
            said = call(2 * number + 1, method, *[sent] * random.choice((1, 1, 1, 0, 2)))
            if random.random() < 0.05:
                said = mutate(random, said, sent)
            await push(writer, said)
        if random.random() < 0.3:
            end_writing(writer)
        await hear_out(reader)


async def open_and_drop_calls(entrance: Entrance, random: Random) -> None:
    """Streams of every kind that are dropped by reset, by half a connection, or with all of it; some nobody reads."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            if random.random() < 0.3:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GREETING)
            for number in range(random.randrange(1, 20)):
                method, asking = random.choice(requests(random))
                stream = 2 * number + 1
                sent = asking.SerializeToString()
                writer.write(call(stream, method, sent, ends=random.random() < 0.3))
                if random.random() < 0.3:
                    writer.write(frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", 8)))
            if random.random() < 0.3:
                end_writing(writer)
            if random.random() < 0.5:
                await hear_something(reader)
            await asyncio.sleep(random.random() / 4)

    await crowd(one, CROWD)


async def take_work_over_grpc(entrance: Entrance, random: Random) -> None:
    """Consumers that take what they can get, acknowledge nothing, and are gone."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            writer.write(GREETING + frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**20)))
            sent = opening(random).SerializeToString()
            await push(writer, call(1, "Consume", sent, ends=False))
            await hear_something(reader)
            await hear_something(reader)

    await crowd(one, CROWD // 5)


async def dawdle_over_grpc(entrance: Entrance, random: Random) -> None:
    """Many connections whose calls come a byte at a time."""

    async def one() -> None:
        method, asking = random.choice(requests(random))
        said = GREETING + call(1, method, asking.SerializeToString())
        await drip(entrance, random, said[:200])

    await crowd(one, CROWD)


async def come_and_go_over_grpc(entrance: Entrance, random: Random) -> None:
    """Many connections at once, dropped at every moment of a call."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            method, asking = random.choice(requests(random))
            said = GREETING + call(1, method, asking.SerializeToString())
            writer.write(said[: random.randrange(len(said) + 1)])
            if random.random() < 0.3:
                await hear_something(reader)

    await crowd(one, 2 * CROWD)


GRPC_VANDALS: Final[Sequence[Vandal]] = (
    say_no_http2,
    flood_with_frames,
    send_broken_protobufs,
    open_and_drop_calls,
    take_work_over_grpc,
    dawdle_over_grpc,
    come_and_go_over_grpc,
)
