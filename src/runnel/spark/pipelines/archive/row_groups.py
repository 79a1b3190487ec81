"""Makes Arrow tables with the archive's columns from stored batches, each large enough for a row group.

Repeated values become dictionaries, which Parquet's writer takes over as they are. Payloads are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from runnel.formats.batch import Batch
from runnel.spark.pipelines.archive.layout import CURRENT
from runnel.spark.read.columns import COLUMNS, Stack, grouped

# Readers skip or read a whole row group, and a file's writer holds one in memory.
GROUP_ROWS: Final = 256 * 1024
GROUP_BYTES: Final = 16 * 2**20

_MAKE: Final[Mapping[str, Callable[[Stack], pa.Array | pa.ChunkedArray]]] = {
    **COLUMNS,
    "topic": Stack.coded_topic,
    "payload": Stack.payload_chunks,
    "tags": Stack.coded_tags,
}

_CODED: Final = pa.dictionary(pa.int32(), pa.string())
_CODED_TYPES: Final[Mapping[str, pa.DataType]] = {"topic": _CODED, "tags": pa.map_(_CODED, _CODED)}
_MAY_LACK: Final = ("key", "uid")
# Columns that every message has are not nullable, which saves a tenth of a file's time.
_SCHEMA: Final = pa.schema(
    [
        pa.field(
            field.name,
            _CODED_TYPES.get(field.name, field.type),
            nullable=field.name in _MAY_LACK,
        )
        for field in CURRENT.file_schema
    ]
)


def row_groups(batches: Iterable[Batch]) -> Iterator[pa.Table]:
    """Tables of all rows, in the same order."""
    return map(_table, grouped(batches, GROUP_ROWS, GROUP_BYTES))


def _table(group: list[Batch]) -> pa.Table:
    stack = Stack(group)
    return pa.Table.from_arrays([_MAKE[name](stack) for name in _SCHEMA.names], schema=_SCHEMA)
