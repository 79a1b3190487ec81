"""The body of a batch: messages as columns in Arrow's buffer layout, inside one msgpack array.

    0xdc 0x00 0x0d                    msgpack array of 13 elements (3 bytes)
    0   event_times          i64[n]   or one value that stands for all rows
    1   transmit_times       i64[n]   or one value
    2   payload_offsets      i32[n+1] the first is 0; row i is bytes offsets[i] to offsets[i+1]
    3   payload_bytes
    4   key_validity         bits in 64-bit words, lowest first; empty: every row has a key
    5   key_offsets          i32[n+1] empty: no row has a key
    6   key_bytes
    7   partition_key_validity
    8   partition_key_offsets         empty: the partition key is the key
    9   partition_key_bytes
    10  uids                 20 bytes a row, zeros for a row without; empty: no row has one
    11  tag_index            i32[n]   into tag_sets, or a single 0; empty: no row has tags
    12  tag_sets             msgpack array of maps from str to str, n at most; empty if 11 is

Elements 0 to 11 are always written with msgpack's bin 32 header (5 bytes) and zero-padded at the
end to a length of 8k + 3. So 3 + 5 bytes precede the first buffer and 8k + 3 + 5 bytes lie between
the beginnings of neighbours: every buffer begins on a multiple of 8 from the start of the body. An
empty buffer is 3 zeros. All integers are little-endian. The number of rows n is in the envelope;
with it every length follows, and a decoder checks that each is exactly what it must be.

A tag_index that stands for all rows is always 0: with two rows, one number and its padding are as
long as two numbers, and then both readings say the same.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
import numpy as np

from runnel.errors import MalformedError
from runnel.formats.building import build
from runnel.formats.table import (
    EMPTY,
    FEW_ROWS,
    TAGS_MAX,
    UID_BYTES,
    Binary,
    Columns,
    validity_bytes,
)

__all__ = ["TAGS_MAX", "UID_BYTES", "Binary", "Columns", "build", "decode", "encode"]

if sys.byteorder != "little":
    raise ImportError("runnel keeps columns in little-endian order and runs on such machines only")

_ARRAY_HEADER: Final = b"\xdc\x00\x0d"
_BIN32: Final = 0xC6
_BUFFER_HEADER: Final = struct.Struct(">BI")
_BUFFERS: Final = 12
_HEADERS_BYTES: Final = len(_ARRAY_HEADER) + 5 * _BUFFERS
_NO_TAG_SETS: Final = b"\x90"
_PADDING: Final = tuple(bytes((3 - length) % 8) for length in range(8))
_EMPTY_BYTES: Final = 3  # an empty buffer is nothing but padding
_NO_VALIDITY: Final = memoryview(bytes(_EMPTY_BYTES))
_EMPTY_BUFFER: Final = _BUFFER_HEADER.pack(_BIN32, _EMPTY_BYTES) + bytes(_EMPTY_BYTES)
_ABSENT: Final = Binary()
_PLAIN_TAIL: Final = 8 * _EMPTY_BUFFER + _NO_TAG_SETS
_TAIL: Final = struct.Struct(f"{len(_PLAIN_TAIL)}s")
_ROW: Final = struct.Struct("<ii")  # where a row begins and ends
# A plain body of one row up to its payload: what is always the same; the rest of it, from byte 8 on: both times, and
# where the payload ends. Unsigned, so that an end below 0 fits no body.
_PLAIN_ROW: Final = struct.Struct("<8s 8x 8s 8x 8s I 4x 4s")
_PLAIN_ROW_VALUES: Final = struct.Struct("<q 8x q 12x I")
_PLAIN_ROW_EXPECTED: Final = (
    _ARRAY_HEADER + _BUFFER_HEADER.pack(_BIN32, 11),
    bytes(3) + _BUFFER_HEADER.pack(_BIN32, 11),
    bytes(3) + _BUFFER_HEADER.pack(_BIN32, 11),
    0,
    bytes((0, 0, 0, _BIN32)),
)
_PLAIN_ROW_FRONT: Final = struct.Struct("<8s q 8s q 8s ii 4s")
_LENGTH: Final = struct.Struct(">I")
PLAIN_ROW_PAYLOAD_AT: Final = 56
# Offsets of rows of one length are kept for batches of up to so many rows, a few: 16 KiB each at most.
_KEPT_ROWS_MAX: Final = 4096
_KEPT_SHAPES: Final = 64


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    event_times: memoryview
    transmit_times: memoryview
    payload_offsets: memoryview
    payload_bytes: memoryview
    key_validity: memoryview
    key_offsets: memoryview
    key_bytes: memoryview
    partition_key_validity: memoryview
    partition_key_offsets: memoryview
    partition_key_bytes: memoryview
    uids: memoryview
    tag_index: memoryview
    tag_sets: msgspec.Raw


_layout_decoder = msgspec.msgpack.Decoder(_Layout)
_tag_sets_decoder = msgspec.msgpack.Decoder(
    list[Annotated[dict[str, str], msgspec.Meta(max_length=TAGS_MAX)]]
)
_encoder = msgspec.msgpack.Encoder()


# --- Decoding ---


def first_event_time_ns(body: bytes | memoryview) -> int:
    """That of the first row, of a body that is not compressed: it always lies at the same place. 0: nobody set it."""
    return int.from_bytes(body[8:16], "little", signed=True)


def decode(body: bytes | memoryview, count: int) -> Columns:
    """Read an uncompressed body of `count` rows. MalformedError names the column that is wrong."""
    if count == 1:
        return _decode_one(body) or _decode_any(body, count)
    return _decode_even(body, count) or _decode_plain(body, count) or _decode_any(body, count)


def plain_row(body: bytes | memoryview) -> tuple[int, int, int] | None:
    """Event time, transmit time and the payload's end, of an uncompressed body of one row that has nothing else.

    None if this is another body, or a wrong one. The payload begins at `PLAIN_ROW_PAYLOAD_AT`.
    """
    tail_at = len(body) - len(_PLAIN_TAIL)
    padded_bytes = tail_at - PLAIN_ROW_PAYLOAD_AT
    if padded_bytes < 0 or _TAIL.unpack_from(body, tail_at)[0] != _PLAIN_TAIL:
        return None
    if _PLAIN_ROW.unpack_from(body) != _PLAIN_ROW_EXPECTED:
        return None
    event_time_ns, transmit_time_ns, payload_bytes = _PLAIN_ROW_VALUES.unpack_from(body, 8)
    (announced_bytes,) = _LENGTH.unpack_from(body, PLAIN_ROW_PAYLOAD_AT - _LENGTH.size)
    if announced_bytes != padded_bytes or payload_bytes + (3 - payload_bytes) % 8 != padded_bytes:
        return None
    return event_time_ns, transmit_time_ns, PLAIN_ROW_PAYLOAD_AT + payload_bytes


def is_known_plain(body: bytes | memoryview, count: int) -> bool:
    """Whether an uncompressed body is right, and has nothing but times and payloads. False: look at its columns."""
    return (plain_row(body) if count == 1 else even_shape(body, count)) is not None


def _decode_one(body: bytes | memoryview) -> Columns | None:
    """A message by itself often is plain, and then known by a few comparisons (bench/latency.py)."""
    row = plain_row(body)
    if row is None:
        return None
    view = memoryview(body)
    payload = view[PLAIN_ROW_PAYLOAD_AT : row[2]]
    payloads = Binary(view[40:48], payload, EMPTY, len(payload))
    return Columns(1, view[8:16], view[24:32], payloads, _ABSENT, _ABSENT, EMPTY, EMPTY, ())


class EvenShape(msgspec.Struct, frozen=True, gc=False):
    """A plain body with payloads of one length: what every byte but times and payloads is, and where those lie."""

    count: int
    width: int
    layout: struct.Struct
    expected: tuple[bytes, ...]
    event_times: slice
    transmit_time: slice
    offsets: slice
    payloads: slice

    def fits(self, body: bytes | memoryview) -> bool:
        """One comparison checks all there is to check."""
        layout = self.layout
        return layout.size == len(body) and layout.unpack_from(body) == self.expected


def even_shape(body: bytes | memoryview, count: int) -> EvenShape | None:
    """The shape of an uncompressed body; None if it is of another kind, or wrong."""
    if not FEW_ROWS < count <= _KEPT_ROWS_MAX:
        return None
    # In a plain body the rest is payloads and less than 8 bytes of padding: fewer than there are rows.
    width, padding_bytes = divmod(len(body) - _payloads_at(count) - len(_PLAIN_TAIL), count)
    if width <= 0 or padding_bytes >= 8:
        return None
    shape = _even_shape(count, width)
    return shape if shape.fits(body) else None


def _decode_even(body: bytes | memoryview, count: int) -> Columns | None:
    """Many batches come behind others of the same shape. A third less time than `_decode_plain` (bench/log.py)."""
    shape = even_shape(body, count)
    if shape is None:
        return None
    view = memoryview(body)
    payloads = Binary(view[shape.offsets], view[shape.payloads], EMPTY, shape.width)
    times = view[shape.event_times], view[shape.transmit_time]
    return Columns(count, *times, payloads, _ABSENT, _ABSENT, EMPTY, EMPTY, ())


def _payloads_at(count: int) -> int:
    """Where the payloads begin in a plain body: behind 44 bytes, a time and an offset a row, and padding to 8."""
    return (12 * count + 44 + 7) & -8


@lru_cache(maxsize=_KEPT_SHAPES)
def _even_shape(count: int, width: int) -> EvenShape:
    offsets = even_offsets(count, width)
    offsets_padding = _PADDING[len(offsets) & 7]
    payloads_bytes, payloads_at = width * count, _payloads_at(count)
    payloads_padding = _PADDING[payloads_bytes & 7]
    times_at, transmit_at, offsets_at = 8, 8 * count + 16, 8 * count + 32
    expected = (
        _ARRAY_HEADER + _BUFFER_HEADER.pack(_BIN32, 8 * count + 3),
        bytes(3) + _BUFFER_HEADER.pack(_BIN32, 8 + 3),
        bytes(3)
        + _BUFFER_HEADER.pack(_BIN32, len(offsets) + len(offsets_padding))
        + offsets
        + offsets_padding
        + _BUFFER_HEADER.pack(_BIN32, payloads_bytes + len(payloads_padding)),
        payloads_padding + _PLAIN_TAIL,
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


def _decode_plain(body: bytes | memoryview, count: int) -> Columns | None:
    """Most bodies have times and payloads and nothing else, and then lie at known places.

    None if this is another body, or a wrong one. About twice as quick (bench/log.py, "read").
    """
    layout, expected, offsets_at, payloads_at = _plain_layout(count)
    tail_at = len(body) - len(_PLAIN_TAIL)
    if tail_at < payloads_at or _TAIL.unpack_from(body, tail_at)[0] != _PLAIN_TAIL:
        return None
    headers = layout.unpack_from(body)
    if headers[:-1] != expected or payloads_at + headers[-1] != tail_at:
        return None
    view = memoryview(body)
    offsets = view[offsets_at : offsets_at + 4 * (count + 1)]
    last, width = _check_offsets("payload", offsets, count)
    _check_padded("payload_bytes", headers[-1], last)
    payloads = Binary(offsets, view[payloads_at : payloads_at + last], EMPTY, width)
    times = view[8 : 8 + 8 * count], view[8 * count + 16 : 8 * count + 24]
    return Columns(count, *times, payloads, _ABSENT, _ABSENT, EMPTY, EMPTY, ())


@lru_cache(maxsize=256)
def _plain_layout(count: int) -> tuple[struct.Struct, tuple[object, ...], int, int]:
    """The headers of a plain body: a time a row, one for all, payload offsets, payloads; and what they must be.

    Only the last, the length of the payloads, may be any. Also where the payloads' offsets and bytes begin.
    """
    times, offsets = 8 * count + 3, 4 * (count + 1) + (3 - 4 * (count + 1)) % 8
    layout = struct.Struct(f">3s BI {times}x BI 11x BI {offsets}x BI")
    expected = (_ARRAY_HEADER, _BIN32, times, _BIN32, 11, _BIN32, offsets, _BIN32)
    offsets_at = layout.size - _BUFFER_HEADER.size - offsets
    return layout, expected, offsets_at, layout.size


def _decode_any(body: bytes | memoryview, count: int) -> Columns:
    try:
        layout = _layout_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(_place(error), str(error)) from None
    _check_headers(body, layout)
    payloads = _binary("payload", count, _NO_VALIDITY, layout.payload_offsets, layout.payload_bytes)
    if not payloads:
        raise MalformedError("body payload_offsets", "missing: every message has a payload")
    tag_sets = _tag_sets(memoryview(layout.tag_sets), count)
    return Columns(
        count,
        _times("event_times", layout.event_times, count),
        _times("transmit_times", layout.transmit_times, count),
        payloads,
        _binary("key", count, layout.key_validity, layout.key_offsets, layout.key_bytes),
        _binary(
            "partition_key",
            count,
            layout.partition_key_validity,
            layout.partition_key_offsets,
            layout.partition_key_bytes,
        ),
        _exactly("uids", layout.uids, UID_BYTES * count)
        if len(layout.uids) != _EMPTY_BYTES
        else EMPTY,
        _tag_index(layout.tag_index, count, len(tag_sets)),
        tag_sets,
    )


def _place(error: Exception) -> str:
    """The element that msgspec's text names by its number, as in "… - at `$[3]`"."""
    found = re.search(r"at `\$\[(\d+)\]", str(error))
    return f"body {_Layout.__struct_fields__[int(found[1])]}" if found else "body"


