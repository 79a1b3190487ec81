"""`read_archive`: archived messages as rows of the format `runnel`, optionally followed by the broker's messages."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import Final, Literal, TypeAlias

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from runnel.client import connect_blocking
from runnel.errors import ClientFault
from runnel.spark.connections import default_url
from runnel.spark.options import parse_time_ns
from runnel.spark.pipelines.archive.job import topic_options
from runnel.spark.pipelines.archive.layout import SPARK_TABLE_SCHEMA, is_ours, says_topic
from runnel.spark.pipelines.archive.table import ArchiveTable, StoredFile
from runnel.spark.read.schema import SPARK_SCHEMA
from runnel.topics.names import check_topic
from runnel.topics.patterns import Pattern

History: TypeAlias = Literal["archive", "archive+log"]
Time: TypeAlias = str | int | datetime

_HISTORIES: Final = ("archive", "archive+log")
_NOT_KEPT: Final = "none"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NS_PER_DAY: Final = 86_400 * 10**9
_GLOB: Final = re.compile(r"[][{}*?\\]")


class ReceiveSpan(msgspec.Struct, frozen=True):
    """The receive times from `since_ns` on and below `until_ns`; None: no bound."""

    since_ns: int | None = None
    until_ns: int | None = None

    def may_have(self, file: StoredFile) -> bool:
        """Whether a file may have messages of these times, by its statistics or else by its day."""
        first_ns, last_ns = file.first_receive_ns, file.last_receive_ns
        if first_ns is None or last_ns is None:
            first_ns = (file.date - date(1970, 1, 1)).days * _NS_PER_DAY
            last_ns = first_ns + _NS_PER_DAY - 1
        return (self.since_ns is None or last_ns >= self.since_ns) and (
            self.until_ns is None or first_ns < self.until_ns
        )

    def of(self, rows: DataFrame) -> DataFrame:
        if self.since_ns is not None:
            rows = rows.where(f.col("receive_time_ns") >= self.since_ns)
        if self.until_ns is not None:
            rows = rows.where(f.col("receive_time_ns") < self.until_ns)
        return rows


def read_archive(
    spark: SparkSession,
    table: str | os.PathLike[str],
    *,
    topics: str | Sequence[str] | None = None,
    pattern: str | None = None,
    since: Time | None = None,
    until: Time | None = None,
    history: History = "archive",
    url: str | None = None,
    token: str | None = None,
    version: int | None = None,
    fails_on_data_loss: bool = True,
) -> DataFrame:
    """The messages of an archive, with the columns of the format `runnel`.

    Reads the current table, or an earlier `version`. `since` and `until` (exclusive) are receive times: ISO 8601,
    nanoseconds since 1970, or a datetime. With history="archive+log" the broker's messages follow: for each partition
    exactly from the end of the table, and for topics that the table does not have from their beginning. Messages that
    the broker no longer has are an error when the rows are read; without `fails_on_data_loss` they are logged and
    skipped.
    """
    if history not in _HISTORIES:
        raise ClientFault(f"history is {history!r}: it must be {' or '.join(_HISTORIES)}")
    wants_topic = _wanted(topics, pattern)
    span = ReceiveSpan(_time_ns("since", since), _time_ns("until", until))
    opened = ArchiveTable.open(table, version=version)
    files = opened.files(wants_topic)
    archived = span.of(_of_files(spark, opened, [file for file in files if span.may_have(file)]))
    if history == "archive":
        _check_archived(opened, topics)
        return archived
    log = _of_log(
        spark,
        opened.next_offsets(wants_topic),
        topics=topics,
        pattern=pattern,
        url=url or default_url(),
        token=token,
        fails_on_data_loss=fails_on_data_loss,
    )
    return archived if log is None else archived.unionByName(span.of(log))


def _wanted(topics: str | Sequence[str] | None, pattern: str | None) -> Callable[[str], bool]:
    if topics is not None and pattern is not None:
        raise ClientFault("give `topics` or `pattern`, not both")
    if pattern is not None:
        return Pattern(pattern).matches
    if topics is None:
        return lambda _: True
    names = frozenset((topics,) if isinstance(topics, str) else topics)
    for name in names:
        check_topic(name)
    return names.__contains__


def _time_ns(name: str, value: Time | None) -> int | None:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    time_ns = parse_time_ns(value)
    if time_ns is None:
        raise ClientFault(
            f"{name} is {value!r}: it must be a time as 2025-01-31T12:00:00Z, or nanoseconds since 1970"
        )
    return time_ns


def _check_archived(opened: ArchiveTable, topics: str | Sequence[str] | None) -> None:
    archived = set(opened.topics())
    for name in (topics,) if isinstance(topics, str) else topics or ():
        if name not in archived:
            shown = ", ".join(sorted(archived)[:5])
            raise ClientFault(
                f"the archive {str(opened.path)!r} has no topic {name!r}; it has {len(archived)}"
                f"{': ' if archived else ''}{shown}{', …' if len(archived) > 5 else ''}"
            )


# --- From files ---


def _of_files(spark: SparkSession, opened: ArchiveTable, files: Iterable[StoredFile]) -> DataFrame:
    """Spark reads the files. Where possible it takes the topic from the directory's name, so it can skip topics."""
    named: list[str] = []
    unnamed: list[str] = []
    bare: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if says_topic(file.path):
            where = named
        else:
            where = unnamed if is_ours(file.path) else bare[file.topic]
        where.append(str(opened.path / file.path))
    frames = []
    if named:
        frames.append(_parquet(spark, SPARK_TABLE_SCHEMA, named, str(opened.path)))
    if unnamed:
        frames.append(_parquet(spark, SPARK_SCHEMA, unnamed, None))
    fields = StructType([field for field in SPARK_SCHEMA if field.name != "topic"])
    for topic, paths in bare.items():
        frames.append(_parquet(spark, fields, paths, None).withColumn("topic", f.lit(topic)))
    if not frames:
        return spark.createDataFrame([], SPARK_SCHEMA)
    return reduce(DataFrame.union, [frame.select(*SPARK_SCHEMA.names) for frame in frames])


