"""Writes the rows of a query to a Delta table, each micro-batch once, and publishes dead letters beside them.

Tasks write Parquet files with unique names. The driver adds them to the table in one transaction that names the query
and its micro-batch. A repeated micro-batch writes new files, but the driver skips a transaction that the table already
has; the files of the other attempt stay unused until the table is vacuumed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from runnel.errors import ClientFault
from runnel.spark.write.writer import (
    TaskIdentity,
    WriteOptions,
    current_task,
    identity_in_query,
    publish_rows,
    query_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "runnel_table"
LETTER: Final = (
    "__dead_letter"  # a struct of the columns of format `runnel`; null in rows of the table
)
_PATH: Final = "path"
_FILE_BYTES_MAX: Final = 128 * 2**20


class TableFile(msgspec.Struct, frozen=True):
    """A file that a task has written."""

    name: str
    size: int
    rows: int


class WrittenFiles(WriterCommitMessage):
    """The commit message of a task."""

    def __init__(self, query_id: str | None, files: Sequence[TableFile]) -> None:
        self.query_id = query_id
        self.files = tuple(files)


class TableSink(DataSource):
    """`format("runnel_table")`, registered where it is used. Options: `path`, and those of `runnel` for letters."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001
        return _BatchTableWriter(_TableWrite.of(dict(self.options), schema), overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamArrowWriter:
        return _StreamTableWriter(_TableWrite.of(dict(self.options), schema), overwrite=overwrite)


class _BatchTableWriter(DataSourceArrowWriter):
    """Writes the rows of a batch query."""

    def __init__(self, work: _TableWrite, *, overwrite: bool) -> None:
        self._work = work
        self._overwrite = overwrite
        self._write_id = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        partition = current_task().partitionId()
        identity = TaskIdentity(f"{self._work.name}/{self._write_id}/{partition}", 1, partition)
        return WrittenFiles(None, self._work.do(iterator, identity))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._work.commit(_files(messages), transaction=None, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: files that no transaction names are not part of the table."""


class _StreamTableWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query."""

    def __init__(self, work: _TableWrite, *, overwrite: bool) -> None:
        self._work = work
        self._overwrite = overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = current_task()
        query_id = query_of(context)
        identity = identity_in_query(self._work.name, query_id, context)
        return WrittenFiles(query_id, self._work.do(iterator, identity))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        written = [message for message in messages if isinstance(message, WrittenFiles)]
        if written:
            assert written[0].query_id is not None
            self._work.commit(
                _files(messages),
                transaction=(written[0].query_id, batchId),
                overwrite=self._overwrite,
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: the micro-batch is repeated, and its transaction may have succeeded."""


def _files(messages: Sequence[WriterCommitMessage | None]) -> list[TableFile]:
    return [
        file for message in messages if isinstance(message, WrittenFiles) for file in message.files
    ]


class _TableWrite:
    """The work of tasks and driver, for streams and batches alike."""

    def __init__(self, path: str, columns: pa.Schema, letters: WriteOptions | None) -> None:
        self._path = path
        self._columns = columns
        self._letters = letters
        self.name = (letters.producer if letters is not None else None) or "table"

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> _TableWrite:
        others = dict(options)
        path = others.pop(_PATH)
        if "://" not in path:
            path = str(Path(path).absolute())
        fields = [field for field in schema.fields if field.name != LETTER]
        columns = to_arrow_schema(StructType(fields), timezone="UTC")
        letters = WriteOptions.parse(others) if len(fields) < len(schema.fields) else None
        _prepare(path, columns)
        return cls(path, columns, letters)

    # --- In a task ---

    def do(self, iterator: Iterator[pa.RecordBatch], identity: TaskIdentity) -> list[TableFile]:
        with _FileWriter(self._path, self._columns) as writer:
            letters = self._sort_out(iterator, writer)
            if self._letters is None:
                for _ in letters:
                    raise AssertionError("a dead letter where there can be none")
            else:
                publish_rows(letters, self._letters, identity)
        return writer.files

    def _sort_out(
        self, iterator: Iterator[pa.RecordBatch], writer: _FileWriter
    ) -> Iterator[pa.RecordBatch]:
        """Write the table's rows to its files, and yield the dead letters."""
        import pyarrow as pa

        for rows in iterator:
            if self._letters is None:
                writer.write(rows)
                continue
            found = rows.column(LETTER)
            if found.null_count < len(found):
                letters = pa.RecordBatch.from_struct_array(found.drop_null())
                yield letters
            own = rows.filter(found.is_null()).drop_columns([LETTER])
            if own.num_rows:
                writer.write(own)

    # --- In the driver ---

    def commit(
        self, files: Sequence[TableFile], *, transaction: tuple[str, int] | None, overwrite: bool
    ) -> None:
        from deltalake import CommitProperties, DeltaTable, Schema, Transaction
        from deltalake.transaction import AddAction

        table = DeltaTable(self._path)
        if transaction is not None:
            done = table.transaction_version(transaction[0])
            if done is not None and done >= transaction[1]:
                return
        now_ms = time.time_ns() // 10**6
        table.create_write_transaction(
            [
                AddAction(
                    file.name,
                    file.size,
                    {},
                    now_ms,
                    data_change=True,
                    stats=msgspec.json.encode({"numRecords": file.rows}).decode(),
                )
                for file in files
            ],
            mode="overwrite" if overwrite else "append",
            schema=Schema.from_arrow(self._columns),
            commit_properties=None
            if transaction is None
            else CommitProperties(app_transactions=[Transaction(*transaction)]),
        )


def _prepare(path: str, columns: pa.Schema) -> None:
    """Create the table if it does not exist. Refuse columns that it does not have, before any row is read."""
    import pyarrow as pa
    from deltalake import DeltaTable, Schema
    from deltalake.exceptions import DeltaError

    if "://" not in path and Path(path).is_file():
        raise ClientFault(f"table {path} is a file: it must be a directory")
    if not DeltaTable.is_deltatable(path):
        if "://" not in path and Path(path).is_dir() and any(Path(path).iterdir()):
            raise ClientFault(f"table {path}: the directory is there, and is no Delta table")
        try:
            DeltaTable.create(path, Schema.from_arrow(columns), mode="ignore")
        except (DeltaError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ClientFault(f"the table {path} cannot be made: {reason}") from None
    stored = pa.schema(DeltaTable(path).schema().to_arrow())
    existing = {field.name: field.type for field in stored}
    given = {field.name: field.type for field in columns}
    if existing != given:
        raise ClientFault(
            f"table {path} has the columns {_listed(existing)}, the query gives {_listed(given)}: select the same "
            "columns, with CAST where types differ, or choose another table"
        )


def _listed(columns: Mapping[str, pa.DataType]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


class _FileWriter:
    """Writes a task's files. Each is opened when its first rows come, and has a unique name."""

    def __init__(self, path: str, columns: pa.Schema) -> None:
        from pyarrow import fs

        self._columns = columns
        if "://" in path:
            self._files, self._directory = fs.FileSystem.from_uri(path)
        else:
            self._files, self._directory = fs.LocalFileSystem(), path
        self._open: tuple[str, pa.parquet.ParquetWriter] | None = None
        self._rows = self._bytes = 0
        self.files: list[TableFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, rows: pa.RecordBatch) -> None:
        from pyarrow import parquet

        if self._open is None:
            self._files.create_dir(self._directory, recursive=True)
            name = f"part-{uuid.uuid4().hex}.parquet"
            where = f"{self._directory}/{name}"
            self._open = (
                name,
                parquet.ParquetWriter(
                    where, self._columns, filesystem=self._files, compression="zstd"
                ),
            )
        self._open[1].write_batch(rows.cast(self._columns))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._bytes >= _FILE_BYTES_MAX:
            self._close()

    def _close(self) -> None:
        if self._open is None:
            return
        name, writer = self._open
        writer.close()
        size = self._files.get_file_info(f"{self._directory}/{name}").size
        self.files.append(TableFile(name, size, self._rows))
        self._open, self._rows, self._bytes = None, 0, 0
