"""`stats`: a streaming query that counts and measures messages in windows of event time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from runnel.errors import ClientFault
from runnel.spark.connections import BrokerLogin
from runnel.spark.options import stream_options
from runnel.spark.pipelines.stats.documents import DEFAULT_PREFIX, check_prefix
from runnel.spark.pipelines.stats.paths import is_file_path, is_here, source_options, table_location
from runnel.spark.pipelines.stats.record import StatsRecord, check_record
from runnel.spark.pipelines.stats.sink import FORMAT, Destination, StatsSink
from runnel.spark.pipelines.stats.table import check_table
from runnel.spark.pipelines.stats.windows import LATE_S, WINDOW_S, Windows, figures
from runnel.spark.pipelines.streaming_query import (
    OnProgress,
    PipelineProgress,
    failure_of,
    run_query,
)
from runnel.spark.runtime.session import is_local, register_once

# Delta ignores directories whose names begin with an underscore.
_CHECKPOINTS: Final = "_checkpoints"

_STATE_SETTINGS: Final[Mapping[str, str]] = {
    # By default the JVM's heap holds all open windows, in several versions, which is much for ten thousand topics.
    # RocksDB keeps them on disk, and a micro-batch writes only its changes.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# The checkpoint's first micro-batch fixes it. Spark's default of 200 means 200 files and tasks for a handful of rows.
_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_PARTITIONS_OF_UNKNOWN: Final = 8


def stats(
    spark: SparkSession,
    *,
    topics: str | Sequence[str] | None = None,
    pattern: str | None = None,
    window_s: float = WINDOW_S,
    slide_s: float | None = None,
    tags: Sequence[str] = (),
    late_s: float = LATE_S,
    table: str | os.PathLike[str] | None = None,
    publish: str | None = DEFAULT_PREFIX,
    name: str = "main",
    checkpoint: str | os.PathLike[str] | None = None,
    starting: str = "earliest",
    every_s: float | None = None,
    url: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
) -> PipelineProgress:
    """Count and measure the messages of topics as they come; returns the final progress.

    Each window, topic and combination of the chosen `tags` becomes a row of the Delta table `table`, exactly once, and
    then a message of the topic `<publish>/<name>/<topic>`, at least once. This happens when the window is complete:
    when a message was received long enough after its end. Incomplete windows stay in the checkpoint.

    Without `every_s` it processes what is stored now and returns. With it, it runs a micro-batch every `every_s`
    seconds until it is interrupted. Another call with the same checkpoint, by default beside the table, continues from
    the last position; without table and checkpoint it keeps no position. `starting` (earliest, latest or a time)
    applies to the first call.
    """
    plan = StatsPlan.make(
        topics=topics,
        pattern=pattern,
        window_s=window_s,
        slide_s=slide_s,
        tags=tags,
        late_s=late_s,
        table=table,
        publish=publish,
        name=name,
        checkpoint=checkpoint,
        starting=starting,
        every_s=every_s,
        url=url,
        token=token,
    )
    return plan.run(spark, on_progress)


class StatsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments, checked as far as possible before Spark is started, which takes long."""

    windows: Windows
    options: Mapping[str, str]  # options of reading
    table: str | None
    prefix: str | None
    name: str
    checkpoint: str | None
    every_s: float | None

    @classmethod
    def make(
        cls,
        *,
        topics: str | Sequence[str] | None,
        pattern: str | None,
        window_s: float,
        slide_s: float | None,
        tags: Sequence[str],
        late_s: float,
        table: str | os.PathLike[str] | None,
        publish: str | None,
        name: str,
        checkpoint: str | os.PathLike[str] | None,
        starting: str,
        every_s: float | None,
        url: str | None,
        token: str | None = None,
    ) -> StatsPlan:
        """Check the arguments. ClientFault says what is wrong."""
        if table is None and publish is None:
            raise ClientFault("figures have nowhere to go: give a table, or publish them")
        if every_s is not None and not every_s > 0:
            raise ClientFault(f"every_s is {every_s}: it must be a number of seconds above 0")
        if not name or "/" in name:
            raise ClientFault(f"name is {name!r}: it must be a word without /, as main")
        options = source_options(topics=topics, pattern=pattern, url=url, token=token)
        place = "startingOffsets" if starting in ("earliest", "latest") else "startingTime"
        options[place] = starting
        stream_options(options, url="")  # its error is shorter than Spark's
        if table is None and checkpoint is None:
            options["cursor"] = (
                ""  # without a checkpoint the query never resumes, so it must not hold back retention
            )
        prefix = None if publish is None else f"{publish}/{name}"
        if prefix is not None:
            check_prefix(prefix)
        return cls(
            windows=Windows.of(window_s=window_s, slide_s=slide_s, tags=tags, late_s=late_s),
            options=options,
            table=None if table is None else os.fspath(table),
            prefix=prefix,
            name=name,
            checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            every_s=every_s,
        )

    def run(self, spark: SparkSession, on_progress: OnProgress | None = None) -> PipelineProgress:
        """Run until done or interrupted. PipelineFailedError if it ends with an error."""
        table = None if self.table is None else table_location(spark, self.table)
        checkpoint = self.checkpoint
        if table is not None:
            if is_here(spark):
                check_table(table)
            checkpoint = checkpoint or f"{table}/{_CHECKPOINTS}/{self.name}"
        if checkpoint is not None and is_file_path(spark, checkpoint):
            check_record(checkpoint, StatsRecord.of(self.windows, self.options))
        reader = spark.readStream.format("runnel").schema(self.windows.columns)
        messages = reader.options(**self.options).load()
        address = BrokerLogin(self.options["url"], self.options.get("token"))
        writer = figures(messages, self.windows).writeStream.format(FORMAT).outputMode("append")
        writer = writer.options(**Destination(address, table, self.prefix).options)
        if self.every_s is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{self.every_s * 1000:.0f} milliseconds")
        with _checkpoint_directory(spark, checkpoint) as directory:
            writer = writer.option("checkpointLocation", directory)
            return run_query(_started(spark, writer), on_progress)


@contextmanager
def _checkpoint_directory(spark: SparkSession, checkpoint: str | None) -> Iterator[str]:
    """The directory of the query's position and open windows: the given one, or a temporary one."""
    if checkpoint is not None:
        yield checkpoint
        return
    if not is_here(spark) or not is_local(str(spark.sparkContext.master)):
        raise ClientFault(
            "without a table it needs a checkpoint: a directory that Spark's driver and executors all reach"
        )
    # Spark may still be deleting files in it.
    with TemporaryDirectory(prefix="runnel-stats-", ignore_cleanup_errors=True) as directory:
        yield directory


def _started(spark: SparkSession, writer: DataStreamWriter) -> StreamingQuery:
    register_once(spark, StatsSink)
    here = is_here(spark)
    partitions = spark.sparkContext.defaultParallelism if here else _PARTITIONS_OF_UNKNOWN
    # A query keeps the settings that its session has when it starts.
    with _settings(spark, {**_STATE_SETTINGS, _PARTITIONS: str(partitions)}):
        try:
            return writer.start()
        except PySparkException as error:
            raise failure_of(error) from error


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Apply settings that the user has not set, for the duration of the `with`."""
    ours = {key: value for key, value in settings.items() if spark.conf.get(key, None) is None}
    try:
        for key, value in ours.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key in ours:
            spark.conf.unset(key)
