"""Converts batches to Arrow over the same memory: the only module that imports pyarrow.

Payloads, keys, uids and full time columns are the body's own buffers. The values of a run (topic,
partition, offset, receive time) are repeated for its rows, and so is a time or tag set that stands
for all rows.
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
from runnel.formats.plain_bodies import EvenShape, even_offsets
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
# values each, the longest of 20 bytes per row.
_KEPT_ROWS: Final = 65_536
_KEPT_VALUES: Final = 16

# With at most this many rows per batch on average, copying times is quicker than chunks (bench/log.py, "read").
_JOINED_ROWS_MAX: Final = 2048

_Value = TypeVar("_Value")


def to_record_batch(envelope: Envelope, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of `SCHEMA`. Offsets and receive times not yet given are 0."""
    count = columns.count
    keys = _binary(columns.keys, count)
    payload_offsets = np.frombuffer(columns.payloads.offsets, np.int32)
    topics, partitions, offsets, receive_times = _by_row([envelope], [count])
    return pa.RecordBatch.from_arrays(
        [
            topics,
            partitions,
            offsets,
            keys,
            _payloads(columns),
            _tags(columns),
            _times(columns.event_times, count),
            _times(columns.transmit_times, count),
            receive_times,
            _primitive(_INT32, payload_offsets[1:] - payload_offsets[:-1]),
            _uids(columns),
            _partition_keys(columns),
        ],
        schema=SCHEMA,
    )


def to_table(heads: Sequence[Envelope], parts: Sequence[Columns]) -> pa.Table:
    """Several batches as one table, quicker than one by one.

    The values of runs are repeated for all rows at once. The values of rows stay in place, one chunk per batch (except
    for short columns of times): the columns of a table need not have the same chunks.
    """
    if not heads:
        return SCHEMA.empty_table()
    counts = [columns.count for columns in parts]
    total = sum(counts)
    topics, partitions, offsets, receive_times = _by_row(heads, counts)
    keys = partition_keys = _nulls("key", total)
    tags, uids = _no_tags(None, total), _nulls("uid", total)
    if not all([columns.is_plain for columns in parts]):  # noqa: C419 - quicker than a generator
        keys = pa.chunked_array([_binary(columns.keys, columns.count) for columns in parts])
        partition_keys = pa.chunked_array(list(map(_partition_keys, parts)))
        tags = pa.chunked_array(list(map(_tags, parts)))
        uids = pa.chunked_array(list(map(_uids, parts)))
    payloads = pa.chunked_array(list(map(_payloads, parts)))
    widths = {columns.payloads.width for columns in parts}
    width = widths.pop() if len(widths) == 1 else 0
    return pa.Table.from_arrays(
        [
            topics,
            partitions,
            offsets,
            keys,
            payloads,
            tags,
            _joined_times([columns.event_times for columns in parts], counts, total),
            _joined_times([columns.transmit_times for columns in parts], counts, total),
            receive_times,
            _same_int32(width, total) if width else pc.binary_length(payloads),
            uids,
            partition_keys,
        ],
        schema=SCHEMA,
    )


def to_even_table(
    heads: Sequence[Envelope], bodies: Sequence[bytes | memoryview], shape: EvenShape
) -> pa.Table:
    """The same for plain bodies of one shape, without columns of each batch.

    After the read of a page the processor's caches are cold, and a call costs several times what it costs in a loop:
    hence few calls, and few different ones (bench/log.py, "read").
    """
    count = shape.count
    counts = [count] * len(heads)
    total = count * len(heads)
    topics, partitions, offsets, receive_times = _by_row(heads, counts)
    nulls = _nulls("key", total)
    payload_offsets = _even_offsets(count, shape.width)
    from_buffers, py_buffer, at = pa.Array.from_buffers, pa.py_buffer, shape.payloads
    payloads = [
        from_buffers(_BINARY, count, [None, payload_offsets, py_buffer(memoryview(body)[at])])
        for body in bodies
    ]
    return pa.Table.from_arrays(
        [
            topics,
            partitions,
            offsets,
            nulls,
            pa.chunked_array(payloads),
            _no_tags(None, total),
            _joined_times([body[shape.event_times] for body in bodies], counts, total),
            _joined_times([body[shape.transmit_time] for body in bodies], counts, total),
            receive_times,
            _same_int32(shape.width, total),
            _nulls("uid", total),
            nulls,
        ],
        schema=SCHEMA,
    )


@lru_cache(maxsize=_KEPT_VALUES)
def _even_offsets(count: int, width: int) -> pa.Buffer:
    return pa.py_buffer(even_offsets(count, width))


def _joined_times(
    columns: Sequence[bytes | memoryview], counts: Sequence[int], total: int
) -> pa.Array | pa.ChunkedArray:
    """The times of several batches, copied if they are short: quicker than a chunk for each."""
    if total <= _JOINED_ROWS_MAX * len(columns):
        values = b"".join(columns)
        if len(values) == 8 * len(columns):
            return _spread_times(values, counts)
        if len(values) == 8 * total:
            return pa.Array.from_buffers(_TIME, total, [None, pa.py_buffer(values)])
    return pa.chunked_array(list(map(_times, columns, counts)))


