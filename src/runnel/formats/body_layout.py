"""Constant bytes of a batch's body: headers, padding, empty buffers. `columns` draws the layout."""

from __future__ import annotations

import struct
from typing import Final

ARRAY_HEADER: Final = b"\xdc\x00\x0d"
BIN32: Final = 0xC6
BUFFER_HEADER: Final = struct.Struct(">BI")
PADDING: Final = tuple(bytes((3 - length) % 8) for length in range(8))
EMPTY_BYTES: Final = 3  # an empty buffer is nothing but padding
EMPTY_BUFFER: Final = BUFFER_HEADER.pack(BIN32, EMPTY_BYTES) + bytes(EMPTY_BYTES)
NO_TAG_SETS: Final = b"\x90"

# The end of a plain body, which has times and payloads and nothing else.
PLAIN_TAIL: Final = 8 * EMPTY_BUFFER + NO_TAG_SETS
TAIL: Final = struct.Struct(f"{len(PLAIN_TAIL)}s")
