"""Batches as Arrow over the same memory: the one module that imports pyarrow.

Payloads, keys, uids and full time columns are the body's own buffers. What is per run (topic,
partition, offset, receive time) is spread over the rows; a time or tag set that stands for all rows
is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from runnel.formats.envelope import Envelope
from runnel.formats.table import UID_BYTES, Binary, Columns

_TIME: Final = pa.timestamp("ns", "UTC")
_BINARY: Final = pa.binary()
_UID: Final = pa.binary(UID_BYTES)
_TOPIC: Final = pa.dictionary(pa.int32(), pa.string())
_TAGS: Final = pa.map_(pa.string(), pa.string())
_NO_ENTRIES: Final = pa.array([], pa.struct([_TAGS.key_field, _TAGS.item_field]))
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_UNSET: Final = bytes(8)  # a column that the broker has not filled in yet

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

# Columns that are the same in batch after batch are made once, this long, and cut to length: a few
# values each, the longest of 20 bytes a row.
_KEPT_ROWS: Final = 65_536
_KEPT_VALUES: Final = 16

_Value = TypeVar("_Value")


def to_record_batch(envelope: Envelope, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of `SCHEMA`. Offsets and receive times not yet given are 0."""
    count = columns.count
    keys = _binary(columns.keys, count)
    payload_offsets = np.frombuffer(columns.payloads.offsets, np.int32)
    if envelope.run_count == 1:
        topics, partitions, offsets, receive_times = _one_run(envelope, count)
    else:
        topics, partitions, offsets, receive_times = _all_runs([envelope], count)
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


def to_table(batches: Sequence[tuple[Envelope, Columns]]) -> pa.Table:
    """Several batches as one table, quicker than one by one.

    What is per run is spread over all their rows at once. What is per row stays where it lies, a chunk
    a batch: columns of one table need not be cut at the same places.
    """
    if not batches:
        return SCHEMA.empty_table()
    counts = [columns.count for _, columns in batches]
    total = sum(counts)
    payloads = pa.chunked_array([_binary(part.payloads, part.count) for _, part in batches])
    topics, partitions, offsets, receive_times = _all_runs([head for head, _ in batches], total)
    keys = _chunks(batches, lambda part: part.keys.offsets, _keys, _nulls("key", total))
    return pa.Table.from_arrays(
        [
            topics,
            partitions,
            offsets,
            keys,
            payloads,
            _chunks(batches, lambda part: part.tag_index, _tags, _no_tags(None, total)),
            pa.chunked_array([_times(part.event_times, part.count) for _, part in batches]),
            _transmit_times([part for _, part in batches], counts),
            receive_times,
            pc.binary_length(payloads),
            _chunks(
                batches,
                lambda part: part.uids,
                lambda part: _uids(part.uids, part.count),
                _nulls("uid", total),
            ),
            _chunks(batches, lambda part: part.partition_keys.offsets, _partition_keys, keys),
        ],
        schema=SCHEMA,
    )


def _chunks(
    batches: Sequence[tuple[Envelope, Columns]],
    buffer_of: Callable[[Columns], memoryview],
    make: Callable[[Columns], pa.Array],
    otherwise: pa.Array | pa.ChunkedArray,
) -> pa.Array | pa.ChunkedArray:
    """A column, a chunk a batch; the one ready-made column if no batch has it."""
    if not any([buffer_of(columns) for _, columns in batches]):  # noqa: C419 - quicker than a generator
        return otherwise
    return pa.chunked_array([make(columns) for _, columns in batches])


def _keys(columns: Columns) -> pa.Array:
    return _binary(columns.keys, columns.count)


def _partition_keys(columns: Columns) -> pa.Array:
    return _binary(columns.partition_keys or columns.keys, columns.count)


def _transmit_times(parts: Sequence[Columns], counts: Sequence[int]) -> pa.Array:
    values = np.frombuffer(b"".join([part.transmit_times for part in parts]), np.int64)
    if len(values) == len(parts):  # one a batch
        values = np.repeat(values, counts)
    elif len(values) != sum(counts):
        return pa.chunked_array([_times(part.transmit_times, part.count) for part in parts])
    return _primitive(_TIME, values)


