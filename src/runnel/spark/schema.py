"""The columns of messages in Spark, and stored batches made into record batches of them.

Columns stay columns: no value becomes a Python object on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from runnel.errors import ClientFault
from runnel.formats.batch import Batch

# Spark is quickest with record batches near this; ten times as many rows of a kilobyte halve its speed.
ROWS_PER_RECORD_BATCH: Final = 10_000
_BYTES_PER_RECORD_BATCH: Final = 16 * 2**20
_KEPT_ROWS: Final = 2 * ROWS_PER_RECORD_BATCH
_NS_PER_US: Final = 1000

SPARK_SCHEMA: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("key", BinaryType()),
        StructField("payload", BinaryType()),
        StructField("tags", MapType(StringType(), StringType())),
        StructField("event_time", TimestampType()),
        StructField("transmit_time", TimestampType()),
        StructField("receive_time", TimestampType()),
        StructField("event_time_ns", LongType()),
        StructField("transmit_time_ns", LongType()),
        StructField("receive_time_ns", LongType()),
        StructField("size", IntegerType()),
        StructField("uid", BinaryType()),
    ]
)
_TYPES: Final[Mapping[str, DataType]] = {field.name: field.dataType for field in SPARK_SCHEMA}


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects of record batches with these columns. ClientFault if they are not ours."""
    for field in schema:
        kind = _TYPES.get(field.name)
        if kind is None:
            raise ClientFault(
                f"there is no column {field.name!r}: the columns are {', '.join(_TYPES)}"
            )
        if not _is_same(field.dataType, kind):
            raise ClientFault(
                f"column {field.name} is {kind.simpleString()}, not {field.dataType.simpleString()}"
            )
    if not schema.fields:
        raise ClientFault(f"a schema without columns: choose some of {', '.join(_TYPES)}")
    return to_arrow_schema(schema, timezone="UTC")


def _is_same(given: DataType, kind: DataType) -> bool:
    return given.simpleString() == kind.simpleString()


def rows(batches: Iterable[Batch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Stored batches as record batches with these columns, of near ten thousand rows each."""
    group: list[Batch] = []
    count = size = 0
    for batch in batches:
        group.append(batch)
        count += len(batch)
        size += batch.envelope.body_bytes
        if count >= ROWS_PER_RECORD_BATCH or size >= _BYTES_PER_RECORD_BATCH:
            yield from _record_batches(group, count, schema)
            group, count, size = [], 0, 0
    if group:
        yield from _record_batches(group, count, schema)


def _record_batches(group: list[Batch], count: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    table = Batch.table(group)
    whole = pa.RecordBatch.from_arrays([_MAKE[name](table) for name in schema.names], schema=schema)
    if count <= _KEPT_ROWS:
        yield whole
        return
    for begin in range(0, count, ROWS_PER_RECORD_BATCH):
        yield whole.slice(begin, ROWS_PER_RECORD_BATCH)


# --- Columns, each made from a table of stored columns ---


def _column(table: pa.Table, name: str) -> pa.Array:
    """A column as one array, which a record batch needs: joined if it lies in several."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _as_is(name: str) -> Callable[[pa.Table], pa.Array]:
    return lambda table: _column(table, name)


def _topics(table: pa.Table) -> pa.Array:
    topics = _column(table, "topic")
    if len(topics.dictionary) == 1:
        return _same_topic(topics.dictionary[0].as_py(), len(topics))
    return topics.dictionary_decode()


def _same_topic(topic: str, count: int) -> pa.Array:
    if count > _KEPT_ROWS:
        return pa.repeat(pa.scalar(topic, pa.string()), count)
    return _kept_topic(topic).slice(0, count)


@lru_cache(maxsize=16)
def _kept_topic(topic: str) -> pa.Array:
    """Made once: most batches are of a topic that the one before was of."""
    return pa.repeat(pa.scalar(topic, pa.string()), _KEPT_ROWS)


def _uids(table: pa.Table) -> pa.Array:
    uids = _column(table, "uid")
    return _no_uids(len(uids)) if uids.null_count == len(uids) else uids.cast(pa.binary())


@lru_cache(maxsize=16)
def _no_uids(count: int) -> pa.Array:
    return pa.nulls(count, pa.binary())


def _time_ns(name: str) -> Callable[[pa.Table], pa.Array]:
    return lambda table: _column(table, name).view(pa.int64())


def _time(name: str) -> Callable[[pa.Table], pa.Array]:
    """Microseconds, rounded down: also before 1970, where division would round up."""

    def make(table: pa.Table) -> pa.Array:
        ns = _column(table, name).view(pa.int64()).to_numpy()
        return pa.array(np.floor_divide(ns, _NS_PER_US)).view(pa.timestamp("us", "UTC"))

    return make


def _sizes(table: pa.Table) -> pa.Array:
    return pc.cast(_column(table, "size"), pa.int32())


_MAKE: Final[Mapping[str, Callable[[pa.Table], pa.Array]]] = {
    "topic": _topics,
    "partition": _as_is("partition"),
    "offset": _as_is("offset"),
    "key": _as_is("key"),
    "payload": _as_is("payload"),
    "tags": _as_is("tags"),
    "event_time": _time("event_time"),
    "transmit_time": _time("transmit_time"),
    "receive_time": _time("receive_time"),
    "event_time_ns": _time_ns("event_time"),
    "transmit_time_ns": _time_ns("transmit_time"),
    "receive_time_ns": _time_ns("receive_time"),
    "size": _sizes,
    "uid": _uids,
}
