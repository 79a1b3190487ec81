"""Statistics of stored messages: a batch query over all windows, as a table or as documents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from runnel.spark.options import batch_options
from runnel.spark.pipelines.stats.documents import document
from runnel.spark.pipelines.stats.paths import source_options, table_location
from runnel.spark.pipelines.stats.table import check_table, write_new
from runnel.spark.pipelines.stats.windows import FIGURES, LATE_S, WINDOW_S, Windows, figures
from runnel.spark.pipelines.streaming_query import failure_of

_ROWS_PER_GROUP: Final = 10_000


def stats_history(
    spark: SparkSession,
    *,
    topics: str | Sequence[str] | None = None,
    pattern: str | None = None,
    path: str | os.PathLike[str] | None = None,
    window_s: float = WINDOW_S,
    slide_s: float | None = None,
    tags: Sequence[str] = (),
    late_s: float = LATE_S,
    url: str | None = None,
    token: str | None = None,
) -> DataFrame:
    """The figures of all windows, for everything that a broker has stored or that the journal files at `path` contain.

    For an archive, or for some of the messages, use `stats_of` with the DataFrame.
    """
    windows = Windows.of(window_s=window_s, slide_s=slide_s, tags=tags, late_s=late_s)
    options = source_options(topics=topics, pattern=pattern, path=path, url=url, token=token)
    batch_options(options, url="")  # its error is shorter than Spark's
    messages = spark.read.format("runnel").schema(windows.columns).options(**options).load()
    return figures(messages, windows)


def write_stats(rows: DataFrame, table: str | os.PathLike[str]) -> int:
    """Write figures to a new Delta table; returns the number of rows."""
    uri = table_location(rows.sparkSession, table)
    check_table(uri, must_be_new=True)
    written = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal written
        for group in _groups(rows):
            written += len(group)
            yield pa.RecordBatch.from_pylist(group, schema=FIGURES)

    write_new(uri, batches())
    return written


def documents(rows: DataFrame) -> Iterator[dict[str, Any]]:
    """The figures as the documents that `stats` publishes, oldest window first."""
    in_order = rows.orderBy("window_end", "window_start", "topic", f.map_entries("tags"))
    for group in _groups(in_order):
        yield from map(document, group)


def _groups(rows: DataFrame) -> Iterator[list[dict[str, Any]]]:
    """The rows in order, some thousands at a time, because not all may fit into memory."""
    # As numbers, because Spark would convert them to this machine's time zone.
    rows = rows.withColumns({name: f.unix_micros(name) for name in ("window_start", "window_end")})
    group: list[dict[str, Any]] = []
    try:
        for row in rows.toLocalIterator():
            group.append(row.asDict() | {"tags": list(row["tags"].items())})
            if len(group) == _ROWS_PER_GROUP:
                yield group
                group = []
    except PySparkException as error:
        raise failure_of(error) from error
    yield group
