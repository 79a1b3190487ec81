"""What tests of the archive share: rows as its tasks get them, without a broker or Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from runnel.spark.pipelines.archive.file_writer import FileWriter
from runnel.spark.pipelines.archive.layout import ArchiveFile
from runnel.spark.read.schema import SPARK_SCHEMA, arrow_schema

START_NS = 1_700_000_000 * 10**9  # 2023-11-14T22:13:20Z

# Each would be read as something else if it were not escaped, or only by some.
ODD_TOPICS = (
    "plain",
    "with/slash",
    "with space",
    "100%",
    "a%2Fb",
    "key=value",
    "Köln/Straße",
    "007",
    "2024-01-01",
    "true",
    "null",
    "..",
    "[x]*?{y}",
    "q'uo\"te",
    "back\\slash",
    "+plus&#:~",
    "!system/x",
    "__HIVE_DEFAULT_PARTITION__",
    "long/" + "x" * 246,
    "ж" * 100,
)


def rows(
    topics: Sequence[str],
    *,
    partitions: Sequence[int] | None = None,
    first_offset: int = 1,
    receive_ns: Sequence[int] | None = None,
) -> pa.Table:
    """A row for each topic in the list, with offsets that rise over all of them."""
    count = len(topics)
    numbers = np.arange(first_offset, first_offset + count)
    received = np.full(count, START_NS) if receive_ns is None else np.array(receive_ns)
    times_ns = {
        "event_time": received - 2_000_003,
        "transmit_time": received - 1_000_001,
        "receive_time": received,
    }
    schema = arrow_schema(SPARK_SCHEMA)
    columns = {
        "topic": pa.array(topics),
        "partition": pa.array([0] * count if partitions is None else partitions, pa.int32()),
        "offset": pa.array(numbers, pa.int64()),
        "key": pa.array([None if row % 2 else b"k" for row in range(count)], pa.binary()),
        "payload": pa.array([b"%d" % number for number in numbers], pa.binary()),
        "tags": pa.array([[("unit", "C")]] * count, pa.map_(pa.string(), pa.string())),
        "size": pa.array([len(b"%d" % number) for number in numbers], pa.int32()),
        "uid": pa.nulls(count, pa.binary()),
    }
    for name, values in times_ns.items():
        columns[f"{name}_ns"] = pa.array(values, pa.int64())
        columns[name] = pa.array(values // 1000, pa.int64()).view(pa.timestamp("us", "UTC"))
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def write(table: Path, *tables: pa.Table) -> list[ArchiveFile]:
    with FileWriter(table) as writer:
        for part in tables:
            writer.add(part)
        return writer.finish()
