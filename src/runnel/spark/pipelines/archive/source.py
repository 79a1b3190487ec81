"""The two ends of an archive's streaming query: tasks that write files, and a commit that adds them to the table.

What flows between them is one row for each file. A micro-batch that is run again writes its files anew, under other
names; the table takes those of one attempt and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from runnel.errors import ClientFault
from runnel.spark.connections import usual_url
from runnel.spark.options import stream_options
from runnel.spark.pipelines.archive.file_writer import FileWriter
from runnel.spark.pipelines.archive.layout import ArchiveFile
from runnel.spark.pipelines.archive.row_groups import row_groups
from runnel.spark.read import schema
from runnel.spark.read.query_cursor import StreamPartition
from runnel.spark.read.ranges import read
from runnel.spark.read.stream_reader import StreamReader

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT: Final = "runnel_archive"
TABLE: Final = "table"
REPEATS: Final = "mayrepeatoffsets"
_QUERY_ID: Final = "sql.streaming.queryId"

# `rows` is for the query's progress, the rest is the file as the commit needs it.
FILES: Final = StructType([StructField("rows", LongType()), StructField("file", StringType())])
_ARROW_FILES: Final = pa.schema([("rows", pa.int64()), ("file", pa.string())])


class ArchiveSource(DataSource):
    """Not for users: `runnel.spark.archive` puts both ends together."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return FILES

    def streamReader(self, schema: StructType) -> ArchiveReader:  # noqa: ARG002, N802 - Spark's name
        return ArchiveReader(dict(self.options))

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002
        overwrite: bool,  # noqa: ARG002, FBT001
    ) -> ArchiveWriter:
        return ArchiveWriter(dict(self.options))


class ArchiveReader(StreamReader):
    """Plans as every stream from topics does. Its tasks keep the messages, and tell only which files hold them."""

    def __init__(self, options: dict[str, str]) -> None:
        self._table = options.pop(TABLE)
        super().__init__(
            stream_options(options, url=usual_url()), schema.arrow_schema(schema.SPARK_SCHEMA)
        )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, StreamPartition)
        if partition.step is not None:
            partition.step.take()
        batches = chain.from_iterable(map(read, partition.ranges))
        with FileWriter(self._table) as writer:
            for rows in row_groups(batches):
                writer.add(rows)
            files = writer.finish()
        if files:
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([file.statistics.rows for file in files]),
                    pa.array([msgspec.json.encode(file).decode() for file in files]),
                ],
                schema=_ARROW_FILES,
            )


class TaskFiles(WriterCommitMessage):
    """The files of one task, and of which query."""

    def __init__(self, query_id: str, files: Sequence[ArchiveFile]) -> None:
        self.query_id = query_id
        self.files = files


class ArchiveWriter(DataSourceStreamArrowWriter):
    """Gathers what the tasks tell, and makes one transaction of each micro-batch."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._table = options[TABLE]
        self._may_repeat = options[REPEATS] == "true"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        if query_id is None:
            raise ClientFault(f"Spark does not say which query this is: {_QUERY_ID} is not set")
        return TaskFiles(
            query_id,
            [
                msgspec.json.decode(text, type=ArchiveFile)
                for rows in iterator
                for text in rows.column("file").to_pylist()
            ],
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Once: Spark repeats a micro-batch of which it does not know that it was committed."""
        told = [message for message in messages if isinstance(message, TaskFiles)]
        files = [file for message in told for file in message.files]
        if files:
            # Only the driver commits, so only it needs the library.
            from runnel.spark.pipelines.archive.table import ArchiveTable

            table = ArchiveTable.open(self._table)
            table.add(files, app_id(told[0].query_id), batchId, may_repeat_offsets=self._may_repeat)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is undone: the commit may have happened. Files that the table does not know go with a vacuum."""


def app_id(query_id: str) -> str:
    """What the table knows a query by."""
    return f"runnel/archive/{query_id}"