def _check_headers(body: bytes | memoryview, layout: _Layout) -> None:
    """With one of msgpack's shorter headers for short buffers every later buffer would shift."""
    if body[: len(_ARRAY_HEADER)] != _ARRAY_HEADER:
        raise MalformedError("body byte 0", "must begin with msgpack's array 16 header: dc 00 0d")
    *buffers, tag_sets = msgspec.structs.astuple(layout)
    # No header is longer than bin 32's, so the sum is right only if all of them are of that form.
    if _HEADERS_BYTES + sum(map(len, buffers)) + len(memoryview(tag_sets)) == len(body):
        return
    position = len(_ARRAY_HEADER)
    for name, buffer in zip(_Layout.__struct_fields__, buffers, strict=False):
        if body[position] != _BIN32:
            raise MalformedError(
                f"body byte {position}", f"{name} must have msgpack's bin 32 header (c6)"
            )
        position += 5 + len(buffer)


def _exactly(name: str, buffer: memoryview, length: int) -> memoryview:
    """The buffer without its padding."""
    _check_padded(name, len(buffer), length)
    return buffer[:length]


def _check_padded(name: str, buffer_bytes: int, length: int) -> None:
    padded = length + (3 - length) % 8
    if buffer_bytes != padded:
        raise MalformedError(f"body {name}", f"has {buffer_bytes} bytes where {padded} must be")


