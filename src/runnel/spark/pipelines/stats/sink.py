"""The sink of `stats`: collects a micro-batch's figures in the driver, stores them and publishes them.

Figures are few, so they pass through the driver: the table may be on a disk that executors do not reach. They are
stored before they are published. After a failure in between, the micro-batch is repeated: the table then already has
the figures, and they are published again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from runnel.spark.connections import BrokerLogin, connection
from runnel.spark.pipelines.stats.documents import figures_of
from runnel.spark.pipelines.stats.table import append_once, check_table
from runnel.spark.pipelines.stats.windows import FIGURES

FORMAT: Final = "runnel_stats"
_QUERY_ID: Final = "sql.streaming.queryId"  # a local property of the query's jobs
_ORDER: Final = [("window_end", "ascending"), ("window_start", "ascending"), ("topic", "ascending")]


class Destination(msgspec.Struct, frozen=True):
    """Where figures go: a table, topics below a prefix, or both."""

    address: BrokerLogin
    table: str | None
    prefix: str | None

    @property
    def options(self) -> dict[str, str]:
        """The destination as options of the sink. Spark hides an option named `token`."""
        given = {
            "url": self.address.url,
            "token": self.address.token,
            "table": self.table,
            "prefix": self.prefix,
        }
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> Destination:
        address = BrokerLogin(options["url"], options.get("token"))
        return cls(address, options.get("table"), options.get("prefix"))


class StatsSink(DataSource):
    """The internal format of `stats`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002
        overwrite: bool,  # noqa: ARG002, FBT001
    ) -> DataSourceStreamArrowWriter:
        return StatsWriter(Destination.of_options(self.options))


class TaskFigures(WriterCommitMessage):
    """The commit message of a task: its figures as an Arrow stream."""

    def __init__(self, query_id: str, figures: bytes) -> None:
        self.query_id = query_id
        self.figures = figures


class StatsWriter(DataSourceStreamArrowWriter):
    """Stores and publishes the figures of each micro-batch."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        if destination.table is not None:
            check_table(destination.table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None  # Spark calls `write` within tasks
        query_id = context.getLocalProperty(_QUERY_ID)
        assert query_id is not None  # tasks of a streaming query have one
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            buffer, FIGURES, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as stream:
            for batch in iterator:
                stream.write_table(pa.Table.from_batches([batch]).cast(FIGURES))
        return TaskFigures(query_id, buffer.getvalue().to_pybytes())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        parts = [message for message in messages if isinstance(message, TaskFigures)]
        if not parts:
            return
        rows = pa.concat_tables(pa.ipc.open_stream(part.figures).read_all() for part in parts)
        if not len(rows):
            return
        rows = rows.sort_by(_ORDER)
        destination = self._destination
        if destination.table is not None:
            append_once(destination.table, rows, query_id=parts[0].query_id, batch_id=batchId)
        if destination.prefix is not None:
            publish(destination.address, destination.prefix, rows)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: stored and published figures stay, and the micro-batch is repeated."""


def publish(address: BrokerLogin, prefix: str, rows: pa.Table) -> None:
    """Publish all figures, oldest window first, so that the last value of each topic is the newest."""
    with connection(address).publisher() as publisher:
        for figure in figures_of(rows, prefix):
            publisher.send(
                figure.payload, figure.topic, figure.key, figure.tags, figure.event_time_ns
            )
