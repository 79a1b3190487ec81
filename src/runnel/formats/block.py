"""A batch as it lies in a file and travels in a frame: a fixed header, the envelope, the body.

    0   4   magic             "RNB" 0x01
    4   4   envelope_bytes    u32
    8   4   body_bytes        u32, as carried (compressed or not)
    12  8   durable_position  u64, bytes of its file that had survived a sync when this block was
                              written; 0 on the wire, where it means nothing
    20  4   crc               CRC-32C of bytes 0 to 19 and of the envelope
    24      envelope          zero-padded to a multiple of 8
            body              zero-padded to a multiple of 8

All little-endian. Blocks begin on multiples of 8, so the buffers in a body do too. The header's
checksum covers the envelope, the envelope's covers the body, and padding must be zero: no bit can
flip unseen.

A mark is a header alone (magic "RNM" 0x01, no envelope, no body). The writer leaves one behind the
last block when it rests, and writes the next block over it: it tells other processes, and recovery,
how far the file is durable. What lies behind `durable_position` of the last block or mark may be
torn; what lies before may not.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from runnel.errors import MalformedError
from runnel.formats import envelope as envelopes
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import BODY_BYTES_CEILING, Codec, Envelope

HEADER_BYTES: Final = 24
ENVELOPE_BYTES_MAX: Final = 32 * 2**20
BLOCK_MAGIC: Final = b"RNB\x01"
MARK_MAGIC: Final = b"RNM\x01"

_HEADER: Final = struct.Struct("<4sIIQI")
_HEADER_CHECKED: Final = struct.Struct("<4sIIQ")
_CHECKED_BYTES: Final = _HEADER_CHECKED.size
_CRC: Final = struct.Struct("<I")
_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))
_PLAIN: Final = Codec.NONE.value  # an enum's member takes several times as long to look up


class Header(msgspec.Struct, frozen=True, gc=False):
    """A block's header, checked to be plausible but not yet against its checksum."""

    envelope_bytes: int
    body_bytes: int
    durable_position: int
    crc: int
    body_start: int  # where the body begins, from the start of the block
    block_bytes: int  # the whole block, padding included

    @property
    def is_mark(self) -> bool:
        return not self.envelope_bytes


def pack(
    encoded_envelope: bytes, body: bytes | memoryview, *, durable_position: int = 0
) -> tuple[bytes, bytes | memoryview, bytes]:
    """The block as buffers to write in this order: head, body (by reference), padding."""
    checked = _HEADER_CHECKED.pack(BLOCK_MAGIC, len(encoded_envelope), len(body), durable_position)
    crc = crc32c(encoded_envelope, crc32c(checked))
    head = b"".join(
        (checked, _CRC.pack(crc), encoded_envelope, _PADDING[len(encoded_envelope) & 7])
    )
    return head, body, _PADDING[len(body) & 7]


def pack_mark(durable_position: int) -> bytes:
    checked = _HEADER_CHECKED.pack(MARK_MAGIC, 0, 0, durable_position)
    return checked + _CRC.pack(crc32c(checked))


def read_header(data: bytes | memoryview, position: int = 0) -> Header:
    """The header at a position of `data`; its checksum is not verified here."""
    envelope_bytes, body_bytes, durable, crc = _read_fields(data, position)
    body_start = HEADER_BYTES + envelope_bytes + -envelope_bytes % 8
    block_bytes = body_start + body_bytes + -body_bytes % 8
    return Header(envelope_bytes, body_bytes, durable, crc, body_start, block_bytes)


def _read_fields(data: bytes | memoryview, position: int) -> tuple[int, int, int, int]:
    """Envelope bytes, body bytes (a mark has none of either), durable position, checksum."""
    if len(data) - position < HEADER_BYTES:
        raise MalformedError("block header", f"{len(data) - position} bytes of {HEADER_BYTES}")
    magic, envelope_bytes, body_bytes, durable, crc = _HEADER.unpack_from(data, position)
    if magic == MARK_MAGIC and not envelope_bytes and not body_bytes:
        return 0, 0, durable, crc
    if magic != BLOCK_MAGIC:
        raise MalformedError("block magic", _magic_text(magic))
    if not 0 < envelope_bytes <= ENVELOPE_BYTES_MAX:
        raise MalformedError(
            "block envelope_bytes", f"{envelope_bytes} is not 1 to {ENVELOPE_BYTES_MAX}"
        )
    if not 0 < body_bytes <= BODY_BYTES_CEILING:
        raise MalformedError("block body_bytes", f"{body_bytes} is not 1 to {BODY_BYTES_CEILING}")
    return envelope_bytes, body_bytes, durable, crc


