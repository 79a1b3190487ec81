"""One SQL statement from topics into a topic or a table: `runnel pipeline sql`.

A statement with STREAM is a streaming query; a statement without it reads what is stored and ends. Messages that do not
parse and rows that cannot be published go to a dead-letter topic in the same query, also exactly once.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Final, Literal, TypeAlias, get_args

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from runnel.errors import ClientFault
from runnel.spark.connections import default_url
from runnel.spark.pipelines import results
from runnel.spark.pipelines.sources import ResolvedStatement, SourceOptions, resolved_statement
from runnel.spark.pipelines.statement import check_query, explained
from runnel.spark.pipelines.streaming_query import (
    WRITTEN,
    OnProgress,
    PipelineProgress,
    failure_of,
    reason_of,
    run_query,
)
from runnel.spark.pipelines.table_sink import FORMAT as TABLE_FORMAT
from runnel.spark.pipelines.table_sink import LETTER, TableSink
from runnel.spark.pipelines.target import QueryTarget, TargetKind
from runnel.topics.names import Label, check_label, dead_letter_topic
from runnel.topics.patterns import Pattern

Mode: TypeAlias = Literal["append", "update", "complete"]

# In a plan as Spark prints it. A broadcast exchange keeps the order of rows; all other exchanges do not.
_SHUFFLE: Final = re.compile(r"(?<!Broadcast)Exchange ")
# PySpark logs each error in a statement here, as JSON, before the caller can catch it.
_LOGGERS_OF_SPARK: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


def sql(
    spark: SparkSession,
    statement: str,
    *,
    into: str,
    sources: Mapping[str, str] | None = None,
    schemas: Mapping[str, str] | None = None,
    url: str | None = None,
    token: str | None = None,
    name: str | None = None,
    checkpoint: str | None = None,
    once: bool = False,
    every: str | None = None,
    start: str = "earliest",
    mode: Mode = "append",
    dead_letters: str | None = None,
    options: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> PipelineProgress:
    """Run a statement until it ends, or until its query is stopped; returns its final progress.

    `into`: topic:NAME; topic, if the rows have a column topic; or table:PATH, a Delta table. `sources`: the pattern of
    the topics that a name in the statement stands for; a name without a pattern is the name of a topic. `schemas`: the
    fields of JSON payloads as DDL, by name in the statement. `once`: process what is stored now, and end. `start`:
    where a stream without a checkpoint begins. `mode`: Spark's output mode. `dead_letters`: the topic for rows that
    fail, by default `!dead/<name>`; "": no such topic, and such a row ends the query. `options`: options of reading, as
    maxRowsPerTrigger.
    """
    check_query(statement)
    target = QueryTarget.parse(into)
    if mode not in get_args(Mode):
        raise ClientFault(f"mode {mode!r}: it must be one of {', '.join(get_args(Mode))}")
    name = target.short_name if name is None else name
    # Its dead-letter topic is named after it, as that of a subscription.
    check_label(Label.SUBSCRIPTION, name)
    reading = SourceOptions(
        url=url or default_url(),
        token=token,
        patterns=dict(sources or {}),
        schemas=dict(schemas or {}),
        start=start,
        cursor=None if checkpoint is None else name,
        dead_letter_topic=dead_letter_topic(name) if dead_letters is None else dead_letters or None,
        options=dict(options or {}),
    )
    job = _Job(spark, target, name, mode, reading)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        with resolved_statement(spark, statement, reading) as found:
            job.check(found)
            if not found.is_stream:
                return job.run_batch(found)
            if checkpoint is None:
                checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="runnel-sql-"))
            try:
                query = job.start(found, checkpoint, once=once, every=every)
            except PySparkException as error:
                raise ClientFault(explained(statement, reason_of(error))) from error
        return run_query(query, on_progress)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS_OF_SPARK]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


class _Job:
    """Writes the rows of a resolved statement to its target."""

    def __init__(
        self,
        spark: SparkSession,
        target: QueryTarget,
        name: str,
        mode: Mode,
        reading: SourceOptions,
    ) -> None:
        self._spark = spark
        self._target = target
        self._name = name
        self._mode = mode
        self._reading = reading

    def check(self, found: ResolvedStatement) -> None:
        if self._target.kind is TargetKind.TABLE and self._mode == "update":
            raise ClientFault(
                "mode 'update' cannot be written to a table, which has no key to update by: append or complete"
            )
        if not found.is_stream and self._mode == "update":
            raise ClientFault("mode 'update' is one of streams, and the statement has no STREAM")
        if self._target.kind is TargetKind.TOPIC and self._target.name is not None:
            for pattern in found.streamed_patterns:
                if Pattern(pattern).matches(self._target.name):
                    raise ClientFault(
                        f"topic {self._target.name} is among those that are read ({pattern}): the query would read "
                        "what it writes, without end"
                    )

    def start(
        self, found: ResolvedStatement, checkpoint: str, *, once: bool, every: str | None
    ) -> StreamingQuery:
        rows = self._rows(msgspec.structs.replace(found, rows=_observed(found.rows, WRITTEN)))
        stream = rows.writeStream.outputMode(self._mode).queryName(self._name)
        stream = stream.option("checkpointLocation", checkpoint)
        if once:
            stream = stream.trigger(availableNow=True)
        elif every is not None:
            stream = stream.trigger(processingTime=every)
        return self._sink(rows, stream).start()

    def _sink(self, rows: DataFrame, stream: DataStreamWriter) -> DataStreamWriter:
        if self._target.kind is TargetKind.TABLE:
            return stream.format(TABLE_FORMAT).options(**self._options())
        stream = stream.format("runnel").options(**self._options())
        return stream.option("sort", "true") if _shuffles(rows) else stream

    def run_batch(self, found: ResolvedStatement) -> PipelineProgress:
        counted = Observation(WRITTEN)
        rows = self._rows(msgspec.structs.replace(found, rows=_observed(found.rows, counted)))
        if self._target.kind is TargetKind.TABLE:
            writer = rows.write.format(TABLE_FORMAT)
            writer = writer.mode("overwrite" if self._mode == "complete" else "append")
        else:
            writer = rows.write.format("runnel").mode("append")
        options = self._options()
        # A producer's name requires the same rows each time. A batch query may give others.
        options.pop("producer")
        try:
            writer.options(**options).save()
        except PySparkException as error:
            raise failure_of(error) from error
        written = counted.get["rows"]
        return PipelineProgress(
            batches=1,
            rows=written,
            rows_per_second=0.0,
            entries_behind=None,
            written=written,
            is_stream=False,
        )

    def _rows(self, found: ResolvedStatement) -> DataFrame:
        """The rows in the form that the sink takes, including dead letters."""
        if self._target.kind is TargetKind.TABLE:
            self._spark.dataSource.register(TableSink)
            if found.letters is None:
                return found.rows
            letters = found.letters.select(f.struct("*").alias(LETTER))
            return found.rows.unionByName(letters, allowMissingColumns=True)
        rows = results.messages(found.rows, has_topic=self._target.name is not None)
        if found.letters is None:
            return rows
        letters = found.letters
        if "event_time" in rows.columns:
            time = f.timestamp_micros((f.col("event_time_ns") / 1000).cast("long"))
            letters = letters.withColumn("event_time", time).drop("event_time_ns")
        return rows.unionByName(letters, allowMissingColumns=True)

    def _options(self) -> dict[str, str]:
        """The options of format `runnel`. A table needs them for dead letters."""
        options = {"url": self._reading.url, "producer": self._name}
        if self._reading.token is not None:
            options["token"] = self._reading.token
        if self._reading.dead_letter_topic is not None:
            options["deadLetterTopic"] = self._reading.dead_letter_topic
        if self._target.name is not None:
            key = "path" if self._target.kind is TargetKind.TABLE else "topic"
            options[key] = self._target.name
        return options


def _shuffles(rows: DataFrame) -> bool:
    """Whether rows may have another order when the same micro-batch runs again."""
    plan = StringIO()
    with redirect_stdout(plan):
        rows.explain()
    return _SHUFFLE.search(plan.getvalue()) is not None


def _observed(rows: DataFrame, counted: Observation | str) -> DataFrame:
    return rows.observe(counted, f.count(f.lit(1)).alias("rows"))
