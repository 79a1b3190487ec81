"""The source and the sink of an archive's streaming query: tasks write files, and a commit adds them to the table.

One row for each file flows between them. A repeated micro-batch writes its files again under other names; the table
takes the files of exactly one attempt.
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
from runnel.spark.connections import default_url
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

# `rows` is for the query's progress; `file` is the encoded `ArchiveFile` for the commit.
FILES: Final = StructType([StructField("rows", LongType()), StructField("file", StringType())])
_ARROW_FILES: Final = pa.schema([("rows", pa.int64()), ("file", pa.string())])


class ArchiveSource(DataSource):
    """The internal format of `runnel.spark.archive`, which uses it as source and as sink."""

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
    """Plans like every stream from topics. Its tasks write the messages to files, and return only the list of files."""

    def __init__(self, options: dict[str, str]) -> None:
        self._table = options.pop(TABLE)
        super().__init__(
            stream_options(options, url=default_url()), schema.arrow_schema(schema.SPARK_SCHEMA)
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
    """The commit message of a task: its files, and the id of the query."""

    def __init__(self, query_id: str, files: Sequence[ArchiveFile]) -> None:
        self.query_id = query_id
        self.files = files


class ArchiveWriter(DataSourceStreamArrowWriter):
    """Collects the files of all tasks, and adds each micro-batch to the table in one transaction."""

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
        """Add the files, unless the table has this micro-batch: Spark may repeat a committed one."""
        written = [message for message in messages if isinstance(message, TaskFiles)]
        files = [file for message in written for file in message.files]
        if files:
            # Only the driver commits, so only the driver needs the library.
            from runnel.spark.pipelines.archive.table import ArchiveTable

            table = ArchiveTable.open(self._table)
            query = app_id(written[0].query_id)
            table.add(files, query, batchId, may_repeat_offsets=self._may_repeat)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: the commit may have succeeded. A vacuum removes files that the table does not know."""


def app_id(query_id: str) -> str:
    """The application id of a query in the table's transactions."""
    return f"runnel/archive/{query_id}"
