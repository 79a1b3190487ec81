"""Plain bodies, which have times and payloads and nothing else: recognised by a comparison, made without columns.

Most bodies are plain. This module does what `columns` does for every body, but quicker, and accepts nothing that
`columns` would refuse. For another kind of body, or a wrong one, it returns None, and `columns` says what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np

from runnel.formats.body_layout import (
    ARRAY_HEADER,
    BIN32,
    BUFFER_HEADER,
    PADDING,
    PLAIN_TAIL,
    TAIL,
)
from runnel.formats.table import FEW_ROWS

# A body of one row up to its payload: first the constant parts; then, from byte 8 on, both times and the payload's end.
# The end is unsigned, so that one below 0 fits no body.
_ROW: Final = struct.Struct("<8s 8x 8s 8x 8s I 4x 4s")
_ROW_VALUES: Final = struct.Struct("<q 8x q 12x I")
_ROW_EXPECTED: Final = (
    ARRAY_HEADER + BUFFER_HEADER.pack(BIN32, 11),
    bytes(3) + BUFFER_HEADER.pack(BIN32, 11),
    bytes(3) + BUFFER_HEADER.pack(BIN32, 11),
    0,
    bytes((0, 0, 0, BIN32)),
)
_ROW_FRONT: Final = struct.Struct("<8s q 8s q 8s ii 4s")
_LENGTH: Final = struct.Struct(">I")
PLAIN_ROW_PAYLOAD_AT: Final = 56
# A few offsets of rows of one length are cached, for batches of up to this many rows: 16 KiB each at most.
KEPT_ROWS_MAX: Final = 4096
_KEPT_SHAPES: Final = 64


# --- Recognising ---


def plain_row(body: bytes | memoryview) -> tuple[int, int, int] | None:
    """Event time, transmit time and the payload's end, of an uncompressed body of one row that has nothing else.

    None if this is another body, or a wrong one. The payload begins at `PLAIN_ROW_PAYLOAD_AT`.
    """
    tail_at = len(body) - len(PLAIN_TAIL)
    padded_bytes = tail_at - PLAIN_ROW_PAYLOAD_AT
    if padded_bytes < 0 or TAIL.unpack_from(body, tail_at)[0] != PLAIN_TAIL:
        return None
    if _ROW.unpack_from(body) != _ROW_EXPECTED:
        return None
    event_time_ns, transmit_time_ns, payload_bytes = _ROW_VALUES.unpack_from(body, 8)
    (announced_bytes,) = _LENGTH.unpack_from(body, PLAIN_ROW_PAYLOAD_AT - _LENGTH.size)
    if announced_bytes != padded_bytes or payload_bytes + (3 - payload_bytes) % 8 != padded_bytes:
        return None
    return event_time_ns, transmit_time_ns, PLAIN_ROW_PAYLOAD_AT + payload_bytes


def is_known_plain(body: bytes | memoryview, count: int) -> bool:
    """Whether an uncompressed body is valid, and has nothing but times and payloads. False: decode its columns."""
    return (plain_row(body) if count == 1 else even_shape(body, count)) is not None


class EvenShape(msgspec.Struct, frozen=True, gc=False):
    """A plain body with payloads of one length: its constant bytes, and where times, offsets and payloads lie."""

    count: int
    width: int
    layout: struct.Struct
    expected: tuple[bytes, ...]
    event_times: slice
    transmit_time: slice
    offsets: slice
    payloads: slice

    def fits(self, body: bytes | memoryview) -> bool:
        """Whether a body has this shape. One comparison checks everything."""
        layout = self.layout
        return layout.size == len(body) and layout.unpack_from(body) == self.expected


def even_shape(body: bytes | memoryview, count: int) -> EvenShape | None:
    """The shape of an uncompressed body; None if it is of another kind, or wrong."""
    if not FEW_ROWS < count <= KEPT_ROWS_MAX:
        return None
    # In a plain body the rest is payloads and less than 8 bytes of padding: fewer than there are rows.
    width, padding_bytes = divmod(len(body) - _payloads_at(count) - len(PLAIN_TAIL), count)
    if width <= 0 or padding_bytes >= 8:
        return None
    shape = _even_shape(count, width)
    return shape if shape.fits(body) else None


def _payloads_at(count: int) -> int:
    """Where the payloads begin in a plain body: behind 44 bytes, a time and an offset per row, and padding to 8."""
    return (12 * count + 44 + 7) & -8


@lru_cache(maxsize=_KEPT_SHAPES)
def _even_shape(count: int, width: int) -> EvenShape:
    offsets = even_offsets(count, width)
    offsets_padding = PADDING[len(offsets) & 7]
    payloads_bytes, payloads_at = width * count, _payloads_at(count)
    payloads_padding = PADDING[payloads_bytes & 7]
    times_at, transmit_at, offsets_at = 8, 8 * count + 16, 8 * count + 32
    expected = (
        ARRAY_HEADER + BUFFER_HEADER.pack(BIN32, 8 * count + 3),
        bytes(3) + BUFFER_HEADER.pack(BIN32, 8 + 3),
        bytes(3)
        + BUFFER_HEADER.pack(BIN32, len(offsets) + len(offsets_padding))
        + offsets
        + offsets_padding
        + BUFFER_HEADER.pack(BIN32, payloads_bytes + len(payloads_padding)),
        payloads_padding + PLAIN_TAIL,
    )
    head, between, before, behind = map(len, expected)
    return EvenShape(
        count,
        width,
        struct.Struct(f"{head}s {8 * count}x {between}s 8x {before}s {payloads_bytes}x {behind}s"),
        expected,
        slice(times_at, times_at + 8 * count),
        slice(transmit_at, transmit_at + 8),
        slice(offsets_at, offsets_at + len(offsets)),
        slice(payloads_at, payloads_at + payloads_bytes),
    )


@lru_cache(maxsize=_KEPT_SHAPES)
def even_offsets(count: int, width: int) -> bytes:
    """The offsets of rows of one length."""
    return np.arange(0, (count + 1) * width, width, dtype=np.int32).tobytes()


# --- Making ---


def encode(
    payloads: Sequence[bytes], event_times_ns: Sequence[int], transmit_time_ns: int
) -> bytes:
    """A body without columns, for up to `FEW_ROWS` messages with nothing but payloads and a 64-bit time each."""
    if len(payloads) == 1:
        return _encode_row(payloads[0], event_times_ns[0], transmit_time_ns)
    layout, before_event_times, before_transmit_time, before_offsets = _front(len(payloads))
    data = b"".join(payloads)
    padding = PADDING[len(data) & 7]
    return b"".join(
        (
            layout.pack(
                before_event_times,
                *event_times_ns,
                before_transmit_time,
                transmit_time_ns,
                before_offsets,
                *accumulate(map(len, payloads), initial=0),
            ),
            BUFFER_HEADER.pack(BIN32, len(data) + len(padding)),
            data,
            padding,
            PLAIN_TAIL,
        )
    )


def _encode_row(payload: bytes, event_time_ns: int, transmit_time_ns: int) -> bytes:
    """A body of one message: all buffers before the payload have a fixed length (bench/latency.py)."""
    payload_bytes = len(payload)
    padding = PADDING[payload_bytes & 7]
    head, between, _, _, end = _ROW_EXPECTED
    front = _ROW_FRONT.pack(
        head, event_time_ns, between, transmit_time_ns, between, 0, payload_bytes, end
    )
    length = _LENGTH.pack(payload_bytes + len(padding))
    return b"".join((front, length, payload, padding, PLAIN_TAIL))


@lru_cache(maxsize=FEW_ROWS)
def _front(count: int) -> tuple[struct.Struct, bytes, bytes, bytes]:
    """A plain body up to the payloads' header: times and offsets, and what stands before each of them."""
    offsets_bytes = 4 * (count + 1)
    offsets_padding = PADDING[offsets_bytes & 7]
    return (
        struct.Struct(f"<8s {count}q 8s q 8s {count + 1}i {len(offsets_padding)}x"),
        ARRAY_HEADER + BUFFER_HEADER.pack(BIN32, 8 * count + 3),
        bytes(3) + BUFFER_HEADER.pack(BIN32, 8 + 3),
        bytes(3) + BUFFER_HEADER.pack(BIN32, offsets_bytes + len(offsets_padding)),
    )
