"""The format of a segment: a file of blocks behind a small header.

    0   4   magic        "RNS" 0x01
    4   4   shard        u32
    8   8   number       u64, 1, 2, 3 … in its shard
    16  8   first_entry  u64, no entry below this one is in the file
    24  8   generation   u64, raised by each rewrite
    32  8   epoch        u64, of the log when it made the file
    40  8   created_ns   i64
    48  12  zero
    60  4   crc          CRC-32C of bytes 0 to 59
    64      blocks, each on a multiple of 8; then, while it is written to, a mark and preallocated zeros

`runnel.formats.block` describes the blocks. Entries rise; after a rewrite some may be missing.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import msgspec

from runnel.errors import CorruptionError, MalformedError
from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import Envelope
from runnel.log.segments.scan import Scanner, ScanUnit, ScanWindow, TooShort

HEADER_BYTES: Final = 64

_MAGIC: Final = b"RNS\x01"
_HEADER: Final = struct.Struct("<4sIQQQQq12x")
_CRC: Final = struct.Struct("<I")
_UNIT_MAGIC: Final = re.compile(rb"RN[BM]\x01")


class SegmentHeader(msgspec.Struct, frozen=True):
    """The header of a segment file."""

    shard: int
    number: int
    first_entry: int
    generation: int
    epoch: int
    created_ns: int

    def encode(self) -> bytes:
        checked = _HEADER.pack(
            _MAGIC,
            self.shard,
            self.number,
            self.first_entry,
            self.generation,
            self.epoch,
            self.created_ns,
        )
        return checked + _CRC.pack(crc32c(checked))


def decode_header(data: bytes, path: str) -> SegmentHeader:
    if len(data) < HEADER_BYTES:
        raise CorruptionError(path, 0, f"segment header has {len(data)} bytes of {HEADER_BYTES}")
    magic, *fields = _HEADER.unpack_from(data)
    if magic[:3] != _MAGIC[:3] or crc32c(data[: _HEADER.size]) != _CRC.unpack_from(data, 60)[0]:
        raise CorruptionError(path, 0, "segment header does not match its checksum")
    if magic != _MAGIC:
        raise CorruptionError(
            path, 0, f"segment of version {magic[3]}; this Runnel reads {_MAGIC[3]}"
        )
    return SegmentHeader(*fields)


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """A whole block: its envelope, its body, and all of its bytes."""

    envelope: Envelope
    body: memoryview
    view: memoryview


def read_block(view: memoryview, position: int) -> ScanUnit[StoredBlock]:
    """Read the block or mark at the start of a view and verify both checksums; a `scan.UnitReader`."""
    header = block.read_header(view)
    if header.is_mark:
        block.check_mark(view, 0, header)
        return ScanUnit(position, header.block_bytes, header.durable_position, None)
    if len(view) < header.block_bytes:
        raise TooShort(header.block_bytes)
    envelope = envelopes.decode(block.envelope_view(view, 0, header))
    if not envelope.is_stored:
        raise MalformedError("envelope base_offsets", "missing in a stored block")
    body = block.body_view(view, 0, header, envelope.body_crc)
    stored = StoredBlock(envelope, body, view[: header.block_bytes])
    return ScanUnit(position, header.block_bytes, header.durable_position, stored)


def scanner(
    path: str, window: ScanWindow, *, start: int = HEADER_BYTES, search_bytes: int, durable: int = 0
) -> Scanner[StoredBlock]:
    """A scanner of the blocks from `start` on; see `scan` for how it treats damage."""
    return Scanner(
        path,
        window,
        read_block,
        _UNIT_MAGIC,
        start=start,
        search_bytes=search_bytes,
        durable=durable,
    )