def _times(name: str, buffer: memoryview, count: int) -> memoryview:
    """A time a row, or one that stands for all."""
    return buffer[:8] if len(buffer) == 11 else _exactly(name, buffer, 8 * count)


def _binary(
    name: str, count: int, validity: memoryview, offsets: memoryview, data: memoryview
) -> Binary:
    if len(offsets) == _EMPTY_BYTES:
        if len(validity) != _EMPTY_BYTES or len(data) != _EMPTY_BYTES:
            raise MalformedError(f"body {name}_offsets", "missing, although there are values")
        return _ABSENT
    offsets = _exactly(f"{name}_offsets", offsets, 4 * (count + 1))
    last, width = _check_offsets(name, offsets, count)
    data = _exactly(f"{name}_bytes", data, last)
    if len(validity) == _EMPTY_BYTES:
        return Binary(offsets, data, EMPTY, width)
    validity = _exactly(f"{name}_validity", validity, validity_bytes(count))
    return Binary(offsets, data, validity, width)


def _check_offsets(name: str, offsets: memoryview, count: int) -> tuple[int, int]:
    """The last offset, which is the length of the data; and `Binary.width`."""
    if FEW_ROWS < count <= _KEPT_ROWS_MAX:
        # Rows of one length are common. To compare their offsets with known ones is quickest (bench/log.py, "read").
        _, width = _ROW.unpack_from(offsets)
        _, last = _ROW.unpack_from(offsets, 4 * (count - 1))
        if last == width * count > 0 and bytes(offsets) == even_offsets(count, width):
            return last, width
    if count <= FEW_ROWS:
        values = offsets.cast("i").tolist()
        first, last, is_rising = values[0], values[-1], values == sorted(values)
    else:
        vector = np.frombuffer(offsets, np.int32)
        first, last = vector.item(0), vector.item(-1)
        is_rising = not np.count_nonzero(vector[1:] < vector[:-1])
    if first != 0:
        raise MalformedError(f"body {name}_offsets", f"must begin with 0, not {first}")
    if not is_rising:
        raise MalformedError(f"body {name}_offsets", "go backwards")
    return last, 0


