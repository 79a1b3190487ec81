"""The index of a segment: finds runs by topic-partition and offset, by entry, and by time.

While a segment is written to, its index is in memory only (`GrowingIndex`): it needs no writes or syncs, and after a
crash it is rebuilt from the segment. When the segment is sealed, the index is sorted by topic-partition, written beside
the segment once (`encode`), and read back whole (`SealedIndex`):

    0    4   magic           "RNI" 0x01
    4    4   sections_crc    CRC-32C of everything behind the header
    8    8   generation      of the segment
    16   8   covered_bytes   of the segment; an index of a file that has grown since is a valid beginning
    24   8   first_entry     }
    32   8   last_entry      } of the blocks, 0 without any
    40   8   first_time_ns   } (receive times)
    48   8   last_time_ns    }
    56   4   blocks B        72  4  names_bytes
    60   4   keys K          76  4  zero
    64   8   runs R          80  4  crc of bytes 0 to 79, then 4 zero bytes
    88   blocks  entry i64[B], position i64[B], receive_time i64[B]
         keys    name_ends u32[K], partition i32[K], run_ends u32[K], next_offset i64[K], padded to 8 after each
         runs    base_offset i64[R], block u32[R], count u32[R], run u32[R], padded to 8 after each
         names   UTF-8, one behind another

Keys (topic-partitions) are sorted by name and partition, the runs of a key by offset. All little-endian. An index
that is missing, torn, of another generation, or covers more than the segment has, is rebuilt from the segment.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from runnel.errors import MalformedError
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import Envelope
from runnel.topics.names import TopicPartition

HEADER_BYTES: Final = 88

_MAGIC: Final = b"RNI\x01"
_HEADER: Final = struct.Struct("<4sIQQQQqqIIQII")
_NO_RUNS: Final = array("I")
_CRC: Final = struct.Struct("<I4x")


class StaleIndexError(Exception):
    """An index led to a block that it does not describe. It has to be rebuilt from the segment."""


class RunPlace(msgspec.Struct, frozen=True, gc=False):
    """One run: its offsets, and the block that holds it."""

    base_offset: int
    count: int
    block: int  # number of the block in the segment, from 0
    run: int  # number of the run in the block, from 0


class RunTable(msgspec.Struct, frozen=True):
    """The runs of some keys as columns, key after key: `ends` says where each key's runs end."""

    keys: Sequence[TopicPartition]
    ends: NDArray[np.int64]
    base_offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    blocks: NDArray[np.int64]
    runs: NDArray[np.int64]


class Index(Protocol):
    """The index of a segment as its readers use it, growing or sealed."""

    covered_bytes: int

    def block_count(self) -> int: ...
    def block_place(self, block: int) -> tuple[int, int, int]:
        """Entry, position in the file, receive time."""

    def block_positions(self, begin: int, end: int) -> list[int]:
        """The positions of these blocks, then the highest position where the last one may end."""

    def first_block_from_entry(self, entry: int) -> int:
        """The first block whose entry is not below this one; `block_count` if there is none."""

    def first_block_from_time(self, time_ns: int) -> int: ...
    def first_block_from_position(self, position: int) -> int: ...
    def next_offset(self, key: TopicPartition) -> int:
        """The offset behind the key's last message in this segment; 0 if it has none."""

    def first_offset(self, key: TopicPartition) -> int: ...
    def runs_from(self, key: TopicPartition, offset: int) -> Iterator[RunPlace]:
        """The key's runs that end behind this offset, in order."""

    def first_run_from_block(self, key: TopicPartition, block: int) -> RunPlace | None:
        """The key's first run that is in this block or a later one."""

    def keys(self) -> Iterator[TopicPartition]: ...
    def run_table(self, is_wanted: Callable[[TopicPartition], bool]) -> RunTable:
        """All runs of the wanted keys as columns, for reading many at once."""


