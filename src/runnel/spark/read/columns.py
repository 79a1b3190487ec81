"""Makes Spark's columns from stored batches: each column separately, and only if the query needs it.

Most batches hold one topic-partition. Their columns are joined directly, in half the time that a table of all columns
takes (bench/spark.py, "read"). Rarer cases use that table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from runnel.formats.batch import Batch
from runnel.formats.table import Binary
from runnel.spark.read.tag_columns import TagRows

_NS_PER_US: Final = 1000
# Columns of one value are made once with this length, and sliced.
_KEPT_ROWS: Final = 20_000
# If batches have fewer payload bytes on average, joining them takes less time than referring to them.
_CHUNK_BYTES_MIN: Final = 64 * 1024
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_TIME: Final = pa.timestamp("us", "UTC")
_STRING: Final = pa.string()
_BINARY: Final = pa.binary()


class _ContiguousRun(NamedTuple):
    """The common run of all batches, if they are of one topic-partition and their offsets follow each other."""

    topic: str
    partition: int
    first_offset: int


class _TimeColumn(NamedTuple):
    """Times in nanoseconds: one for each row, or one for each group of `counts` rows."""

    values: NDArray[np.int64]
    counts: Sequence[int] | None

    def ns(self) -> pa.Array:
        return self._spread(self.values, _INT64)

    def us(self) -> pa.Array:
        """In microseconds, rounded down. Before 1970 a division would round up."""
        return self._spread(np.floor_divide(self.values, _NS_PER_US), _TIME)

    def _spread(self, values: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
        return _primitive(values if self.counts is None else values.repeat(self.counts), kind)


def grouped(batches: Iterable[Batch], rows_min: int, bytes_min: int) -> Iterator[list[Batch]]:
    """Group batches in their order until each group has at least this many rows or bytes."""
    group: list[Batch] = []
    count = size = 0
    for batch in batches:
        group.append(batch)
        count += len(batch)
        size += batch.envelope.body_bytes
        if count >= rows_min or size >= bytes_min:
            yield group
            group, count, size = [], 0, 0
    if group:
        yield group


class Stack:
    """Stacked batches. A method for each name in `COLUMNS` makes an array over all their rows."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._heads = [batch.envelope for batch in batches]
        self._parts = [batch.columns for batch in batches]
        self._counts = [part.count for part in self._parts]
        self._count = sum(self._counts)

    # --- Columns that are constant in a run ---

    @cached_property
    def _run(self) -> _ContiguousRun | None:
        heads = self._heads
        topics, partitions = heads[0].topics, heads[0].partitions
        if len(topics) > 1 or not all(
            [head.topics == topics and head.partitions == partitions for head in heads]  # noqa: C419 - quicker
        ):
            return None
        bases = [int.from_bytes(head.base_offsets, "little") for head in heads]
        if bases != list(accumulate(self._counts[:-1], initial=bases[0])):
            return None
        return _ContiguousRun(topics[0], int.from_bytes(partitions, "little"), bases[0])

    def topic(self) -> pa.Array:
        if self._run is None:
            return self._stored("topic").dictionary_decode()
        return _repeated(self._run.topic, _STRING, self._count)

    def coded_topic(self) -> pa.Array:
        """The topic as a dictionary array."""
        if self._run is None:
            return self._stored("topic")
        name = pa.array([self._run.topic], _STRING)
        codes = _repeated(0, _INT32, self._count)
        return pa.DictionaryArray.from_arrays(codes, name, safe=False)

    def partition(self) -> pa.Array:
        if self._run is None:
            return self._stored("partition")
        return _repeated(self._run.partition, _INT32, self._count)

    def offset(self) -> pa.Array:
        if self._run is None:
            return self._stored("offset")
        first = self._run.first_offset
        return _primitive(np.arange(first, first + self._count), _INT64)

    # --- Times ---

    def event_time(self) -> pa.Array:
        return self._event_times.us()

    def event_time_ns(self) -> pa.Array:
        return self._event_times.ns()

    def transmit_time(self) -> pa.Array:
        return self._transmit_times.us()

    def transmit_time_ns(self) -> pa.Array:
        return self._transmit_times.ns()

    def receive_time(self) -> pa.Array:
        return self._receive_times.us()

    def receive_time_ns(self) -> pa.Array:
        return self._receive_times.ns()

    @cached_property
    def _event_times(self) -> _TimeColumn:
        return self._times([part.event_times for part in self._parts])

    @cached_property
    def _transmit_times(self) -> _TimeColumn:
        return self._times([part.transmit_times for part in self._parts])

    @cached_property
    def _receive_times(self) -> _TimeColumn:
        if self._run is None:
            return _TimeColumn(self._stored("receive_time").view(_INT64).to_numpy(), None)
        return self._times([head.receive_times for head in self._heads])

    def _times(self, columns: Sequence[bytes | memoryview]) -> _TimeColumn:
        values = np.frombuffer(b"".join(columns), np.int64)
        if len(values) == self._count:
            return _TimeColumn(values, None)
        if len(values) == len(columns):
            return _TimeColumn(values, self._counts)
        spread = [
            np.broadcast_to(np.frombuffer(column, np.int64), count)
            for column, count in zip(columns, self._counts, strict=True)
        ]
        return _TimeColumn(np.concatenate(spread), None)

    # --- Payloads ---

    def payload(self) -> pa.Array:
        return self._joined([part.payloads for part in self._parts], self._payload_offsets)

    def payload_chunks(self) -> pa.Array | pa.ChunkedArray:
        """The payloads without copying, if that takes less time than joining them."""
        size = sum([len(part.payloads.data) for part in self._parts])
        if size < _CHUNK_BYTES_MIN * len(self._parts):
            return self.payload()
        return pa.chunked_array([_binary(part.payloads, part.count) for part in self._parts])

    def size(self) -> pa.Array:
        if self._width:
            return _repeated(self._width, _INT32, self._count)
        offsets = np.frombuffer(self._payload_offsets, np.int32)
        return _primitive(offsets[1:] - offsets[:-1], _INT32)

    @cached_property
    def _width(self) -> int:
        """The length of every payload if all are known to have the same length; else 0."""
        widths = {part.payloads.width for part in self._parts}
        return widths.pop() if len(widths) == 1 else 0

    @cached_property
    def _payload_offsets(self) -> pa.Buffer:
        if self._width:
            return _even_offsets(self._width, self._count)
        return self._joined_offsets([part.payloads for part in self._parts])

    def _joined(self, columns: Sequence[Binary], offsets: pa.Buffer) -> pa.Array:
        # Arrow takes twice as long to join chunks.
        data = pa.py_buffer(b"".join([column.data for column in columns]))
        return pa.Array.from_buffers(_BINARY, self._count, [None, offsets, data])

    def _joined_offsets(self, columns: Sequence[Binary]) -> pa.Buffer:
        *begins, end = accumulate([len(column.data) for column in columns], initial=0)
        offsets = np.repeat(np.array([*begins, end], np.int32), [*self._counts, 1])
        offsets[:-1] += np.concatenate(
            [np.frombuffer(column.offsets, np.int32)[:-1] for column in columns]
        )
        return pa.py_buffer(offsets)

    # --- Columns that most messages do not have ---

    def key(self) -> pa.Array:
        keys = [part.keys for part in self._parts]
        if not any([column.offsets for column in keys]):  # noqa: C419 - quicker than a generator
            return _repeated(None, _BINARY, self._count)
        if all([column.offsets and not column.validity for column in keys]):  # noqa: C419
            return self._joined(keys, self._joined_offsets(keys))
        return pa.concat_arrays(list(map(_binary, keys, self._counts)))

    def uid(self) -> pa.Array:
        if not any([part.uids for part in self._parts]):  # noqa: C419 - quicker than a generator
            return _repeated(None, _BINARY, self._count)
        return self._stored("uid").cast(_BINARY)

    def tags(self) -> pa.Array:
        return self._tag_rows.maps() if self._has_tags else _no_tags(self._count)

    def coded_tags(self) -> pa.Array:
        """The tags with names and values as dictionary arrays."""
        return self._tag_rows.coded_maps()

    @property
    def _has_tags(self) -> bool:
        return any([part.tag_index for part in self._parts])  # noqa: C419 - quicker than a generator

    @property
    def _tag_rows(self) -> TagRows:
        return TagRows.of(self._parts)

    # --- The table of all columns ---

    @cached_property
    def _table(self) -> pa.Table:
        return Batch.table(self._batches)

    def _stored(self, name: str) -> pa.Array:
        column = self._table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