@lru_cache(maxsize=_KEPT_SHAPES)
def even_offsets(count: int, width: int) -> bytes:
    """The offsets of rows of one length."""
    return np.arange(0, (count + 1) * width, width, dtype=np.int32).tobytes()


def _tag_index(buffer: memoryview, count: int, set_count: int) -> memoryview:
    if len(buffer) == _EMPTY_BYTES:
        if set_count:
            raise MalformedError("body tag_index", f"missing, although there are {set_count} sets")
        return EMPTY
    stands_for_all = len(buffer) == 11 and count != 2
    index = buffer[:4] if stands_for_all else _exactly("tag_index", buffer, 4 * count)
    # Unsigned, so that one test finds numbers that are too high and those that are negative.
    highest = int(np.frombuffer(index, np.uint32).max())
    if highest >= set_count:
        raise MalformedError("body tag_index", f"points outside the {set_count} tag sets")
    if stands_for_all and highest:
        raise MalformedError("body tag_index", f"one number for all rows must be 0, not {highest}")
    return index


def _tag_sets(encoded: memoryview, count: int) -> tuple[Mapping[str, str], ...]:
    if len(encoded) == 1 and encoded[0] == _NO_TAG_SETS[0]:
        return ()
    set_count = _array_length(encoded)
    if set_count > count:
        raise MalformedError("body tag_sets", f"{set_count} sets for {count} messages")
    try:
        sets = _tag_sets_decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError("body tag_sets", str(error)) from None
    # Some writers use longer headers than they must, which is fine; a name that comes twice is not.
    if len(_encoder.encode(sets)) != len(encoded) and _has_repeated_name(encoded):
        raise MalformedError("body tag_sets", "a set has two tags of one name")
    return tuple(map(MappingProxyType, sets))