def _primitive(kind: pa.DataType, values: NDArray[np.int32] | NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _kept(make: Callable[[_Value, int], pa.Array]) -> Callable[[_Value, int], pa.Array]:
    """Make a column of one value once, and cut it to the number of rows that is asked for."""
    kept = lru_cache(maxsize=_KEPT_VALUES)(lambda value: make(value, _KEPT_ROWS))

    @wraps(make)
    def get(value: _Value, count: int) -> pa.Array:
        return kept(value).slice(0, count) if count <= _KEPT_ROWS else make(value, count)

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


def _all_runs(
    heads: Sequence[Envelope], total: int
) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    """What is per run, of all these batches, spread over their rows."""
    topics = list(chain.from_iterable([head.topics for head in heads]))
    runs = len(topics)
    counts = _joined(heads, runs, np.int32, [head.counts for head in heads])
    bases = _joined(heads, runs, np.int64, [head.base_offsets or _UNSET for head in heads])
    times = _joined(heads, runs, np.int64, [head.receive_times or _UNSET for head in heads])
    partitions = _joined(heads, runs, np.int32, [head.partitions for head in heads])
    starts = np.cumsum(counts, dtype=np.int64) - counts
    shifts = bases - starts
    if (shifts == shifts[0]).all() and bases[0]:  # one run after another of the same partition
        offsets = np.arange(bases[0], bases[0] + total)
    else:
        # Row i of a run that begins at row b with offset o has offset i + (o - b).
        offsets = np.arange(total) + np.repeat(shifts, counts)
        offsets[np.repeat(bases == 0, counts)] = 0  # on their way to the broker: none yet
    return (
        _topic_column(topics, counts, total),
        _primitive(_INT32, np.repeat(partitions, counts))
        if partitions.any()
        else _same_int32(0, total),
        _primitive(_INT64, offsets),
        _primitive(_TIME, np.repeat(times, counts)),
    )


def _joined(
    heads: Sequence[Envelope], runs: int, kind: type[np.generic], columns: list[bytes]
) -> NDArray[Any]:
    """A column of all these envelopes, one number a run."""
    if runs == len(heads):
        return np.frombuffer(b"".join(columns), kind)
    return np.concatenate(
        [
            np.broadcast_to(np.frombuffer(values, kind), head.run_count)
            for values, head in zip(columns, heads, strict=True)
        ]
    )


def _topic_column(topics: list[str], counts: NDArray[np.int32], total: int) -> pa.Array:
    names = list(dict.fromkeys(topics))
    if len(names) == 1:
        return _same_topic(names[0], total)
    numbers = dict(zip(names, range(len(names)), strict=True))
    index = np.fromiter(map(numbers.__getitem__, topics), np.int32, len(topics))
    return pa.DictionaryArray.from_arrays(
        _primitive(_INT32, np.repeat(index, counts)), pa.array(names, pa.string()), safe=False
    )


def _same_topic(topic: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(_same_int32(0, count), _name(topic), safe=False)


@lru_cache(maxsize=1024)
def _name(topic: str) -> pa.Array:
    return pa.array([topic], pa.string())


@_kept
def _same_int32(value: int, count: int) -> pa.Array:
    return _primitive(_INT32, np.full(count, value, np.int32))


@_kept
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


@_kept
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
        return _no_tags(None, columns.count)
    index = np.frombuffer(columns.tag_index, np.int32)
    if len(index) != columns.count:
        index = np.zeros(columns.count, np.int32)
    return _tag_sets(columns.tag_sets).take(_primitive(_INT32, index))


@_kept
def _no_tags(_: None, count: int) -> pa.Array:
    offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.Array.from_buffers(_TAGS, count, [None, offsets], children=[_NO_ENTRIES])


def _tag_sets(sets: tuple[Mapping[str, str], ...]) -> pa.Array:
    return pa.array([list(tags.items()) for tags in sets], _TAGS)
