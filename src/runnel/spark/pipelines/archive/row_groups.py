"""Stored batches as tables of the archive's columns, each enough for a row group.

What repeats comes as dictionaries, which Parquet's writer takes over as they are, and payloads stay where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from runnel.formats.batch import Batch
from runnel.spark.pipelines.archive.layout import CURRENT
from runnel.spark.read.columns import COLUMNS, Stack, grouped

# A row group is what readers skip or take whole, and what a file's writer holds in memory.
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
# What every message has is declared so: a tenth of a file's time would go into saying it of each row.
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
    """All of their rows, in the same order."""
    return map(_table, grouped(batches, GROUP_ROWS, GROUP_BYTES))


def _table(group: list[Batch]) -> pa.Table:
    stack = Stack(group)
    return pa.Table.from_arrays([_MAKE[name](stack) for name in _SCHEMA.names], schema=_SCHEMA)