class GrowingIndex:
    """The index of a segment that is being written to, or has just been scanned."""

    def __init__(self, covered_bytes: int) -> None:
        self.covered_bytes = covered_bytes
        self._entries = array("q")
        self._positions = array("q")
        self._times = array("q")
        self._bases = array("q")
        self._counts = array("i")
        self._blocks = array("I")
        self._runs = array("I")
        # The numbers of each key's runs: 4 bytes per run, and no search however many keys there are.
        self._by_key: dict[TopicPartition, array[int]] = {}

    def add(
        self, envelope: Envelope, keys: Sequence[TopicPartition], position: int, size: int
    ) -> None:
        """Add a block at a position of the file. `keys` has the key of each of its runs."""
        block = len(self._entries)
        first = len(self._bases)
        count = len(keys)
        self._entries.append(envelope.entry)
        self._positions.append(position)
        self._times.append(
            int.from_bytes(memoryview(envelope.receive_times)[:8], "little", signed=True)
        )
        _extend(self._bases, envelope.base_offsets, count)
        _extend(self._counts, envelope.counts, count)
        self._blocks.extend([block] * count)
        self._runs.extend(range(count))
        by_key = self._by_key
        for number, key in enumerate(keys, first):
            runs = by_key.get(key)
            if runs is None:
                by_key[key] = array("I", (number,))
            else:
                runs.append(number)
        self.covered_bytes = position + size

    @classmethod
    def resume(cls, sealed: SealedIndex) -> GrowingIndex:
        """Continue an index file whose segment is to be written to again."""
        index = cls(sealed.covered_bytes)
        blocks = (index._entries, index._positions, index._times)
        columns = (*blocks, index._bases, index._counts, index._blocks, index._runs)
        for column, values in zip(columns, sealed.columns(), strict=True):
            column.frombytes(values.tobytes())
        index._by_key = {key: array("I", runs) for key, runs in sealed.key_ranges()}
        return index

    def run_count(self) -> int:
        return len(self._bases)

    def block_count(self) -> int:
        return len(self._entries)

    def block_place(self, block: int) -> tuple[int, int, int]:
        return self._entries[block], self._positions[block], self._times[block]

    def block_positions(self, begin: int, end: int) -> list[int]:
        positions = self._positions[begin : end + 1].tolist()
        return positions if len(positions) > end - begin else [*positions, self.covered_bytes]

    def first_block_from_entry(self, entry: int) -> int:
        return bisect_left(self._entries, entry)

    def first_block_from_time(self, time_ns: int) -> int:
        return bisect_left(self._times, time_ns)

    def first_block_from_position(self, position: int) -> int:
        return bisect_left(self._positions, position)

    def next_offset(self, key: TopicPartition) -> int:
        runs = self._by_key.get(key)
        return self._bases[runs[-1]] + self._counts[runs[-1]] if runs else 0

    def first_offset(self, key: TopicPartition) -> int:
        runs = self._by_key.get(key)
        return self._bases[runs[0]] if runs else 0

    def runs_from(self, key: TopicPartition, offset: int) -> Iterator[RunPlace]:
        runs = self._by_key.get(key)
        if runs is None:
            return
        first = max(bisect_right(runs, offset, key=self._bases.__getitem__) - 1, 0)
        for at in range(first, len(runs)):  # no slice: a busy key has a million runs
            place = self._place(runs[at])
            if place.base_offset + place.count > offset:
                yield place

    def _place(self, number: int) -> RunPlace:
        return RunPlace(
            self._bases[number], self._counts[number], self._blocks[number], self._runs[number]
        )

    def first_run_from_block(self, key: TopicPartition, block: int) -> RunPlace | None:
        runs = self._by_key.get(key, _NO_RUNS)
        at = bisect_left(runs, block, key=self._blocks.__getitem__)
        return self._place(runs[at]) if at < len(runs) else None

    def keys(self) -> Iterator[TopicPartition]:
        return iter(self._by_key)

    def last_entry(self) -> int:
        """The entry of the last block; 0 without blocks."""
        return self._entries[-1] if self._entries else 0

    def last_position(self, key: TopicPartition) -> int:
        """The position of the block with the key's last message; 0 if there is none."""
        runs = self._by_key.get(key)
        return self._positions[self._blocks[runs[-1]]] if runs else 0

    def next_offsets(self) -> dict[TopicPartition, int]:
        """The offset behind the last message of every key in this segment."""
        return {
            key: self._bases[runs[-1]] + self._counts[runs[-1]]
            for key, runs in self._by_key.items()
        }

    def run_table(self, is_wanted: Callable[[TopicPartition], bool]) -> RunTable:
        wanted = [(key, runs) for key, runs in self._by_key.items() if is_wanted(key)]
        order = np.concatenate(
            [np.zeros(0, np.uint32), *(np.frombuffer(runs, np.uint32) for _, runs in wanted)]
        )
        return RunTable(
            [key for key, _ in wanted],
            np.cumsum([len(runs) for _, runs in wanted], dtype=np.int64),
            # Copies: these arrays could not grow while a view exists.
            np.frombuffer(self._bases, np.int64)[order],
            np.frombuffer(self._counts, np.uint32)[order].astype(np.int64),
            np.frombuffer(self._blocks, np.uint32)[order].astype(np.int64),
            np.frombuffer(self._runs, np.uint32)[order].astype(np.int64),
        )

    def encode(self, generation: int) -> bytes:
        """The file's bytes. Not for the event loop: sorting a million runs takes a while."""
        keys = sorted(self._by_key)
        order = np.concatenate(
            [np.frombuffer(self._by_key[key], np.uint32) for key in keys]
            or [np.zeros(0, np.uint32)]
        )
        names = [key[0].encode() for key in keys]
        sections = b"".join(
            [
                *(bytes(column) for column in (self._entries, self._positions, self._times)),
                _padded(np.cumsum([len(name) for name in names], dtype=np.uint32)),
                _padded(np.array([key[1] for key in keys], np.int32)),
                _padded(np.cumsum([len(self._by_key[key]) for key in keys], dtype=np.uint32)),
                np.array([self.next_offset(key) for key in keys], np.int64).tobytes(),
                np.frombuffer(self._bases, np.int64)[order].tobytes(),
                _padded(np.frombuffer(self._blocks, np.uint32)[order]),
                _padded(np.frombuffer(self._counts, np.uint32)[order]),
                _padded(np.frombuffer(self._runs, np.uint32)[order]),
                b"".join(names),
            ]
        )
        last = len(self._entries) - 1
        checked = _HEADER.pack(
            _MAGIC,
            crc32c(sections),
            generation,
            self.covered_bytes,
            *((self._entries[0], self._entries[last]) if last >= 0 else (0, 0)),
            *((self._times[0], self._times[last]) if last >= 0 else (0, 0)),
            last + 1,
            len(keys),
            len(order),
            sum(map(len, names)),
            0,
        )
        return checked + _CRC.pack(crc32c(checked)) + sections


