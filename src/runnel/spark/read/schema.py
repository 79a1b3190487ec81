"""The columns of messages in Spark, and the conversion of stored batches to record batches.

Columns stay columns: no value becomes a Python object on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa
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
from runnel.spark.read.columns import COLUMNS, Stack, grouped

# Spark is fastest with record batches of about this size. Ten times as many rows of 1 KB halve its speed.
ROWS_PER_RECORD_BATCH: Final = 10_000
_BYTES_PER_RECORD_BATCH: Final = 16 * 2**20
_KEPT_ROWS: Final = 2 * ROWS_PER_RECORD_BATCH

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
    """The Arrow schema that Spark expects for these columns. ClientFault if a column is not one of the format's."""
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
    """Convert stored batches to record batches with these columns, of about ten thousand rows each."""
    for group in grouped(batches, ROWS_PER_RECORD_BATCH, _BYTES_PER_RECORD_BATCH):
        yield from _record_batches(group, sum(map(len, group)), schema)


def _record_batches(group: list[Batch], count: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    stack = Stack(group)
    whole = pa.RecordBatch.from_arrays(
        [COLUMNS[name](stack) for name in schema.names], schema=schema
    )
    if count <= _KEPT_ROWS:
        yield whole
        return
    for begin in range(0, count, ROWS_PER_RECORD_BATCH):
        yield whole.slice(begin, ROWS_PER_RECORD_BATCH)