def _magic_text(magic: bytes) -> str:
    if magic == MARK_MAGIC:
        return "a mark has no envelope and no body"
    if magic[:3] in (BLOCK_MAGIC[:3], MARK_MAGIC[:3]):
        return f"version {magic[3]} is unknown; this Runnel reads version {BLOCK_MAGIC[3]}"
    return f"{magic.hex(' ')} is not the beginning of a block"


def check_mark(data: bytes | memoryview, position: int, header: Header) -> None:
    if crc32c(memoryview(data)[position : position + 20]) != header.crc:
        raise MalformedError("mark crc", "checksum does not match")


def envelope_view(data: bytes | memoryview, position: int, header: Header) -> memoryview:
    """The encoded envelope of the block at `position`, checked against the header's checksum."""
    view = memoryview(data)
    begin = position + HEADER_BYTES
    encoded = view[begin : begin + header.envelope_bytes]
    if len(encoded) != header.envelope_bytes:
        raise MalformedError("block envelope", f"{len(encoded)} bytes of {header.envelope_bytes}")
    check_envelope(encoded, view[position : position + 20], header.crc)
    return encoded


def body_view(data: bytes | memoryview, position: int, header: Header, body_crc: int) -> memoryview:
    """The body of the block at `position`, checked against the envelope's checksum."""
    view = memoryview(data)
    begin = position + header.body_start
    end = begin + header.body_bytes
    body = view[begin:end]
    if len(body) != header.body_bytes:
        raise MalformedError("block body", f"{len(body)} bytes of {header.body_bytes}")
    check_body(body, body_crc)
    check_padding(view[position + HEADER_BYTES + header.envelope_bytes : begin])
    check_padding(view[end : position + header.block_bytes])
    return body


def check_envelope(encoded: memoryview, header: memoryview, crc: int) -> None:
    if crc32c(encoded, crc32c(header)) != crc:
        raise _envelope_crc_error()


def _envelope_crc_error() -> MalformedError:
    return MalformedError("block crc", "header and envelope do not match their checksum")


def check_body(body: memoryview, crc: int) -> None:
    if crc32c(body) != crc:
        raise _body_crc_error()


def _body_crc_error() -> MalformedError:
    return MalformedError("block body", "does not match the envelope's checksum")


def check_padding(padding: memoryview) -> None:
    if any(padding):
        raise _padding_error()


def _padding_error() -> MalformedError:
    return MalformedError("block padding", "is not zero")


def unpack(
    data: bytes | memoryview, position: int = 0, *, body_bytes_max: int = BODY_BYTES_CEILING
) -> tuple[Envelope, memoryview, int]:
    """The envelope, the body and the whole length of the block at `position`, all checked.

    In one go, without a `Header`: a small block takes a sixth less time (bench/log.py, "read").
    """
    view = memoryview(data)
    envelope_bytes, body_bytes, _, crc = _read_fields(view, position)
    if not envelope_bytes:
        raise MalformedError("block magic", "a mark stands where a batch must be")
    envelope_begin = position + HEADER_BYTES
    envelope_end = envelope_begin + envelope_bytes
    body_begin = envelope_begin + ((envelope_bytes + 7) & -8)
    body_end = body_begin + body_bytes
    end = body_begin + ((body_bytes + 7) & -8)
    if len(view) < end:
        raise MalformedError("block", f"{len(view) - position} bytes of {end - position}")
    encoded = view[envelope_begin:envelope_end]
    if crc32c(encoded, crc32c(view[position : position + _CHECKED_BYTES])) != crc:
        raise _envelope_crc_error()
    envelope = envelopes.decode(encoded, body_bytes_max=body_bytes_max)
    if envelope.codec == _PLAIN and envelope.body_bytes != body_bytes:
        raise MalformedError(
            "envelope body_bytes",
            f"{envelope.body_bytes} where the block has {body_bytes}, uncompressed",
        )
    body = view[body_begin:body_end]
    if crc32c(body) != envelope.body_crc:
        raise _body_crc_error()
    if any(view[envelope_end:body_begin]) or any(view[body_end:end]):
        raise _padding_error()
    return envelope, body, end - position