def runs_of_blocks(
    index: Index, blocks: Iterable[int]
) -> dict[int, list[tuple[TopicPartition, int, int]]]:
    """The runs of some blocks of a segment, by block: key, base offset and count of each."""
    wanted = list(blocks)
    found: dict[int, list[tuple[TopicPartition, int, int]]] = {number: [] for number in wanted}
    table = index.run_table(lambda _: True)
    places = np.flatnonzero(np.isin(table.blocks, wanted))
    keys = np.searchsorted(table.ends, places, "right")
    for at, key in zip(places.tolist(), keys.tolist(), strict=True):
        run = (table.keys[key], int(table.base_offsets[at]), int(table.counts[at]))
        found[int(table.blocks[at])].append(run)
    return found


def _extend(column: array[int], values: memoryview | bytes, count: int) -> None:
    """Append an envelope's column, in which a single value stands for all runs."""
    if len(values) == column.itemsize and count > 1:
        values = bytes(values) * count
    column.frombytes(values)


def _padded(values: NDArray[np.generic]) -> bytes:
    data = values.tobytes()
    return data + bytes(-len(data) % 8)


class IndexHeader(msgspec.Struct, frozen=True):
    """The header of an index file: describes a segment without reading the segment."""

    sections_crc: int
    generation: int
    covered_bytes: int
    first_entry: int
    last_entry: int
    first_time_ns: int
    last_time_ns: int
    blocks: int
    keys: int
    runs: int
    names_bytes: int

    @property
    def file_bytes(self) -> int:
        keys = 3 * _round_up(4 * self.keys) + 8 * self.keys
        runs = 8 * self.runs + 3 * _round_up(4 * self.runs)
        return HEADER_BYTES + 24 * self.blocks + keys + runs + self.names_bytes


def _round_up(length: int) -> int:
    return length + -length % 8


def decode_header(data: bytes | memoryview) -> IndexHeader:
    if len(data) < HEADER_BYTES:
        raise MalformedError("index header", f"{len(data)} bytes of {HEADER_BYTES}")
    magic, *fields, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC or crc32c(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]:
        raise MalformedError("index header", "does not match its checksum")
    return IndexHeader(*fields)


