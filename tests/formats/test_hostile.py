"""Small bytes that claim to be large: refused without making room for what they claim."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zstandard

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import block, columns, envelope
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import BODY_BYTES_CEILING, Codec, pack32
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message

PEAK_BYTES_MAX = 2**20
SMALL = Batch.from_messages([Message("t", b"21.5", tags={"a": "b"})])
WITHOUT_TAGS = bytes(SMALL.body).removesuffix(msgspec.msgpack.encode([{"a": "b"}]))


@contextmanager
def little_memory(bytes_max: int = PEAK_BYTES_MAX) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bytes_max


def with_head(**changes: Any) -> bytes:
    """A block whose checksums are right and whose envelope says something else."""
    head = msgspec.structs.replace(SMALL.envelope, **changes)
    return Batch(head, SMALL.body).pack()


def with_body(body: bytes, **changes: Any) -> bytes:
    fields = {"body_bytes": len(body), "body_crc": crc32c(body)} | changes
    return Batch(msgspec.structs.replace(SMALL.envelope, **fields), body).pack()


def with_envelope(encoded: bytes) -> bytes:
    return b"".join(block.pack(encoded, SMALL.body))


def many_topics(header: bytes) -> bytes:
    """The right envelope, but for the header of its array of topics."""
    encoded = envelope.encode(SMALL.envelope)
    return with_envelope(encoded.replace(b"\x91\xa1t", header + b"\xa1t", 1))


ZEROS = zstandard.compress(bytes(BODY_BYTES_CEILING))
CASES: dict[str, bytes] = {
    "envelope of 32 MiB": struct.pack("<4sIIQI", b"RNB\x01", 32 * 2**20, 8, 0, 0),
    "body of 64 MiB": struct.pack("<4sIIQI", b"RNB\x01", 8, BODY_BYTES_CEILING, 0, 0),
    "two thousand million messages": with_head(counts=pack32([2**31 - 1])),
    "a body of 64 MiB that is not there": with_head(body_bytes=BODY_BYTES_CEILING),
    "16 million messages": with_head(counts=pack32([2**24 - 1]), body_bytes=BODY_BYTES_CEILING),
    "four thousand million topics": many_topics(b"\xdd\xff\xff\xff\xff"),
    "65 thousand topics": many_topics(b"\xdc\xff\xff"),
    "lz4 of 64 MiB": with_head(codec=Codec.LZ4, body_bytes=BODY_BYTES_CEILING),
    "zstd of 64 MiB": with_head(codec=Codec.ZSTD, body_bytes=BODY_BYTES_CEILING),
    "a zstd bomb": with_body(ZEROS, codec=Codec.ZSTD, body_bytes=1_000),
    "a zstd frame that is cut": with_body(
        ZEROS[:20], codec=Codec.ZSTD, body_bytes=BODY_BYTES_CEILING
    ),
    "four thousand million tag sets": with_body(WITHOUT_TAGS + b"\xdd\xff\xff\xff\xff"),
    "four thousand million tags": with_body(WITHOUT_TAGS + b"\x91\xdf\xff\xff\xff\xff"),
    "a tag of 4 GiB": with_body(WITHOUT_TAGS + b"\x91\x81\xdb\xff\xff\xff\xff"),
    "a buffer of 4 GiB": with_body(b"\xdc\x00\x0d\xc6\xff\xff\xff\xff" + bytes(100)),
    "deep nesting": with_body(WITHOUT_TAGS + b"\x91" * 50_000),
}


@pytest.mark.parametrize("name", CASES)
def test_a_claim_of_much_is_refused_with_little(name: str) -> None:
    data = CASES[name]
    with little_memory(), pytest.raises(MalformedError):
        Batch.unpack(data).messages()


@pytest.mark.parametrize("set_count", [2, 1_000, 1_000_000])
def test_more_tag_sets_than_messages_are_refused_before_they_are_read(set_count: int) -> None:
    body = WITHOUT_TAGS + msgspec.msgpack.encode([{}] * set_count)
    with little_memory(), pytest.raises(MalformedError, match=f"{set_count} sets for 1 messages"):
        columns.decode(body, 1)


def test_more_topics_than_allowed_are_refused_before_they_are_read() -> None:
    values = msgspec.msgpack.decode(envelope.encode(SMALL.envelope))
    values[1] = [""] * 5_000_000
    encoded = msgspec.msgpack.encode(values)
    with little_memory(), pytest.raises(MalformedError):
        envelope.decode(encoded)


@pytest.mark.parametrize(
    "make", [lambda: struct.pack("<II", 2**32 - 1, 8), lambda: struct.pack("<II", 2**31, 2**31)]
)
def test_a_large_frame_is_refused_with_little(make: Callable[[], bytes]) -> None:
    reader = FrameReader(4 * 2**20)
    with little_memory(), pytest.raises(LimitExceededError):
        reader.feed(make())


def test_a_frame_that_comes_byte_by_byte_costs_no_more_than_its_bytes() -> None:
    reader = FrameReader(2**20)
    reader.feed(struct.pack("<II", 200_000, 8))
    with little_memory(500_000):
        for _ in range(199_999):
            assert not reader.feed(b"x")
        (frame,) = reader.feed(b"x")
    assert len(frame.tail) == 200_000 - 8
