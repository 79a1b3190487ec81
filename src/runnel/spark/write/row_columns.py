"""Checks the columns of a DataFrame to publish, and converts Arrow arrays to the columns of a batch. Pure.

No Python code runs per row: payloads, keys and times stay in Arrow's buffers, and tag sets are numbered by hashing
whole columns. Only distinct tag sets become dictionaries, one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import types as spark

from runnel.errors import ClientFault
from runnel.formats.table import EMPTY, UID_BYTES, Binary, Columns, pack_bits

_NS_PER_US: Final = 1000
TIME_US_MAX: Final = (2**63 - 1) // _NS_PER_US
_BYTES: Final = (spark.BinaryType, spark.StringType)
_WHOLE: Final = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)

_Kinds: TypeAlias = tuple[type[spark.DataType], ...]

# The allowed types of each column, and their names in errors.
_COLUMNS: Final[Mapping[str, tuple[_Kinds, str]]] = {
    "payload": (_BYTES, "binary or string"),
    "topic": ((spark.StringType,), "string"),
    "key": (_BYTES, "binary or string"),
    "partition_key": (_BYTES, "binary or string"),
    "tags": ((spark.MapType,), "map<string,string>"),
    "event_time": ((spark.TimestampType,), "timestamp"),
    "event_time_ns": ((spark.LongType,), "bigint"),
    "transmit_time_ns": ((spark.LongType,), "bigint"),
    "uid": ((spark.BinaryType,), f"binary of {UID_BYTES} bytes"),
    "partition": (_WHOLE, "int"),
}

# The bytes of a row beside its bytes of variable length: times, offsets into columns, uid, index of tags.
_ROW_OVERHEAD_BYTES: Final = 48


def check_schema(schema: spark.StructType, *, has_topic: bool) -> None:
    """Refuse columns that cannot be published, before any row is. `has_topic`: an option gives the topic."""
    types = {field.name: field.dataType for field in schema.fields}
    if len(types) != len(schema.fields):
        names = schema.fieldNames()
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ClientFault(f"columns {_listed(twice)} come more than once")
    if unknown := [name for name in types if name not in _COLUMNS]:
        raise ClientFault(
            f"cannot publish columns {_listed(unknown)}: a message is made of {_listed(_COLUMNS)}; "
            "select or rename what it needs, for example to_json(struct(…)) AS payload"
        )
    for name, kind in types.items():
        allowed, expected = _COLUMNS[name]
        if not isinstance(kind, allowed) or (name == "tags" and not _is_text_map(kind)):
            raise ClientFault(f"column {name} is {kind.simpleString()}: it must be {expected}")
    if "payload" not in types:
        raise ClientFault("there is no column payload: every message needs one, binary or string")
    if "topic" not in types and not has_topic:
        raise ClientFault("where to? Give a column topic, or the option topic")
    if "event_time" in types and "event_time_ns" in types:
        raise ClientFault("event_time and event_time_ns say the same: drop one of them")


def _is_text_map(kind: spark.DataType) -> bool:
    return (
        isinstance(kind, spark.MapType)
        and isinstance(kind.keyType, spark.StringType)
        and isinstance(kind.valueType, spark.StringType)
    )


def _listed(names: Any) -> str:
    return ", ".join(names)


# --- Rows from Spark ---


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Cast bytes to `binary`, names to `string` and integers to `int64`, as the rest of this module expects."""
    arrays = []
    for name, array in zip(rows.schema.names, rows.columns, strict=True):
        if _COLUMNS[name][0] is _BYTES or name == "uid":
            array = array.cast(pa.binary())  # text keeps its bytes
        elif name == "topic":
            array = array.cast(pa.string())
        elif name == "partition":
            array = array.cast(pa.int64())
        elif name == "event_time":
            array = array.cast(pa.timestamp("us", "UTC")).view(pa.int64())
        elif name == "tags" and array.type.item_type != pa.string():
            array = array.cast(pa.map_(pa.string(), pa.string()))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=rows.schema.names)