COLUMNS: Final[Mapping[str, Callable[[Stack], pa.Array]]] = {
    "topic": Stack.topic,
    "partition": Stack.partition,
    "offset": Stack.offset,
    "key": Stack.key,
    "payload": Stack.payload,
    "tags": Stack.tags,
    "event_time": Stack.event_time,
    "transmit_time": Stack.transmit_time,
    "receive_time": Stack.receive_time,
    "event_time_ns": Stack.event_time_ns,
    "transmit_time_ns": Stack.transmit_time_ns,
    "receive_time_ns": Stack.receive_time_ns,
    "size": Stack.size,
    "uid": Stack.uid,
}


def _binary(column: Binary, count: int) -> pa.Array:
    """An Arrow array over the same memory."""
    if not column.offsets:
        return _repeated(None, _BINARY, count)
    validity = pa.py_buffer(column.validity) if column.validity else None
    return pa.Array.from_buffers(
        _BINARY, count, [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    )


def _primitive(values: NDArray[np.int32] | NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


# --- Columns that many batches share ---


def _repeated(value: str | int | None, kind: pa.DataType, count: int) -> pa.Array:
    if count <= _KEPT_ROWS:
        return _kept(value, kind).slice(0, count)
    if kind is _INT32:
        return _primitive(np.full(count, value, np.int32), _INT32)
    return pa.repeat(pa.scalar(value, kind), count)


@lru_cache(maxsize=64)
def _kept(value: str | int | None, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), _KEPT_ROWS)


@lru_cache(maxsize=16)
def _no_tags(count: int) -> pa.Array:
    nothing = pa.array([], _STRING)
    return pa.MapArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), nothing, nothing)


@lru_cache(maxsize=16)
def _even_offsets(width: int, count: int) -> pa.Buffer:
    """The offsets of `count` rows of equal length."""
    return pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32))
