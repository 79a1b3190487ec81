"""Compressed bodies: what they unpack to is what the envelope says, or nothing at all."""

from __future__ import annotations

import struct

import lz4.block
import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.formats import compression
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import BODY_BYTES_CEILING, Codec
from runnel.formats.message import Message

PACKING = [Codec.LZ4, Codec.ZSTD]
BATCH = Batch.from_messages([Message("t", b"21.5" * 20, key=b"k")] * 20)
BODY = bytes(BATCH.body)


@given(st.binary(min_size=1, max_size=300), st.integers(1, 40), st.sampled_from(list(Codec)))
def test_what_was_compressed_comes_back(data: bytes, times: int, codec: Codec) -> None:
    body = data * times
    packed = compression.compress(body, codec)
    assert compression.decompress(memoryview(packed), codec, len(body)) == body


@pytest.mark.parametrize("codec", PACKING)
def test_a_body_that_unpacks_to_another_size_is_refused(codec: Codec) -> None:
    packed = compression.compress(BODY, codec)
    for size in (1, len(BODY) - 1, len(BODY) + 1, 2 * len(BODY), BODY_BYTES_CEILING):
        with pytest.raises(MalformedError):
            compression.decompress(packed, codec, size)


def test_a_zstd_frame_without_its_size_is_read_and_held_to_the_envelopes() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(BODY)
    assert compression.decompress(packed, Codec.ZSTD, len(BODY)) == BODY
    for size in (len(BODY) - 1, len(BODY) + 1):
        with pytest.raises(MalformedError):
            compression.decompress(packed, Codec.ZSTD, size)


@pytest.mark.parametrize("codec", PACKING)
def test_packed_bytes_that_are_cut_or_followed_by_more_are_refused(codec: Codec) -> None:
    packed = bytes(compression.compress(BODY, codec))
    for length in range(len(packed)):
        with pytest.raises(MalformedError):
            compression.decompress(packed[:length], codec, len(BODY))
    for behind in (b"\0", packed):
        with pytest.raises(MalformedError):
            compression.decompress(packed + behind, codec, len(BODY))


@pytest.mark.parametrize("codec", PACKING)
def test_any_changed_byte_gives_a_body_of_the_size_or_a_clear_error(codec: Codec) -> None:
    packed = bytes(compression.compress(BODY, codec))
    for position in range(len(packed)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(packed)
            changed[position] ^= flip
            try:
                body = compression.decompress(bytes(changed), codec, len(BODY))
            except MalformedError:
                continue
            assert len(body) == len(BODY)


def test_a_bomb_is_refused_without_being_unpacked() -> None:
    zeros = bytes(8 * 2**20)
    for codec, packed in (
        (Codec.LZ4, lz4.block.compress(zeros, store_size=False)),
        (Codec.ZSTD, zstandard.compress(zeros)),
        (Codec.ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(zeros)),
    ):
        with pytest.raises(MalformedError):
            compression.decompress(packed, codec, 1_000)


def zstd_frame(window_byte: int, content_bytes: int | None) -> bytes:
    """A frame header with this window and stated size, then one block of zeros that ends it."""
    if content_bytes is None:
        head = bytes([0x00, window_byte])
    else:
        head = bytes([0xC0, window_byte]) + struct.pack("<Q", content_bytes)
    run_of_zeros = struct.pack("<I", (100 << 3) | 0b011)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd" + head + run_of_zeros


def test_a_zstd_frame_may_claim_any_window_and_size_without_harm() -> None:
    assert compression.decompress(zstd_frame(0x00, 100), Codec.ZSTD, 100) == bytes(100)
    for window_byte in (0xF8, 0xFF):
        for content_bytes in (None, 2**63, 2**40, BODY_BYTES_CEILING):
            with pytest.raises(MalformedError):
                compression.decompress(
                    zstd_frame(window_byte, content_bytes), Codec.ZSTD, BODY_BYTES_CEILING
                )


@pytest.mark.parametrize("codec", PACKING)
def test_a_packed_body_that_lies_is_found_when_it_is_looked_at(codec: Codec) -> None:
    packed = compression.compress(BODY, codec)
    head = msgspec.structs.replace(
        BATCH.envelope, codec=codec, body_bytes=len(BODY) + 8, body_crc=crc32c(packed)
    )
    batch = Batch.unpack(Batch(head, packed).pack())
    for look in (batch.messages, batch.to_arrow, batch.uncompressed, lambda: batch.slice(1)):
        with pytest.raises(MalformedError):
            look()