def in_repeatable_order(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All rows, in an order that depends only on their content."""
    batches = list(map(plain, incoming))
    if not batches:
        return
    rows = pa.Table.from_batches(batches).combine_chunks()
    keys = {name: rows.column(name) for name in sorted(rows.column_names) if name != "tags"}
    if "tags" in rows.column_names:
        keys["tags"] = pa.array(
            [str(sorted(tags or ())) for tags in rows.column("tags").to_pylist()]
        )
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys])
    yield from rows.take(order).combine_chunks().to_batches()


def row_bytes(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """The approximate bytes of each row in a batch, never too small."""
    sizes = np.full(rows.num_rows, _ROW_OVERHEAD_BYTES, np.int64)
    for name in ("payload", "key", "partition_key", "topic"):
        if name in rows.schema.names:
            sizes += np.diff(list_offsets(rows.column(name)))
    if "tags" in rows.schema.names:
        tags = rows.column("tags")
        ends = list_offsets(tags)
        for texts in (tags.keys, tags.items):
            sizes += np.diff(list_offsets(texts)[ends])
        sizes += 10 * np.diff(ends)  # msgpack's headers
    return sizes


def list_offsets(array: pa.Array) -> NDArray[np.int32]:
    """The n + 1 offsets of the rows, also for a slice of a longer array."""
    buffer = array.buffers()[1]
    if len(array) == 0 or buffer is None:
        return np.zeros(len(array) + 1, np.int32)
    whole = np.frombuffer(buffer, np.int32)
    return whole[array.offset : array.offset + len(array) + 1]


# --- Columns of a batch ---


def columns_of(rows: pa.RecordBatch, now_ns: int) -> Columns:
    """Convert rows of one shard, in their order, to the columns of a batch. Rows without an event time get `now_ns`.

    The rows must be free of faults, as `row_faults` finds them.
    """
    keys = column(rows, "key")
    partition_keys = column(rows, "partition_key")
    if partition_keys is not None and keys is not None:
        partition_keys = pc.coalesce(partition_keys, keys)  # for rows without a partition key
    tag_index, tag_sets = _tags(column(rows, "tags"))
    return Columns(
        count=rows.num_rows,
        event_times=_event_times(rows, now_ns),
        transmit_times=_transmit_times(rows, now_ns),
        payloads=_binary(rows.column("payload")),
        keys=_binary(keys),
        partition_keys=_binary(partition_keys),
        uids=_uids(column(rows, "uid")),
        tag_index=tag_index,
        tag_sets=tag_sets,
    )


def column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """The column; None if it does not exist or has only nulls."""
    if name not in rows.schema.names:
        return None
    array = rows.column(name)
    return None if array.null_count == len(array) else array


def _binary(array: pa.Array | None) -> Binary:
    if array is None:
        return Binary()
    offsets = list_offsets(array)
    first, last = int(offsets[0]), int(offsets[-1])
    data = array.buffers()[2]
    if first:
        offsets = offsets - np.int32(first)
    return Binary(
        np.ascontiguousarray(offsets).data.cast("B"),
        memoryview(data)[first:last] if data is not None else EMPTY,
        pack_bits(validity(array)) if array.null_count else EMPTY,
    )


def validity(array: pa.Array) -> NDArray[np.uint8]:
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid.view(np.uint8)


def _event_times(rows: pa.RecordBatch, now_ns: int) -> memoryview:
    if (times := column(rows, "event_time_ns")) is not None:
        values = _numbers(times, fill=now_ns)
    elif (times := column(rows, "event_time")) is not None:
        values = _numbers(times, fill=now_ns // _NS_PER_US) * _NS_PER_US
    else:
        return memoryview(now_ns.to_bytes(8, "little", signed=True))
    return np.ascontiguousarray(values).data.cast("B")


def _transmit_times(rows: pa.RecordBatch, now_ns: int) -> memoryview:
    """The current time, unless the rows are replayed and bring their own transmit time."""
    if (times := column(rows, "transmit_time_ns")) is None:
        return memoryview(now_ns.to_bytes(8, "little", signed=True))
    return np.ascontiguousarray(_numbers(times, fill=now_ns)).data.cast("B")


def _numbers(array: pa.Array, *, fill: int) -> NDArray[np.int64]:
    if array.null_count:
        array = array.fill_null(fill)
    numbers: NDArray[np.int64] = array.to_numpy(zero_copy_only=False)
    return numbers


def _uids(array: pa.Array | None) -> memoryview:
    """20 bytes for each row; zeros for a row without a uid."""
    if array is None:
        return EMPTY
    valid = validity(array).astype(np.bool_)
    packed = _binary(pc.drop_null(array))
    uids = np.zeros((len(array), UID_BYTES), np.uint8)
    uids[valid] = np.frombuffer(packed.data, np.uint8).reshape(-1, UID_BYTES)
    return uids.reshape(-1).data


# --- Tags ---


def _tags(array: pa.Array | None) -> tuple[memoryview, tuple[Mapping[str, str], ...]]:
    """The number of each row's tag set, and the sets."""
    if array is None:
        return EMPTY, ()
    offsets = list_offsets(array)
    begins, counts = offsets[:-1], np.diff(offsets)
    counts = np.where(validity(array), counts, 0)
    if not counts.any():
        return EMPTY, ()
    first, last = int(offsets[0]), int(offsets[-1])
    names, values = array.keys[first:last], array.items[first:last]
    index = _numbered_sets(begins - first, counts, _pairs(names, values))
    set_count = int(index.max()) + 1
    # The first row of each set, found by writing from the last row on.
    rows = np.empty(set_count, np.int64)
    rows[index[::-1]] = np.arange(len(index) - 1, -1, -1)
    ats = (begins[rows] - first).tolist()
    sets = tuple(
        MappingProxyType(
            dict(zip(names[at:end].to_pylist(), values[at:end].to_pylist(), strict=True))
        )
        for at, end in zip(ats, (ats + counts[rows]).tolist(), strict=True)
    )
    return index.data.cast("B"), sets


def _pairs(names: pa.Array, values: pa.Array) -> NDArray[np.int64]:
    """A number for each pair of name and value; equal pairs have equal numbers."""
    values = values.dictionary_encode()
    codes = _codes(names).astype(np.int64) * len(values.dictionary)
    codes += values.indices.to_numpy(zero_copy_only=False)
    return codes


def _codes(array: pa.Array) -> NDArray[np.int32]:
    """A number for each value: 0, 1, 2 … in order of first appearance."""
    codes: NDArray[np.int32] = array.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return codes


def _numbered_sets(
    begins: NDArray[np.int32], counts: NDArray[np.int32], pairs: NDArray[np.int64]
) -> NDArray[np.int32]:
    """A number for each row's set of pairs. Each step combines the number so far with the row's next pair."""
    pairs = _codes(pa.array(pairs)).astype(np.int64) + 1  # 0: the row has no more pairs
    several = int(pairs.max()) + 1
    numbers = np.zeros(len(begins), np.int64)
    for place in range(int(counts.max())):
        has = counts > place
        pair = np.zeros(len(begins), np.int64)
        pair[has] = pairs[begins[has] + place]
        numbers = _codes(pa.array(numbers * several + pair)).astype(np.int64)
    return numbers.astype(np.int32)