def _array_length(encoded: memoryview) -> int:
    """What the header of a msgpack array says; 0 if it is none. Known before the array is read."""
    first = encoded[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC:
        return int.from_bytes(encoded[1:3], "big")
    if first == 0xDD:
        return int.from_bytes(encoded[1:5], "big")
    return 0


class _Name(str):
    """A tag's name that is equal to no other, so that a dict keeps repeated ones."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


_pairs_decoder = msgspec.msgpack.Decoder(
    list[dict[_Name, str]], dec_hook=lambda _, text: _Name(text)
)


def _has_repeated_name(encoded: memoryview) -> bool:
    return any(len(set(map(str, tags))) != len(tags) for tags in _pairs_decoder.decode(encoded))


# --- Encoding ---


def encode(columns: Columns) -> bytes:
    """The body's bytes, uncompressed."""
    parts: list[bytes | memoryview] = [_ARRAY_HEADER]
    payloads, keys, partition_keys = columns.payloads, columns.keys, columns.partition_keys
    for buffer in (
        columns.event_times,
        columns.transmit_times,
        payloads.offsets,
        payloads.data,
        keys.validity,
        keys.offsets,
        keys.data,
        partition_keys.validity,
        partition_keys.offsets,
        partition_keys.data,
        columns.uids,
        columns.tag_index,
    ):
        if buffer:
            padding = _PADDING[len(buffer) & 7]
            parts.append(_BUFFER_HEADER.pack(_BIN32, len(buffer) + len(padding)))
            parts.append(buffer)
            parts.append(padding)
        else:
            parts.append(_EMPTY_BUFFER)
    parts.append(_encode_tag_sets(columns.tag_sets) if columns.tag_sets else _NO_TAG_SETS)
    return b"".join(parts)


def encode_plain(
    payloads: Sequence[bytes], event_times_ns: Sequence[int], transmit_time_ns: int
) -> bytes:
    """The same without columns, for up to `FEW_ROWS` messages with nothing but payloads and a 64-bit time each."""
    if len(payloads) == 1:
        return _encode_plain_row(payloads[0], event_times_ns[0], transmit_time_ns)
    layout, before_event_times, before_transmit_time, before_offsets = _plain_front(len(payloads))
    data = b"".join(payloads)
    padding = _PADDING[len(data) & 7]
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
            _BUFFER_HEADER.pack(_BIN32, len(data) + len(padding)),
            data,
            padding,
            _PLAIN_TAIL,
        )
    )