def _parquet(
    spark: SparkSession, fields: StructType, paths: Sequence[str], base: str | None
) -> DataFrame:
    read = spark.read.schema(fields)
    if any(_GLOB.search(path) for path in paths):
        # Runnel's files have no such names, but the table's directory may.
        read = read.option("__globPaths__", "false")
    if base is None:
        # The names of directories are not used.
        return read.option("recursiveFileLookup", "true").parquet(*paths)
    return read.option("basePath", base).parquet(*paths)


# --- From the log ---


def _of_log(
    spark: SparkSession,
    next_offsets: Mapping[tuple[str, int], int],
    *,
    topics: str | Sequence[str] | None,
    pattern: str | None,
    url: str,
    token: str | None,
    fails_on_data_loss: bool,
) -> DataFrame | None:
    """The broker's messages behind the end of the archive; None if it has none of the topics."""
    selected = "*" if topics is None and pattern is None else pattern
    kept = _kept_topics(url, token, topics, selected)
    if not kept:
        return None
    chosen: dict[str, dict[str, int]] = defaultdict(dict)
    for (topic, partition), offset in sorted(next_offsets.items()):
        if topic in kept:
            chosen[topic][str(partition)] = offset
    read = spark.read.format("runnel").options(
        url=url,
        failOnDataLoss=str(fails_on_data_loss).lower(),
        **topic_options(None if selected is not None else kept, selected),
    )
    if token is not None:
        read = read.option("token", token)
    if chosen:
        read = read.option("startingOffsets", msgspec.json.encode(chosen).decode())
    return read.load()


def _kept_topics(
    url: str, token: str | None, topics: str | Sequence[str] | None, pattern: str | None
) -> list[str]:
    with connect_blocking(url, token=token) as bus:
        found = [topic.name for topic in bus.topics(pattern or "*") if topic.keep != _NOT_KEPT]
        if pattern is not None:
            return found
        wanted = (topics,) if isinstance(topics, str) else topics or ()
        # The broker lists system topics only for patterns that begin with `!`.
        system = [topic.name for topic in bus.topics("!*") if topic.keep != _NOT_KEPT]
    existing = {*found, *system}
    return [name for name in wanted if name in existing]
