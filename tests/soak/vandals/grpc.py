"""Attacks on the gRPC listener. They write HTTP/2 frames by hand, so that every byte can be wrong."""

from __future__ import annotations

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
from tests.soak.vandals.vandal import CROWD, Attack, AttackTarget, Vandal, connected

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM: Final = 1
END_HEADERS: Final = 4


class FrameKind(IntEnum):
    """The kinds of HTTP/2 frames."""

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


GREETING: Final = PREFACE + frame(FrameKind.SETTINGS, 0, 0, b"")


def _field(name: bytes, value: bytes) -> bytes:
    """A header without an index. As in HPACK, a length above 126 continues in further bytes."""

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
    """A whole call, or with `ends=False` one that stays open."""
    body = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    # Every peer has to accept frames of this size.
    pieces = [body[begin : begin + 16_384] for begin in range(0, len(body), 16_384)] or [b""]
    said = frame(FrameKind.HEADERS, END_HEADERS, stream, headers(method))
    for piece in pieces[:-1]:
        said += frame(FrameKind.DATA, 0, stream, piece)
    return said + frame(FrameKind.DATA, END_STREAM if ends else 0, stream, pieces[-1])


def _requests(random: Random) -> list[tuple[str, Proto]]:
    """The methods, and a valid request for each."""
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
        ("Consume", _consume(random)),
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


def _consume(random: Random) -> pb.ConsumeRequest:
    opened = pb.ConsumeOpen(
        subscription=f"vandal-{random.randrange(5)}",
        patterns=["vandal/*"],
        mode=random.choice((pb.MODE_SHARED, pb.MODE_KEY_SHARED, pb.MODE_MULTICAST)),
        window=pb.Window(messages=random.choice((1, 100, 10_000))),
    )
    return pb.ConsumeRequest(open=opened)


class GrpcVandal(Vandal):
    """Noise in HTTP/2 frames, floods of frames, broken protobufs, calls that are opened and dropped."""

    greeting = GREETING
    drops = 2 * CROWD
    workers = CROWD // 5

    def noise(self, random: Random) -> Sequence[bytes]:
        frames = b"".join(
            frame(
                random.randrange(12),
                random.randrange(256),
                random.choice((0, 0, 1, 2, 3, 2**31 - 1)),
                random.randbytes(random.choice((0, 1, 4, 5, 8, 100, 20_000))),
            )
            for _ in range(random.randrange(200))
        )
        return (
            random.randbytes(random.choice((1, 24, 3000, 200_000))),
            GREETING[: random.randrange(len(GREETING))],
            b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
            GREETING + frames,
        )

    def requests(self, random: Random) -> list[bytes]:
        asked = _requests(random)
        random.shuffle(asked)
        return [
            call(2 * number + 1, method, request.SerializeToString())
            for number, (method, request) in enumerate(asked)
        ]

    def broken_requests(self, random: Random) -> list[bytes]:
        """Calls of every method, whose requests are changed, or are another method's."""
        asked = [(method, request.SerializeToString()) for method, request in _requests(random)]
        random.shuffle(asked)
        calls = []
        for number, (method, sent) in enumerate(asked):
            if random.random() < 0.6:
                sent = mutate(random, sent, random.choice(asked)[1])
            if random.random() < 0.1:
                method = random.choice(asked)[0]
            said = call(2 * number + 1, method, *[sent] * random.choice((1, 1, 1, 0, 2)))
            calls.append(mutate(random, said, sent) if random.random() < 0.05 else said)
        return calls

    def streams(self, random: Random) -> bytes:
        """Calls of every kind that stay open, some of which are reset."""
        said = b""
        for number in range(random.randrange(1, 20)):
            method, request = random.choice(_requests(random))
            stream, sent = 2 * number + 1, request.SerializeToString()
            said += call(stream, method, sent, ends=random.random() < 0.3)
            if random.random() < 0.3:
                said += frame(FrameKind.RST_STREAM, 0, stream, struct.pack(">I", 8))
        return said

    def work(self, random: Random) -> bytes:
        window = frame(FrameKind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**20))
        return window + call(1, "Consume", _consume(random).SerializeToString(), ends=False)

    @property
    def own_attacks(self) -> Sequence[Attack]:
        return (self.flood_with_frames,)

    async def flood_with_frames(self, target: AttackTarget, random: Random) -> None:
        """Frames that cost the sender nothing: resets, pings, settings, headers that do not end."""
        opened = frame(FrameKind.HEADERS, END_HEADERS, 1, headers("Ping"))
        floods = (
            b"".join(
                frame(FrameKind.HEADERS, END_HEADERS, stream, headers("Subscribe"))
                + frame(FrameKind.RST_STREAM, 0, stream, struct.pack(">I", 8))
                for stream in range(1, 2000, 2)
            ),
            frame(FrameKind.PING, 0, 0, bytes(8)) * 20_000,
            frame(FrameKind.SETTINGS, 0, 0, b"") * 5000,
            frame(FrameKind.SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) * 100,
            opened + frame(FrameKind.WINDOW_UPDATE, 0, 1, bytes(4)) * 1000,
            frame(FrameKind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 10,
            frame(FrameKind.HEADERS, 0, 1, headers("Ping"))
            + frame(FrameKind.CONTINUATION, 0, 1, _field(b"x", b"y" * 8000)) * 500,
            frame(FrameKind.HEADERS, END_HEADERS, 1, headers("Ping", (b"x-big", b"y" * 15_000))),
            opened
            + frame(FrameKind.DATA, 0, 1, b"\0" + struct.pack(">I", 2**32 - 1) + bytes(1000)),
            opened + frame(FrameKind.DATA, 0, 1, b"\1" + struct.pack(">I", 5) + b"abcde"),
            opened + frame(FrameKind.DATA, 0, 1, b"") * 20_000,
            frame(FrameKind.GOAWAY, 0, 0, bytes(8)) + opened,
        )
        async with connected(target) as connection:
            await connection.push(GREETING + random.choice(floods))
            await connection.read_until_closed()