class SealedIndex:
    """An index file in memory: its bytes and views into them, without objects per run or key."""

    def __init__(self, data: bytes) -> None:
        self.header = header = decode_header(data)
        if len(data) != header.file_bytes:
            raise MalformedError("index", f"{len(data)} bytes where {header.file_bytes} must be")
        if crc32c(memoryview(data)[HEADER_BYTES:]) != header.sections_crc:
            raise MalformedError("index", "does not match its checksum")
        self.size = len(data)
        self.covered_bytes = header.covered_bytes
        position = HEADER_BYTES

        def column(kind: type[np.generic], count: int) -> NDArray[np.int64]:
            nonlocal position
            values = np.frombuffer(data, kind, count, position)
            position += _round_up(values.nbytes)
            return values

        self._entries = column(np.int64, header.blocks)
        self._positions = column(np.int64, header.blocks)
        self._times = column(np.int64, header.blocks)
        self._name_ends = column(np.uint32, header.keys)
        self._partitions = column(np.int32, header.keys)
        self._run_ends = column(np.uint32, header.keys)
        self._next_offsets = column(np.int64, header.keys)
        self._bases = column(np.int64, header.runs)
        self._blocks = column(np.uint32, header.runs)
        self._counts = column(np.uint32, header.runs)
        self._runs = column(np.uint32, header.runs)
        self._names = memoryview(data)[position:]

    def block_count(self) -> int:
        return self.header.blocks

    def block_place(self, block: int) -> tuple[int, int, int]:
        return int(self._entries[block]), int(self._positions[block]), int(self._times[block])

    def block_positions(self, begin: int, end: int) -> list[int]:
        positions: list[int] = self._positions[begin : end + 1].tolist()
        return positions if len(positions) > end - begin else [*positions, self.covered_bytes]

    def first_block_from_entry(self, entry: int) -> int:
        return int(np.searchsorted(self._entries, entry))

    def first_block_from_time(self, time_ns: int) -> int:
        return int(np.searchsorted(self._times, time_ns))

    def first_block_from_position(self, position: int) -> int:
        return int(np.searchsorted(self._positions, position))

    def next_offset(self, key: TopicPartition) -> int:
        number = self._find(key)
        return 0 if number is None else int(self._next_offsets[number])

    def first_offset(self, key: TopicPartition) -> int:
        number = self._find(key)
        return 0 if number is None else int(self._bases[self._run_range(number)[0]])

    def runs_from(self, key: TopicPartition, offset: int) -> Iterator[RunPlace]:
        number = self._find(key)
        if number is None or self._next_offsets[number] <= offset:
            return
        begin, end = self._run_range(number)
        first = begin + int(np.searchsorted(self._bases[begin:end], offset, "right")) - 1
        for at in range(max(first, begin), end):
            place = self._place(at)
            if place.base_offset + place.count > offset:
                yield place

    def first_run_from_block(self, key: TopicPartition, block: int) -> RunPlace | None:
        number = self._find(key)
        if number is None:
            return None
        begin, end = self._run_range(number)
        at = begin + int(np.searchsorted(self._blocks[begin:end], block))
        return self._place(at) if at < end else None

    def keys(self) -> Iterator[TopicPartition]:
        return map(self._key, range(self.header.keys))

    def run_table(self, is_wanted: Callable[[TopicPartition], bool]) -> RunTable:
        found = [(key, number) for number, key in enumerate(self.keys()) if is_wanted(key)]
        ranges = [self._run_range(number) for _, number in found]
        if len(found) == self.header.keys:
            order: slice | NDArray[np.int64] = slice(None)
        else:
            order = np.concatenate(
                [np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end in ranges)]
            )
        return RunTable(
            [key for key, _ in found],
            np.cumsum([end - begin for begin, end in ranges], dtype=np.int64),
            self._bases[order],
            self._counts[order].astype(np.int64),
            self._blocks[order].astype(np.int64),
            self._runs[order].astype(np.int64),
        )

    def columns(self) -> tuple[NDArray[np.generic], ...]:
        """The blocks' entries, positions and times; the runs' base offsets, counts, blocks and numbers."""
        blocks = (self._entries, self._positions, self._times)
        return (*blocks, self._bases, self._counts, self._blocks, self._runs)

    def key_ranges(self) -> Iterator[tuple[TopicPartition, range]]:
        """Each key, and the range of its runs in the columns."""
        for number in range(self.header.keys):
            yield self._key(number), range(*self._run_range(number))

    def _place(self, at: int) -> RunPlace:
        return RunPlace(
            int(self._bases[at]), int(self._counts[at]), int(self._blocks[at]), int(self._runs[at])
        )

    def _find(self, key: TopicPartition) -> int | None:
        count = self.header.keys
        number = bisect_left(range(count), key, key=self._key)
        return number if number < count and self._key(number) == key else None

    def _key(self, number: int) -> TopicPartition:
        begin = int(self._name_ends[number - 1]) if number else 0
        name = str(self._names[begin : int(self._name_ends[number])], "utf-8")
        return name, int(self._partitions[number])

    def _run_range(self, number: int) -> tuple[int, int]:
        return (int(self._run_ends[number - 1]) if number else 0, int(self._run_ends[number]))
