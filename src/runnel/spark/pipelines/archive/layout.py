"""The layout of an archive: its columns by version, the paths of its files, and their statistics. Pure.

    TABLE/topic=sensors%2Fa/date=2025-01-31/part-<unique>.parquet   messages of one topic, partition and day
    TABLE/topic~<digest>/date=2025-01-31/part-<unique>.parquet      the same, if the topic is too long for a name
    TABLE/_delta_log/                                               Delta's log, which lists the files of the table
    TABLE/_runnel/<name>/                                           the record and checkpoint of a query

The table is partitioned by `topic` and `date` (of the receive time, in UTC). Delta's log is authoritative; the names of
directories repeat it for readers without Delta. Files contain the topic too, although Delta does not require it: Spark
misreads directory names of topics that are long or not ASCII.
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
OWN_DIRECTORY: Final = "_runnel"  # vacuum and readers ignore names that begin with an underscore

# The table knows the least and greatest value of these columns in each file, and of the times in microseconds too.
STATISTICS: Final = (
    "partition",
    "offset",
    "event_time_ns",
    "transmit_time_ns",
    "receive_time_ns",
)
TIMES: Final = ("event_time", "transmit_time", "receive_time")

_NAME_BYTES_MAX: Final = 255  # of a directory, on all common file systems
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"  # Hive's word for null, in a directory's name
# Names that Spark decodes correctly: it takes each %XX for a character, not for a byte of UTF-8.
_READABLE: Final = re.compile(r"topic=(?:[A-Za-z0-9_.~-]|%[2-7][0-9A-F])+/")
_OURS: Final = re.compile(r"part-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet")
_NS_PER_US: Final = 1000


class Column(msgspec.Struct, frozen=True):
    """A column, and the layout that added it. It is null in files of older layouts."""

    name: str
    kind: pa.DataType
    since: int = 1


class Layout(msgspec.Struct, frozen=True):
    """A version of the columns. Columns are only ever added."""

    version: int
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return pa.schema([(column.name, column.kind) for column in self.columns])

    @property
    def file_schema(self) -> pa.Schema:
        """The columns of each file."""
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

# The table's columns for Spark: the columns of the format `runnel`, then `date`.
SPARK_TABLE_SCHEMA: Final = StructType([*SPARK_SCHEMA.fields, StructField("date", DateType())])


# --- Paths of files ---


def directory(topic: str, date: str) -> str:
    """The directory of a topic's files of one day, within the table."""
    return f"{_topic_directory(topic)}/date={date}"


def _topic_directory(topic: str) -> str:
    """Escapes all but letters, digits and `_.-~`, so that Spark, DuckDB, shells and every locale read it alike."""
    escaped = quote(topic, safe="")
    if escaped == _NO_VALUE:
        escaped = escaped.replace("_", "%5F", 1)
    name = f"topic={escaped}"
    if len(name) <= _NAME_BYTES_MAX:
        return name
    return f"topic~{hashlib.sha256(topic.encode()).hexdigest()[:32]}"


def file_path(topic: str, date: str) -> str:
    """A unique path for a new file, within the table."""
    return f"{directory(topic, date)}/part-{uuid.uuid4()}.parquet"


def says_topic(path: str) -> bool:
    """Whether Spark can read the topic from a file's path within the table."""
    return _READABLE.match(path) is not None


def is_ours(path: str) -> bool:
    """Whether Runnel wrote a file, which then contains the topic. Files of other programs' compaction do not."""
    return _OURS.fullmatch(path.rpartition("/")[2]) is not None


# --- Statistics of a file ---


class FileStatistics(msgspec.Struct, frozen=True):
    """The statistics of a file in Delta's JSON form."""

    rows: int = msgspec.field(name="numRecords")
    least: Mapping[str, int | str] = msgspec.field(name="minValues")
    greatest: Mapping[str, int | str] = msgspec.field(name="maxValues")
    nulls: Mapping[str, int] = msgspec.field(name="nullCount")


class ArchiveFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was written and is not part of the table yet. `path` is within the table."""

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
    """Make statistics from the least and greatest values of each of `STATISTICS`."""
    least: dict[str, int | str] = {name: low for name, (low, _) in bounds.items()}
    greatest: dict[str, int | str] = {name: high for name, (_, high) in bounds.items()}
    for name in TIMES:
        low, high = bounds[f"{name}_ns"]
        least[name], greatest[name] = _time_text(low), _time_text(high)
    return FileStatistics(rows, least, greatest, dict.fromkeys(least, 0))


def _time_text(time_ns: int) -> str:
    """The time in microseconds, rounded down as the columns are, so that no row lies outside the bounds."""
    return f"{np.datetime64(time_ns // _NS_PER_US, 'us')}Z"
