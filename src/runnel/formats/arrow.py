"""A batch as a pyarrow.RecordBatch over the same memory: the one module that imports pyarrow.

Payloads, keys, uids and full time columns are the body's own buffers. What is per run (topic,
partition, offset, receive time) is spread over the rows; a time or tag set that stands for all rows
is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from runnel.formats.envelope import Envelope
from runnel.formats.table import UID_BYTES, Binary, Columns

_TIME: Final = pa.timestamp("ns", "UTC")
_BINARY: Final = pa.binary()
_UID: Final = pa.binary(UID_BYTES)
_TOPIC: Final = pa.dictionary(pa.int32(), pa.string())
_TAGS: Final = pa.map_(pa.string(), pa.string())
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()

SCHEMA: Final = pa.schema(
    [
        pa.field("topic", _TOPIC, nullable=False),
        pa.field("partition", _INT32, nullable=False),
        pa.field("offset", _INT64, nullable=False),
        pa.field("key", _BINARY),
        pa.field("payload", _BINARY, nullable=False),
        pa.field("tags", _TAGS, nullable=False),
        pa.field("event_time", _TIME, nullable=False),
        pa.field("transmit_time", _TIME, nullable=False),
        pa.field("receive_time", _TIME, nullable=False),
        pa.field("size", _INT32, nullable=False),
        pa.field("uid", _UID),
        pa.field("partition_key", _BINARY),
    ]
)

# Columns that are the same in batch after batch are kept, if small: at most 8 MiB for each kind.
_KEPT_COLUMNS: Final = 256
_KEPT_ROWS_MAX: Final = 4096

_Value = TypeVar("_Value")


def to_record_batch(envelope: Envelope, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of `SCHEMA`. Offsets and receive times not yet given are 0."""
    count = columns.count
    keys = _binary(columns.keys, count)
    payload_offsets = np.frombuffer(columns.payloads.offsets, np.int32)
    if envelope.run_count == 1:
        topics, partitions, offsets, receive_times = _one_run(envelope, count)
    else:
        topics, partitions, offsets, receive_times = _many_runs(envelope, count)
    return pa.RecordBatch.from_arrays(
        [
            topics,
            partitions,
            offsets,
            keys,
            _binary(columns.payloads, count),
            _tags(columns),
            _times(columns.event_times, count),
            _times(columns.transmit_times, count),
            receive_times,
            _primitive(_INT32, payload_offsets[1:] - payload_offsets[:-1]),
            _uids(columns.uids, count),
            _binary(columns.partition_keys, count) if columns.partition_keys else keys,
        ],
        schema=SCHEMA,
    )


def _primitive(kind: pa.DataType, values: NDArray[np.int32] | NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _kept_if_small(make: Callable[[_Value, int], pa.Array]) -> Callable[[_Value, int], pa.Array]:
    """Remember what `make` gave for a value and a number of rows, unless those are many."""
    kept = lru_cache(maxsize=_KEPT_COLUMNS)(make)

    @wraps(make)
    def get(value: _Value, count: int) -> pa.Array:
        return (kept if count <= _KEPT_ROWS_MAX else make)(value, count)

    return get


# --- What is per run ---


def _one_run(envelope: Envelope, count: int) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    partition = int.from_bytes(envelope.partitions, "little")
    first = int.from_bytes(envelope.base_offsets, "little")
    return (
        _same_topic(envelope.topics[0], count),
        _same_int32(partition, count),
        _primitive(_INT64, np.arange(first, first + count)) if first else _same_int64(0, count),
        _times(memoryview(envelope.receive_times or bytes(8)), count),
    )


def _many_runs(envelope: Envelope, count: int) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    counts = envelope.vector32(envelope.counts)
    names = list(dict.fromkeys(envelope.topics))
    numbers = dict(zip(names, range(len(names)), strict=True))
    topics = np.fromiter(map(numbers.__getitem__, envelope.topics), np.int32, len(counts))
    partitions = envelope.vector32(envelope.partitions)
    if envelope.is_stored:
        # Row i of a run that begins at row b with offset o has offset i + (o - b).
        shifts = envelope.vector64(envelope.base_offsets) - envelope.run_starts()[:-1]
        offsets = _primitive(_INT64, np.arange(count) + np.repeat(shifts, counts))
        times = np.repeat(envelope.vector64(envelope.receive_times), counts)
    else:
        offsets = _same_int64(0, count)
        times = np.zeros(count, np.int64)
    return (
        pa.DictionaryArray.from_arrays(
            _primitive(_INT32, np.repeat(topics, counts)),
            pa.array(names, pa.string()),
            safe=False,
        ),
        _primitive(_INT32, np.repeat(partitions, counts)),
        offsets,
        _primitive(_TIME, times),
    )


@_kept_if_small
def _same_topic(topic: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        _same_int32(0, count), pa.array([topic], pa.string()), safe=False
    )


@_kept_if_small
def _same_int32(value: int, count: int) -> pa.Array:
    return _primitive(_INT32, np.full(count, value, np.int32))


@_kept_if_small
def _same_int64(value: int, count: int) -> pa.Array:
    return _primitive(_INT64, np.full(count, value, np.int64))


# --- What is per row ---


def _binary(column: Binary, count: int) -> pa.Array:
    if not column:
        return _nulls("key", count)
    validity = pa.py_buffer(column.validity) if column.validity else None
    return pa.Array.from_buffers(
        _BINARY, count, [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    )


@_kept_if_small
def _nulls(name: str, count: int) -> pa.Array:
    return pa.nulls(count, SCHEMA.field(name).type)


def _times(column: memoryview, count: int) -> pa.Array:
    if len(column) != 8 * count:
        column = memoryview(bytes(column) * count)
    return pa.Array.from_buffers(_TIME, count, [None, pa.py_buffer(column)])


def _uids(uids: memoryview, count: int) -> pa.Array:
    if not uids:
        return _nulls("uid", count)
    is_present = np.frombuffer(uids, np.uint8).reshape(count, UID_BYTES).any(axis=1)
    validity = (
        None if is_present.all() else pa.py_buffer(np.packbits(is_present, bitorder="little"))
    )
    return pa.Array.from_buffers(_UID, count, [validity, pa.py_buffer(uids)])


def _tags(columns: Columns) -> pa.Array:
    if not columns.tag_index:
        return _same_tags((), columns.count)
    index = np.frombuffer(columns.tag_index, np.int32)
    if len(index) != columns.count:
        index = np.zeros(columns.count, np.int32)
    return _tag_sets(columns.tag_sets).take(_primitive(_INT32, index))


@_kept_if_small
def _same_tags(tags: tuple[tuple[str, str], ...], count: int) -> pa.Array:
    return _tag_sets((dict(tags),)).take(_same_int32(0, count))


def _tag_sets(sets: tuple[Mapping[str, str], ...]) -> pa.Array:
    return pa.array([list(tags.items()) for tags in sets], _TAGS)
