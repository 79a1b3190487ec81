"""How an archive is laid out: its columns by version, where its files lie, and what the table is told of each. Pure.

    TABLE/topic=sensors%2Fa/date=2025-01-31/part-<unique>.parquet   messages of one topic, partition and day
    TABLE/topic~<digest>/date=2025-01-31/part-<unique>.parquet      the same, if the topic is too long for a name
    TABLE/_delta_log/                                               which files are of the table
    TABLE/_runnel/<name>/                                           what a query keeps beside it

The table is partitioned by `topic` and `date` (of the receive time, in UTC). What its log says of a file counts; the
names of directories say the same to those who read without it. Files hold the topic too, though Delta does not ask
for it: names that are long or not ASCII cannot be told by a directory's name, for Spark takes them for something else.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.types import DateType, StructField, StructType

from runnel.spark.read.schema import SPARK_SCHEMA, arrow_schema

PROPERTY: Final = "runnel.layout"
PARTITION_COLUMNS: Final = ("topic", "date")
OWN_DIRECTORY: Final = "_runnel"  # vacuum and readers pass what begins with an underscore

# Of these the table knows the least and the greatest of each file; of the times in microseconds too.
STATISTICS: Final = (
    "partition",
    "offset",
    "event_time_ns",
    "transmit_time_ns",
    "receive_time_ns",
)
TIMES: Final = ("event_time", "transmit_time", "receive_time")

_NAME_BYTES_MAX: Final = 255  # of a directory, on every usual file system
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"  # Hive's word for null, in a directory's name
# What Spark reads right: each %XX is a character to it, and not a byte of UTF-8.
_READABLE: Final = re.compile(r"topic=(?:[A-Za-z0-9_.~-]|%[2-7][0-9A-F])+/")
_OURS: Final = re.compile(r"part-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet")
_NS_PER_US: Final = 1000


class Column(msgspec.Struct, frozen=True):
    """A column, and the layout that brought it. Files of older layouts have nulls there."""

    name: str
    kind: pa.DataType
    since: int = 1


class Layout(msgspec.Struct, frozen=True):
    """A version of the columns. Columns are only ever added."""

    version: int
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """Of the table."""
        return pa.schema([(column.name, column.kind) for column in self.columns])

    @property
    def file_schema(self) -> pa.Schema:
        """Of each file."""
        return pa.schema([field for field in self.schema if field.name != "date"])

    def added_since(self, version: int) -> list[Column]:
        return [column for column in self.columns if column.since > version]


CURRENT: Final = Layout(
    1,
    (
        *(Column(field.name, field.type) for field in arrow_schema(SPARK_SCHEMA)),
        Column("date", pa.date32()),
    ),
)

# The same for Spark; `date` behind the columns of the format `runnel`.
SPARK_TABLE_SCHEMA: Final = StructType([*SPARK_SCHEMA.fields, StructField("date", DateType())])


# --- Where files lie ---


def directory(topic: str, date: str) -> str:
    """Of the files of a topic and day, within the table."""
    return f"{_topic_directory(topic)}/date={date}"


def _topic_directory(topic: str) -> str:
    """Only letters, digits and `_.-~` as they are: so it means the same to Spark, DuckDB, shells and every locale."""
    escaped = quote(topic, safe="")
    if escaped == _NO_VALUE:
        escaped = escaped.replace("_", "%5F", 1)
    name = f"topic={escaped}"
    if len(name) <= _NAME_BYTES_MAX:
        return name
    return f"topic~{hashlib.sha256(topic.encode()).hexdigest()[:32]}"


def file_path(topic: str, date: str) -> str:
    """Of a new file, within the table; never the same again."""
    return f"{directory(topic, date)}/part-{uuid.uuid4()}.parquet"


def says_topic(path: str) -> bool:
    """Whether a file's path within the table tells its topic to Spark."""
    return _READABLE.match(path) is not None


def is_ours(path: str) -> bool:
    """Whether a file was written by Runnel, so that the topic is in it. Others' compaction leaves it out."""
    return _OURS.fullmatch(path.rpartition("/")[2]) is not None


# --- What the table is told of a file ---


class FileStatistics(msgspec.Struct, frozen=True):
    """As Delta writes them, in JSON."""

    rows: int = msgspec.field(name="numRecords")
    least: Mapping[str, int | str] = msgspec.field(name="minValues")
    greatest: Mapping[str, int | str] = msgspec.field(name="maxValues")
    nulls: Mapping[str, int] = msgspec.field(name="nullCount")


class ArchiveFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was written and is not of the table yet. `path` is within the table."""

    path: str
    size_bytes: int
    topic: str
    date: str
    statistics: FileStatistics

    def __post_init__(self) -> None:
        assert self.path.startswith(directory(self.topic, self.date))

    @property
    def partition(self) -> int:
        return int(self.statistics.least["partition"])

    @property
    def first_offset(self) -> int:
        return int(self.statistics.least["offset"])

    @property
    def last_offset(self) -> int:
        return int(self.statistics.greatest["offset"])


def statistics(rows: int, bounds: Mapping[str, tuple[int, int]]) -> FileStatistics:
    """From the least and greatest values of each of `STATISTICS`."""
    least: dict[str, int | str] = {name: low for name, (low, _) in bounds.items()}
    greatest: dict[str, int | str] = {name: high for name, (_, high) in bounds.items()}
    for name in TIMES:
        low, high = bounds[f"{name}_ns"]
        least[name], greatest[name] = _time_text(low), _time_text(high)
    return FileStatistics(rows, least, greatest, dict.fromkeys(least, 0))


def _time_text(time_ns: int) -> str:
    """To the microsecond, rounded down as the columns are, so that no row lies beyond."""
    return f"{np.datetime64(time_ns // _NS_PER_US, 'us')}Z"