def _encode_plain_row(payload: bytes, event_time_ns: int, transmit_time_ns: int) -> bytes:
    """Of one message all buffers before the payload have one length (bench/latency.py)."""
    payload_bytes = len(payload)
    padding = _PADDING[payload_bytes & 7]
    head, between, _, _, end = _PLAIN_ROW_EXPECTED
    front = _PLAIN_ROW_FRONT.pack(
        head, event_time_ns, between, transmit_time_ns, between, 0, payload_bytes, end
    )
    length = _LENGTH.pack(payload_bytes + len(padding))
    return b"".join((front, length, payload, padding, _PLAIN_TAIL))


@lru_cache(maxsize=FEW_ROWS)
def _plain_front(count: int) -> tuple[struct.Struct, bytes, bytes, bytes]:
    """A plain body up to the payloads' header: times and offsets, and what stands before each of them."""
    offsets_bytes = 4 * (count + 1)
    offsets_padding = _PADDING[offsets_bytes & 7]
    return (
        struct.Struct(f"<8s {count}q 8s q 8s {count + 1}i {len(offsets_padding)}x"),
        _ARRAY_HEADER + _BUFFER_HEADER.pack(_BIN32, 8 * count + 3),
        bytes(3) + _BUFFER_HEADER.pack(_BIN32, 8 + 3),
        bytes(3) + _BUFFER_HEADER.pack(_BIN32, offsets_bytes + len(offsets_padding)),
    )


def _encode_tag_sets(tag_sets: tuple[Mapping[str, str], ...]) -> bytes:
    try:
        return _encoder.encode([dict(tags) for tags in tag_sets])
    except UnicodeEncodeError as error:
        raise MalformedError("tags", f"not valid UTF-8: {error}") from None
