"""`archive`: a streaming query that copies topics to a Delta table."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from runnel.errors import ClientFault, RunnelError
from runnel.spark.connections import default_url
from runnel.spark.options import literal, parse_time_ns, stream_options
from runnel.spark.pipelines.archive import query_record
from runnel.spark.pipelines.archive.compaction import VACUUM_OLDER_HOURS, compact
from runnel.spark.pipelines.archive.query_record import QueryRecord
from runnel.spark.pipelines.archive.source import REPEATS, TABLE, ArchiveSource
from runnel.spark.pipelines.archive.table import ArchiveTable
from runnel.spark.pipelines.streaming_query import (
    OBSERVATION,
    OnProgress,
    PipelineProgress,
    run_query,
)
from runnel.spark.read.ranges import logger
from runnel.spark.runtime.session import register_once

# The bytes that one task reads. Larger than elsewhere, because a task writes a file for each topic, partition and day.
_BYTES_PER_PARTITION: Final = 128 * 2**20
_CURSOR_TABLE_CHARS: Final = 40
_CHECKPOINT: Final = "checkpoint"


def archive(
    spark: SparkSession,
    table: str | os.PathLike[str],
    *,
    topics: str | Sequence[str] | None = None,
    pattern: str | None = None,
    url: str | None = None,
    token: str | None = None,
    name: str = "main",
    checkpoint: str | os.PathLike[str] | None = None,
    starting: str = "earliest",
    every_s: float | None = None,
    rows_per_trigger_max: int | None = None,
    bytes_per_trigger_max: int | None = None,
    compact_every_s: float | None = None,
    vacuum_older_hours: int | None = VACUUM_OLDER_HOURS,
    fails_on_data_loss: bool = True,
    on_progress: OnProgress | None = None,
) -> PipelineProgress:
    """Add the messages of topics to an archive, each once; returns the final progress.

    Without `every_s` it archives what is stored now and returns. With it, it runs a micro-batch every `every_s` seconds
    until it is interrupted. Another call with the same `name` continues from the last position, so several queries can
    fill one table with different topics. `starting` (earliest, latest or a time) applies to the first call.
    """
    plan = ArchivePlan.make(
        table,
        topics=topics,
        pattern=pattern,
        url=url,
        name=name,
        checkpoint=checkpoint,
        starting=starting,
        rows_per_trigger_max=rows_per_trigger_max,
        bytes_per_trigger_max=bytes_per_trigger_max,
        fails_on_data_loss=fails_on_data_loss,
    )
    for argument, seconds in (("every_s", every_s), ("compact_every_s", compact_every_s)):
        if seconds is not None and not seconds > 0:
            raise ClientFault(f"{argument} is {seconds}: it must be a number of seconds above 0")
    query = plan.start(spark, token=token, every_s=every_s)
    with _periodic_compaction(plan.table, compact_every_s, vacuum_older_hours):
        return run_query(query, on_progress)


class ArchivePlan(msgspec.Struct, frozen=True, kw_only=True):
    """An archive that is ready to start: its table exists, and its options are valid."""

    table: Path
    record: QueryRecord
    options: dict[str, str]
    may_repeat_offsets: bool

    @classmethod
    def make(
        cls,
        table: str | os.PathLike[str],
        *,
        topics: str | Sequence[str] | None = None,
        pattern: str | None = None,
        url: str | None = None,
        name: str = "main",
        checkpoint: str | os.PathLike[str] | None = None,
        starting: str = "earliest",
        rows_per_trigger_max: int | None = None,
        bytes_per_trigger_max: int | None = None,
        fails_on_data_loss: bool = True,
    ) -> ArchivePlan:
        """Check the arguments and create the table. ClientFault if they are wrong; then nothing was created."""
        options = {
            "url": url or default_url(),
            **topic_options(topics, pattern),
            **_starting(starting),
            "bytesPerPartition": str(_BYTES_PER_PARTITION),
            "failOnDataLoss": str(fails_on_data_loss).lower(),
        }
        if rows_per_trigger_max is not None:
            options["maxRowsPerTrigger"] = str(rows_per_trigger_max)
        if bytes_per_trigger_max is not None:
            options["maxBytesPerTrigger"] = str(bytes_per_trigger_max)
        read = stream_options(options, url=options["url"])
        query_record.directory(Path(), name)
        opened = ArchiveTable.prepare(table)
        place = query_record.directory(opened.path, name) / _CHECKPOINT
        record = QueryRecord(
            name=name,
            topics=read.topics,
            pattern=read.pattern,
            url=options["url"],
            checkpoint=str(place) if checkpoint is None else os.fspath(checkpoint),
            cursor=f"archive/{opened.path.name[:_CURSOR_TABLE_CHARS]}-{opened.table_id[:8]}/{name}",
        )
        _check_same(query_record.load(opened.path, name), record)
        return cls(
            table=opened.path,
            record=record,
            options=options | {"cursor": record.cursor},
            may_repeat_offsets=not fails_on_data_loss,
        )

    def start(
        self,
        spark: SparkSession,
        *,
        token: str | None = None,
        every_s: float | None = None,
        source: type[ArchiveSource] = ArchiveSource,
    ) -> StreamingQuery:
        """Start the streaming query."""
        register_once(spark, source)
        read = spark.readStream.format(source.name()).options(**self.options)
        if token is not None:
            read = read.option("token", token)
        files = read.option(TABLE, str(self.table)).load()
        write = (
            files.observe(OBSERVATION, f.sum("rows").alias("rows"))
            .writeStream.format(source.name())
            .option(TABLE, str(self.table))
            .option(REPEATS, str(self.may_repeat_offsets).lower())
            .option("checkpointLocation", self.record.checkpoint)
        )
        if every_s is None:
            write = write.trigger(availableNow=True)
        else:
            write = write.trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
        query = write.start()
        query_record.save(self.table, msgspec.structs.replace(self.record, query_id=str(query.id)))
        return query


def topic_options(topics: str | Sequence[str] | None, pattern: str | None) -> dict[str, str]:
    """The topics as options of the format `runnel`."""
    if pattern is not None and topics is not None:
        raise ClientFault("give `topics` or `pattern`, not both")
    if pattern is not None:
        return {"pattern": pattern}
    names = (topics,) if isinstance(topics, str) else tuple(topics or ())
    if not names:
        raise ClientFault("which topics? `topics`, one or a list, or `pattern`, as sensors/*")
    if any("," in name or name != name.strip() for name in names):
        # The option `topics` separates names by commas.
        if len(names) > 1:
            raise ClientFault(
                "topics with a comma, or a space at their end, can only be named alone, or by a pattern"
            )
        return {"pattern": literal(names[0])}
    return {"topics": ",".join(names)}


def _starting(text: str) -> dict[str, str]:
    if text in ("earliest", "latest"):
        return {"startingOffsets": text}
    if parse_time_ns(text) is None:
        raise ClientFault(
            f"starting is {text!r}: it must be earliest, latest, or a time as 2025-01-31T12:00:00Z"
        )
    return {"startingTime": text}


def _check_same(known: QueryRecord | None, wanted: QueryRecord) -> None:
    """Refuse other topics: the query's position does not cover them, so their older messages would be left out."""
    if known is None or (known.topics, known.pattern) == (wanted.topics, wanted.pattern):
        return
    raise ClientFault(
        f"the archive {wanted.name!r} of this table is of {known.selection}, not of {wanted.selection}: "
        "give the same as before, or another name for others"
    )


@contextmanager
def _periodic_compaction(
    table: Path, every_s: float | None, vacuum_older_hours: int | None
) -> Iterator[None]:
    """Compact every `every_s` seconds while the `with` block runs. A failure is logged; the next time tries again."""
    if every_s is None:
        yield
        return
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            try:
                compact(
                    table,
                    vacuum_older_hours=vacuum_older_hours,
                    is_wanted=lambda: not is_over.is_set(),
                )
            except (RunnelError, DeltaError, OSError) as error:
                logger.warning("the archive %s was not compacted: %s", table, error)

    thread = threading.Thread(target=run, name="runnel-archive-compaction")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
