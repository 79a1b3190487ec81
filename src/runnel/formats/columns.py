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
    10  uids                 20 bytes per row, zeros for a row without; empty: no row has one
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
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
import numpy as np

from runnel.errors import MalformedError
from runnel.formats.body_layout import (
    ARRAY_HEADER,
    BIN32,
    BUFFER_HEADER,
    EMPTY_BUFFER,
    EMPTY_BYTES,
    NO_TAG_SETS,
    PADDING,
    PLAIN_TAIL,
    TAIL,
)
from runnel.formats.column_builder import build
from runnel.formats.plain_bodies import (
    KEPT_ROWS_MAX,
    PLAIN_ROW_PAYLOAD_AT,
    even_offsets,
    even_shape,
    plain_row,
)
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

_BUFFERS: Final = 12
_HEADERS_BYTES: Final = len(ARRAY_HEADER) + 5 * _BUFFERS
_NO_VALIDITY: Final = memoryview(bytes(EMPTY_BYTES))
_ABSENT: Final = Binary()
_ROW: Final = struct.Struct("<ii")  # where a row begins and ends


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The elements of the msgpack array, in their order."""

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
    """The first row's event time, which always lies at the same place of an uncompressed body. 0: not set."""
    return int.from_bytes(body[8:16], "little", signed=True)


def decode(body: bytes | memoryview, count: int) -> Columns:
    """Read an uncompressed body of `count` rows. MalformedError names the column that is wrong."""
    if count == 1:
        return _decode_one(body) or _decode_any(body, count)
    return _decode_even(body, count) or _decode_plain(body, count) or _decode_any(body, count)


def _decode_one(body: bytes | memoryview) -> Columns | None:
    """Decode a single plain message, recognised by a few comparisons (bench/latency.py); None: another body."""
    row = plain_row(body)
    if row is None:
        return None
    view = memoryview(body)
    payload = view[PLAIN_ROW_PAYLOAD_AT : row[2]]
    payloads = Binary(view[40:48], payload, EMPTY, len(payload))
    return Columns(1, view[8:16], view[24:32], payloads, _ABSENT, _ABSENT, EMPTY, EMPTY, ())


def _decode_even(body: bytes | memoryview, count: int) -> Columns | None:
    """Decode a plain body with payloads of one length; None: another body.

    Many batches follow others of the same shape. A third less time than `_decode_plain` (bench/log.py).
    """
    shape = even_shape(body, count)
    if shape is None:
        return None
    view = memoryview(body)
    payloads = Binary(view[shape.offsets], view[shape.payloads], EMPTY, shape.width)
    times = view[shape.event_times], view[shape.transmit_time]
    return Columns(count, *times, payloads, _ABSENT, _ABSENT, EMPTY, EMPTY, ())


def _decode_plain(body: bytes | memoryview, count: int) -> Columns | None:
    """Decode a plain body: times and payloads at known places and nothing else, as most bodies are.

    None if this is another body, or a wrong one. About twice as quick as `_decode_any` (bench/log.py, "read").
    """
    layout, expected, offsets_at, payloads_at = _plain_layout(count)
    tail_at = len(body) - len(PLAIN_TAIL)
    if tail_at < payloads_at or TAIL.unpack_from(body, tail_at)[0] != PLAIN_TAIL:
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
    """The headers of a plain body, their expected values, and where the payloads' offsets and bytes begin.

    The headers are of a time per row, one time for all, payload offsets, payloads. Only the last, the length of the
    payloads, may have any value.
    """
    times, offsets = 8 * count + 3, 4 * (count + 1) + (3 - 4 * (count + 1)) % 8
    layout = struct.Struct(f">3s BI {times}x BI 11x BI {offsets}x BI")
    expected = (ARRAY_HEADER, BIN32, times, BIN32, 11, BIN32, offsets, BIN32)
    offsets_at = layout.size - BUFFER_HEADER.size - offsets
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
        if len(layout.uids) != EMPTY_BYTES
        else EMPTY,
        _tag_index(layout.tag_index, count, len(tag_sets)),
        tag_sets,
    )


def _place(error: Exception) -> str:
    """The element that msgspec's text names by its number, as in "… - at `$[3]`"."""
    found = re.search(r"at `\$\[(\d+)\]", str(error))
    return f"body {_Layout.__struct_fields__[int(found[1])]}" if found else "body"


def _check_headers(body: bytes | memoryview, layout: _Layout) -> None:
    """Refuse msgpack's shorter headers for short buffers: they would shift every later buffer."""
    if body[: len(ARRAY_HEADER)] != ARRAY_HEADER:
        raise MalformedError("body byte 0", "must begin with msgpack's array 16 header: dc 00 0d")
    *buffers, tag_sets = msgspec.structs.astuple(layout)
    # No header is longer than bin 32's, so the sum is right only if all of them are of that form.
    if _HEADERS_BYTES + sum(map(len, buffers)) + len(memoryview(tag_sets)) == len(body):
        return
    position = len(ARRAY_HEADER)
    for name, buffer in zip(_Layout.__struct_fields__, buffers, strict=False):
        if body[position] != BIN32:
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
    """A time per row, or one that stands for all."""
    return buffer[:8] if len(buffer) == 11 else _exactly(name, buffer, 8 * count)


def _binary(
    name: str, count: int, validity: memoryview, offsets: memoryview, data: memoryview
) -> Binary:
    if len(offsets) == EMPTY_BYTES:
        if len(validity) != EMPTY_BYTES or len(data) != EMPTY_BYTES:
            raise MalformedError(f"body {name}_offsets", "missing, although there are values")
        return _ABSENT
    offsets = _exactly(f"{name}_offsets", offsets, 4 * (count + 1))
    last, width = _check_offsets(name, offsets, count)
    data = _exactly(f"{name}_bytes", data, last)
    if len(validity) == EMPTY_BYTES:
        return Binary(offsets, data, EMPTY, width)
    validity = _exactly(f"{name}_validity", validity, validity_bytes(count))
    return Binary(offsets, data, validity, width)


def _check_offsets(name: str, offsets: memoryview, count: int) -> tuple[int, int]:
    """The last offset, which is the length of the data; and `Binary.width`."""
    if FEW_ROWS < count <= KEPT_ROWS_MAX:
        # Rows of one length are common. Comparing their offsets with known ones is quickest (bench/log.py, "read").
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


def _tag_index(buffer: memoryview, count: int, set_count: int) -> memoryview:
    if len(buffer) == EMPTY_BYTES:
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
    if len(encoded) == 1 and encoded[0] == NO_TAG_SETS[0]:
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
    """The length in the header of a msgpack array, before the array is read; 0 if it is not an array."""
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
    parts: list[bytes | memoryview] = [ARRAY_HEADER]
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
            padding = PADDING[len(buffer) & 7]
            parts.append(BUFFER_HEADER.pack(BIN32, len(buffer) + len(padding)))
            parts.append(buffer)
            parts.append(padding)
        else:
            parts.append(EMPTY_BUFFER)
    parts.append(_encode_tag_sets(columns.tag_sets) if columns.tag_sets else NO_TAG_SETS)
    return b"".join(parts)


def _encode_tag_sets(tag_sets: tuple[Mapping[str, str], ...]) -> bytes:
    try:
        return _encoder.encode([dict(tags) for tags in tag_sets])
    except UnicodeEncodeError as error:
        raise MalformedError("tags", f"not valid UTF-8: {error}") from None