def _spread_times(values: bytes, counts: Sequence[int]) -> pa.Array:
    """One time per batch, repeated for its rows."""
    times = np.frombuffer(values, np.int64)
    is_even = counts.count(counts[0]) == len(counts)
    return _primitive(_TIME, times.repeat(counts[0] if is_even else counts))


def _primitive(kind: pa.DataType, values: NDArray[np.int32] | NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _kept(make: Callable[[_Value, int], pa.Array]) -> Callable[[_Value, int], pa.Array]:
    """Make a column of one value once, and cut it to the requested number of rows.

    Many pages have the same number of rows, so the cuts are cached too: they share the column's memory.
    """
    kept = lru_cache(maxsize=_KEPT_VALUES)(lambda value: make(value, _KEPT_ROWS))
    cut = lru_cache(maxsize=_KEPT_VALUES)(lambda value, count: kept(value).slice(0, count))

    @wraps(make)
    def get(value: _Value, count: int) -> pa.Array:
        return cut(value, count) if count <= _KEPT_ROWS else make(value, count)

    return get


# --- Values of runs ---


_RunColumns = tuple[pa.Array, pa.Array, pa.Array, pa.Array]


def _by_row(heads: Sequence[Envelope], counts: Sequence[int]) -> _RunColumns:
    """Topics, partitions, offsets and receive times, repeated for each row; `counts` are the batches' messages."""
    return _one_partition(heads, counts) or _all_runs(heads)


def _one_partition(heads: Sequence[Envelope], counts: Sequence[int]) -> _RunColumns | None:
    """The same if each batch is one run that continues the batch before; None if not.

    Less than half the time of `_all_runs` (bench/log.py, "read").
    """
    topics, partitions = heads[0].topics, heads[0].partitions
    first = end = int.from_bytes(heads[0].base_offsets, "little")
    if len(topics) > 1 or not first:  # without offsets: on their way to the broker
        return None
    for head, count in zip(heads, counts, strict=True):
        is_next = int.from_bytes(head.base_offsets, "little") == end
        if not is_next or head.topics != topics or head.partitions != partitions:
            return None
        end += count
    return (
        _same_topic(topics[0], end - first),
        _same_int32(int.from_bytes(partitions, "little"), end - first),
        _primitive(_INT64, np.arange(first, end)),
        _spread_times(b"".join([head.receive_times for head in heads]), counts),
    )


def _all_runs(heads: Sequence[Envelope]) -> _RunColumns:
    """The same for any runs."""
    topics = list(chain.from_iterable([head.topics for head in heads]))
    runs = len(topics)
    counts = _joined(heads, runs, np.int32, [head.counts for head in heads])
    bases = _joined(heads, runs, np.int64, [head.base_offsets or _UNSET for head in heads])
    times = _joined(heads, runs, np.int64, [head.receive_times or _UNSET for head in heads])
    partitions = _joined(heads, runs, np.int32, [head.partitions for head in heads])
    # Row i of a run that begins at row b with offset o has offset i + (o - b).
    ends = np.cumsum(counts, dtype=np.int64)
    starts, total = ends - counts, int(ends[-1])
    offsets = np.arange(total) + np.repeat(bases - starts, counts)
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
    """A column of all these envelopes, one number per run."""
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


@_kept
def _same_topic(topic: str, count: int) -> pa.Array:
    name = pa.array([topic], pa.string())
    return pa.DictionaryArray.from_arrays(_same_int32(0, count), name, safe=False)


@_kept
def _same_int32(value: int, count: int) -> pa.Array:
    return _primitive(_INT32, np.full(count, value, np.int32))


# --- Values of rows ---


def _payloads(columns: Columns) -> pa.Array:
    payloads = columns.payloads
    return pa.Array.from_buffers(
        _BINARY, columns.count, [None, pa.py_buffer(payloads.offsets), pa.py_buffer(payloads.data)]
    )


def _binary(column: Binary, count: int) -> pa.Array:
    if not column:
        return _nulls("key", count)
    validity = pa.py_buffer(column.validity) if column.validity else None
    return pa.Array.from_buffers(
        _BINARY, count, [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    )


def _partition_keys(columns: Columns) -> pa.Array:
    return _binary(columns.partition_keys or columns.keys, columns.count)


@_kept
def _nulls(name: str, count: int) -> pa.Array:
    return pa.nulls(count, SCHEMA.field(name).type)


def _times(column: bytes | memoryview, count: int) -> pa.Array:
    if len(column) != 8 * count:
        column = memoryview(bytes(column) * count)
    return pa.Array.from_buffers(_TIME, count, [None, pa.py_buffer(column)])


def _uids(columns: Columns) -> pa.Array:
    uids, count = columns.uids, columns.count
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
