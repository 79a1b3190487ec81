"""The sink of `stats`: a micro-batch's figures, gathered where the query is planned, then stored and published.

Figures are few, so they pass through one place: the table may lie on a disk that executors do not see. It has them
before anybody hears of them. What fails in between comes again with the same micro-batch: then the table has it, and it
is published again.
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
        """As Spark carries it to the sink; it shows no option whose name is `token`."""
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
    """What a task has of a micro-batch's figures, as an Arrow stream."""

    def __init__(self, query_id: str, figures: bytes) -> None:
        self.query_id = query_id
        self.figures = figures


class StatsWriter(DataSourceStreamArrowWriter):
    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        if destination.table is not None:
            check_table(destination.table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None  # Spark calls it within tasks
        query_id = context.getLocalProperty(_QUERY_ID)
        assert query_id is not None  # and those of a streaming query have one
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
        """Whatever is in the table or was published stays: the micro-batch comes again."""


def publish(address: BrokerLogin, prefix: str, rows: pa.Table) -> None:
    """All of them, oldest window first, so that the last value of each topic is the newest."""
    with connection(address).publisher() as publisher:
        for figure in figures_of(rows, prefix):
            publisher.send(
                figure.payload, figure.topic, figure.key, figure.tags, figure.event_time_ns
            )
