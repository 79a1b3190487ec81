"""Compresses bodies, and decompresses them to the size that the envelope states, never beyond."""

from __future__ import annotations

from typing import Final

import lz4.block
import zstandard

from runnel.errors import MalformedError
from runnel.formats.envelope import Codec

# The most that one byte can unpack to: in LZ4 a length byte stands for 255; in zstd a block of 4
# bytes for 128 KiB. A larger size is false, and refused before memory for it is allocated.
_LZ4_RATIO_MAX: Final = 255
_ZSTD_RATIO_MAX: Final = 128 * 2**10 // 4


def compress(body: bytes | memoryview, codec: Codec) -> bytes | memoryview:
    """The body in the given codec: an LZ4 block without a size before it, or one zstd frame."""
    match codec:
        case Codec.NONE:
            return body
        case Codec.LZ4:
            packed: bytes = lz4.block.compress(body, store_size=False)
            return packed
        case Codec.ZSTD:
            return zstandard.ZstdCompressor(level=3).compress(body)


def decompress(packed: bytes | memoryview, codec: int, size: int) -> bytes | memoryview:
    """The body of exactly `size` bytes, or MalformedError; allocates no more than `size`."""
    if codec == Codec.NONE:
        body = packed
    elif codec == Codec.LZ4:
        body = _undo_lz4(packed, size)
    else:
        body = _undo_zstd(packed, size)
    if len(body) != size:
        raise MalformedError("body", f"unpacks to {len(body)} bytes where the envelope says {size}")
    return body


def _undo_lz4(packed: bytes | memoryview, size: int) -> bytes:
    if size > _LZ4_RATIO_MAX * len(packed):
        raise MalformedError("body", f"{len(packed)} bytes of lz4 cannot unpack to {size}")
    try:
        body: bytes = lz4.block.decompress(packed, uncompressed_size=size)
    except lz4.block.LZ4BlockError as error:
        raise MalformedError("body", f"not an lz4 block of {size} bytes: {error}") from None
    return body


def _undo_zstd(packed: bytes | memoryview, size: int) -> bytes:
    if size > _ZSTD_RATIO_MAX * len(packed):
        raise MalformedError("body", f"{len(packed)} bytes of zstd cannot unpack to {size}")
    try:
        # The frame's header may claim any size, and the decompressor would believe it.
        stated = zstandard.frame_content_size(packed)
        if stated not in (-1, size):
            raise MalformedError(
                "body", f"a zstd frame of {stated} bytes where the envelope says {size}"
            )
        return zstandard.ZstdDecompressor().decompress(
            packed, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedError("body", f"not a zstd frame of {size} bytes: {error}") from None
