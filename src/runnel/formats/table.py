"""The columns of a batch in memory: views into a body, or buffers to make one of.

`columns` draws, reads and writes their bytes; `column_builder` makes them from values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from typing import Final

import msgspec
import numpy as np

from runnel.formats.message import NO_TAGS

UID_BYTES: Final = 20
NO_UID: Final = bytes(UID_BYTES)
TAGS_MAX: Final = 64
EMPTY: Final = memoryview(b"")
_PAIR: Final = struct.Struct("<ii")
_TIME: Final = struct.Struct("<q")
# Endless: a loop over it and other columns stops with those.
_NONE: Final[Iterable[None]] = repeat(None)
# Below this many rows plain lists and arrays are quicker than a trip into numpy (bench/log.py).
FEW_ROWS: Final = 64


class Binary(msgspec.Struct, frozen=True, gc=False):
    """A column of byte strings: Arrow's offsets, data and validity. Without offsets: all absent.

    `width` is the length of every row if it is known that they are of one length, else 0.
    """

    offsets: memoryview = EMPTY
    data: memoryview = EMPTY
    validity: memoryview = EMPTY
    width: int = 0

    def __bool__(self) -> bool:
        return len(self.offsets) > 0

    def to_list(self) -> list[bytes]:
        """The rows as bytes; absent rows may be empty or any bytes."""
        count = len(self.offsets) // 4 - 1
        data = bytes(self.data)
        if count > FEW_ROWS:
            # Rows of one length are common, and numpy cuts them 4 times quicker than slices do.
            vector = np.frombuffer(self.offsets, np.int32)
            width = self.width or int(vector[1])
            if width and width * count == len(data) and (self.width or _is_even(vector, width)):
                rows: list[bytes] = np.frombuffer(data, f"V{width}").tolist()
                return rows
        ends = self.offsets.cast("i").tolist()
        return [data[begin:end] for begin, end in pairwise(ends)]

    def at(self, row: int) -> bytes | None:
        """One row as bytes; None if it is absent."""
        if not self.offsets:
            return None
        if self.validity and not self.validity[row >> 3] >> (row & 7) & 1:
            return None
        begin, end = _PAIR.unpack_from(self.offsets, 4 * row)
        return bytes(self.data[begin:end])

    def each(self, count: int) -> Iterable[bytes | None]:
        """The rows as bytes, absent ones as None; without a list where all are absent."""
        return self.to_optional_list(count) if self.offsets else _NONE

    def to_optional_list(self, count: int) -> Sequence[bytes | None]:
        """The rows as bytes, absent ones as None."""
        if not self.offsets:
            return [None] * count
        rows = self.to_list()
        if not self.validity:
            return rows
        valid = unpack_bits(self.validity, count).tolist()
        return [row if is_valid else None for row, is_valid in zip(rows, valid, strict=True)]


class Columns(msgspec.Struct, frozen=True, gc=False):
    """The messages of a batch, one column per field. An empty column means that no row has the field.

    Time columns and `tag_index` hold one value per row, or a single one that stands for all rows.
    """

    count: int
    event_times: memoryview
    transmit_times: memoryview
    payloads: Binary
    keys: Binary
    partition_keys: Binary
    uids: memoryview
    tag_index: memoryview
    tag_sets: tuple[Mapping[str, str], ...]

    @property
    def is_plain(self) -> bool:
        """Whether no row has anything but times and a payload."""
        return not (self.keys.offsets or self.partition_keys.offsets or self.uids or self.tag_index)

    def times(self, column: memoryview) -> list[int]:
        """A time column as a list of one value per row."""
        values: list[int] = column.cast("q").tolist()
        return values if len(values) == self.count else values * self.count

    def each_time(self, column: memoryview) -> Iterable[int]:
        """The same without a list where one value stands for all."""
        if len(column) == 8:
            return repeat(_TIME.unpack(column)[0], self.count)
        values: list[int] = column.cast("q").tolist()
        return values

    def time_at(self, column: memoryview, row: int) -> int:
        time_ns: int = _TIME.unpack_from(column, 0 if len(column) == 8 else 8 * row)[0]
        return time_ns

    def tags_at(self, row: int) -> Mapping[str, str]:
        if not self.tag_index:
            return NO_TAGS
        place = 0 if len(self.tag_index) == 4 else 4 * row
        return self.tag_sets[int.from_bytes(self.tag_index[place : place + 4], "little")]

    def uid_at(self, row: int) -> bytes | None:
        uid = bytes(self.uids[UID_BYTES * row : UID_BYTES * (row + 1)])
        return None if not uid or uid == NO_UID else uid

    def tags_list(self) -> Iterable[Mapping[str, str]]:
        """The tags of each row; rows with equal tags share one mapping."""
        if not self.tag_index:
            return repeat(NO_TAGS, self.count)
        index = self.tag_index.cast("i").tolist()
        if len(index) == 1:
            return repeat(self.tag_sets[index[0]], self.count)
        return map(self.tag_sets.__getitem__, index)

    def uid_list(self) -> Iterable[bytes | None]:
        """The uid of each row, None where it has none."""
        if not self.uids:
            return repeat(None, self.count)
        rows: list[bytes] = np.frombuffer(self.uids, f"V{UID_BYTES}").tolist()
        return [None if row == NO_UID else row for row in rows]


def _is_even(offsets: np.ndarray[tuple[int], np.dtype[np.int32]], width: int) -> bool:
    steps = offsets[1:] - offsets[:-1]
    return int(np.count_nonzero(steps == width)) == len(steps)


def validity_bytes(count: int) -> int:
    """The size of a validity buffer: a bit per row, in whole 64-bit words."""
    return (count + 63) // 64 * 8


def unpack_bits(validity: memoryview, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A validity buffer as a 0 or 1 for each row."""
    return np.unpackbits(np.frombuffer(validity, np.uint8), count=count, bitorder="little")


def pack_bits(valid: Sequence[bool] | np.ndarray[tuple[int], np.dtype[np.uint8]]) -> memoryview:
    """A validity buffer with a bit for each row; empty if all of them are set."""
    words = np.zeros(8 * validity_bytes(len(valid)), np.bool_)
    words[: len(valid)] = valid
    if np.count_nonzero(words) == len(valid):
        return EMPTY
    return np.packbits(words, bitorder="little").data
