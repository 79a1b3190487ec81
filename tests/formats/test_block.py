"""Blocks and marks: every cut and every flipped bit is found, and lengths that lie."""

from __future__ import annotations

import struct

import msgspec
import pytest

from runnel.errors import MalformedError
from runnel.formats import block, envelope
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from tests.formats.samples import stored

PLAIN = Batch.from_messages([Message("t", b"21.5", key=b"k", tags={"u": "C"})])
RUNS = stored(Batch.from_messages([Message("a", b"1"), Message("b", b"", uid=b"u" * 20)]))
PACKED = Batch.from_messages([Message("t", b"x" * 90)] * 2, codec=Codec.ZSTD)
SMALL = [PLAIN.pack(), RUNS.pack(), PACKED.pack()]


@pytest.mark.parametrize("whole", SMALL)
def test_a_block_cut_at_any_byte_is_refused(whole: bytes) -> None:
    for length in range(len(whole)):
        with pytest.raises(MalformedError):
            Batch.unpack(whole[:length])


@pytest.mark.parametrize("whole", SMALL)
def test_any_flipped_bit_is_found(whole: bytes) -> None:
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            with pytest.raises(MalformedError):
                Batch.unpack(bytes(damaged))


@pytest.mark.parametrize("whole", SMALL)
def test_any_byte_set_to_any_extreme_is_found(whole: bytes) -> None:
    for position in range(len(whole)):
        for value in {0x00, 0x7F, 0x80, 0xFF} - {whole[position]}:
            with pytest.raises(MalformedError):
                Batch.unpack(whole[:position] + bytes([value]) + whole[position + 1 :])


def test_the_parts_of_a_block_add_up_to_its_header() -> None:
    parts = block.pack(envelope.encode(PLAIN.envelope), PLAIN.body, durable_position=77)
    whole = b"".join(parts)
    header = block.read_header(whole)
    assert header.block_bytes == len(whole)
    assert header.body_start == len(parts[0])
    assert header.durable_position == 77
    assert not header.is_mark
    assert block.unpack(whole)[1:] == (PLAIN.body, len(whole))
    assert parts[1] is PLAIN.body


def test_a_mark_is_a_header_alone() -> None:
    mark = block.pack_mark(2**64 - 1)
    header = block.read_header(b"-" * 8 + mark, 8)
    assert header.is_mark
    assert header.durable_position == 2**64 - 1
    assert header.block_bytes == len(mark) == block.HEADER_BYTES
    block.check_mark(b"-" * 8 + mark, 8, header)
    with pytest.raises(MalformedError, match="a mark stands where a batch must be"):
        Batch.unpack(mark)


def test_any_flipped_bit_of_a_mark_is_found() -> None:
    mark = block.pack_mark(4096)
    for position in range(len(mark)):
        for bit in range(8):
            damaged = bytearray(mark)
            damaged[position] ^= 1 << bit
            with pytest.raises(MalformedError):
                block.check_mark(bytes(damaged), 0, block.read_header(bytes(damaged)))


@pytest.mark.parametrize(
    ("header", "place"),
    [
        (struct.pack("<4sIIQI", b"RNB\x02", 1, 1, 0, 0), "block magic"),
        (struct.pack("<4sIIQI", b"RNM\x02", 0, 0, 0, 0), "block magic"),
        (struct.pack("<4sIIQI", b"RNM\x01", 1, 0, 0, 0), "block magic"),
        (struct.pack("<4sIIQI", b"\0\0\0\0", 0, 0, 0, 0), "block magic"),
        (struct.pack("<4sIIQI", b"RNB\x01", 0, 1, 0, 0), "block envelope_bytes"),
        (struct.pack("<4sIIQI", b"RNB\x01", 2**32 - 1, 1, 0, 0), "block envelope_bytes"),
        (struct.pack("<4sIIQI", b"RNB\x01", 1, 0, 0, 0), "block body_bytes"),
        (struct.pack("<4sIIQI", b"RNB\x01", 1, 2**32 - 1, 0, 0), "block body_bytes"),
    ],
)
def test_a_header_that_cannot_be_is_refused_by_name(header: bytes, place: str) -> None:
    with pytest.raises(MalformedError) as caught:
        block.read_header(header)
    assert caught.value.place == place


@pytest.mark.parametrize("magic", [b"RNB\x02", b"RNM\x02"])
def test_a_later_version_is_named(magic: bytes) -> None:
    with pytest.raises(MalformedError, match="version 2 is unknown; this Runnel reads version 1"):
        block.read_header(magic + bytes(20))


def test_an_uncompressed_body_must_be_as_long_as_the_envelope_says() -> None:
    head = msgspec.structs.replace(PLAIN.envelope, body_bytes=PLAIN.envelope.body_bytes - 1)
    with pytest.raises(MalformedError) as caught:
        Batch.unpack(Batch(head, PLAIN.body).pack())
    assert caught.value.place == "envelope body_bytes"


def test_a_body_above_the_readers_limit_is_refused() -> None:
    size = PLAIN.envelope.body_bytes
    assert len(Batch.unpack(PLAIN.pack(), body_bytes_max=size)) == 1
    with pytest.raises(MalformedError, match=f"{size}; 1 to {size - 1} are allowed"):
        Batch.unpack(PLAIN.pack(), body_bytes_max=size - 1)
