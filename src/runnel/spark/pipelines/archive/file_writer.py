"""Messages into Parquet files, one for each topic, partition and day: what a task of the archive does.

Columns stay columns. A file has a name that nobody else ever uses, so an attempt that failed leaves at worst a file
that the table does not know.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from runnel.spark.pipelines.archive.layout import (
    CURRENT,
    STATISTICS,
    TIMES,
    ArchiveFile,
    file_path,
    statistics,
)

# A row group is what readers skip or take whole, and what a file's writer holds in memory.
_GROUP_ROWS: Final = 256 * 1024
_GROUP_BYTES: Final = 16 * 2**20
# Of all files together; beyond it they are closed, and further rows begin new ones.
_HELD_BYTES_MAX: Final = 256 * 2**20
# More files than this are synced with everything else on the machine, in one go.
_SYNCED_ALONE_MAX: Final = 64

_NS_PER_DAY: Final = 86_400 * 10**9
_KEY_BITS: Final = 21  # for partitions and days each, beside the topic's number in a record batch

# Dictionaries only where values repeat; numbers that grow as differences. Both save time and room (bench/spark.py).
_DICTIONARIES: Final = [
    "topic",
    "partition",
    "key",
    "size",
    "tags.key_value.key",
    "tags.key_value.value",
]
_RISING: Final = ["offset", *TIMES, *(f"{name}_ns" for name in TIMES)]


class Packing(enum.Enum):
    """How a file's columns are packed. Both are read alike."""

    # For what comes from the broker: 2.02 M rows/s instead of 1.78 M (bench/spark.py, "archive").
    QUICK = enum.auto()
    # For files that are to stay.
    DENSE = enum.auto()


class _Key(NamedTuple):
    topic: str
    partition: int
    day: int  # since 1970


class _OpenFile:
    """A file of one topic, partition and day. Rows are gathered until they make a row group."""

    def __init__(self, table: Path, key: _Key, packing: Packing) -> None:
        self._key = key
        self._packing = packing
        self._date = str(np.datetime64(key.day, "D"))
        self._path = file_path(key.topic, self._date)
        self._table = table
        self._writer: pq.ParquetWriter | None = None
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._gathered_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._gathered_bytes

    @property
    def full_path(self) -> Path:
        return self._table / self._path

    def add(self, rows: pa.RecordBatch) -> None:
        self._gathered.append(rows)
        self._gathered_rows += rows.num_rows
        self._gathered_bytes += rows.nbytes
        if self._gathered_rows >= _GROUP_ROWS or self._gathered_bytes >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> ArchiveFile:
        self._write_group()
        writer = self._open()
        writer.close()
        self._writer = None
        found = writer.writer.metadata
        return ArchiveFile(
            path=self._path,
            size_bytes=self.full_path.stat().st_size,
            topic=self._key.topic,
            date=self._date,
            statistics=statistics(found.num_rows, _bounds(found)),
        )

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.full_path.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if self._gathered:
            rows = pa.Table.from_batches(self._gathered)
            self._open().write_table(rows, row_group_size=rows.num_rows)
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            self.full_path.parent.mkdir(parents=True, exist_ok=True)
            is_dense = self._packing is Packing.DENSE
            self._writer = pq.ParquetWriter(
                self.full_path,
                CURRENT.file_schema,
                compression="zstd" if is_dense else "snappy",
                use_dictionary=_DICTIONARIES if is_dense else False,
                column_encoding=dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"),
                write_statistics=["topic", "partition", *_RISING],
                store_schema=False,
            )
        return self._writer


def _bounds(found: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    """What Parquet itself knows of a file's columns, so that nobody counts twice."""
    places = {found.schema.column(place).path: place for place in range(found.num_columns)}
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    bounds = {}
    for name in STATISTICS:
        known = [group.column(places[name]).statistics for group in groups]
        bounds[name] = (min(one.min for one in known), max(one.max for one in known))
    return bounds


class FileWriter:
    """Writes rows into files of a table. Use it in a `with`: what an error leaves behind is removed."""

    def __init__(self, table: str | Path, packing: Packing = Packing.QUICK) -> None:
        self._table = Path(table)
        self._packing = packing
        self._open: dict[_Key, _OpenFile] = {}
        self._done: list[ArchiveFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for file in self._open.values():
                file.discard()
            remove_files(self._table, self._done)

    def add(self, rows: pa.RecordBatch) -> None:
        """Rows with the columns of the layout, `date` aside, in the order of their offsets."""
        for key, part in _parts(rows):
            file = self._open.get(key)
            if file is None:
                file = self._open[key] = _OpenFile(self._table, key, self._packing)
            file.add(part)
        if sum(file.held_bytes for file in self._open.values()) > _HELD_BYTES_MAX:
            self._close_all()

    def finish(self) -> list[ArchiveFile]:
        """The files, which are on the disk when this returns."""
        self._close_all()
        _sync(self._table, self._done)
        return self._done

    def _close_all(self) -> None:
        while self._open:
            _, file = self._open.popitem()
            try:
                self._done.append(file.close())
            except BaseException:
                file.discard()
                raise


def _parts(rows: pa.RecordBatch) -> Iterator[tuple[_Key, pa.RecordBatch]]:
    """The rows of each topic, partition and day, in the order in which they came."""
    if not rows.num_rows:
        return
    topics = rows.column("topic").dictionary_encode()
    names = topics.dictionary.to_pylist()
    partitions = rows.column("partition").to_numpy()
    days = np.floor_divide(rows.column("receive_time_ns").to_numpy(), _NS_PER_DAY)
    first_day = int(days.min())
    keys: NDArray[np.int64] = topics.indices.to_numpy().astype(np.int64)
    keys = ((keys << _KEY_BITS) | partitions) << _KEY_BITS | (days - first_day)
    rows = rows.select(CURRENT.file_schema.names)
    if (keys == keys[0]).all():
        yield _Key(names[0], int(partitions[0]), first_day), rows
        return
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    rows = rows.take(pa.array(order))
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    mask = (1 << _KEY_BITS) - 1
    for begin, end in pairwise(edges):
        key = int(keys[begin])
        yield (
            _Key(names[key >> 2 * _KEY_BITS], key >> _KEY_BITS & mask, first_day + (key & mask)),
            rows.slice(begin, end - begin),
        )


def rewrite(table: str | Path, topic: str, paths: Iterable[str]) -> list[ArchiveFile]:
    """The rows of several files of one topic in as few as can be, one after the other."""
    with FileWriter(table, Packing.DENSE) as files:
        for path in paths:
            with pq.ParquetFile(Path(table) / path) as stored:
                for rows in stored.iter_batches():
                    files.add(_as_now(rows, topic))
        return files.finish()


def _as_now(rows: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    """With all columns of today's layout: those that came later are null."""
    schema = CURRENT.file_schema
    count = rows.num_rows
    columns = []
    for field in schema:
        if field.name == "topic":
            columns.append(pa.repeat(pa.scalar(topic, field.type), count))
        elif field.name in rows.schema.names:
            columns.append(pc.cast(rows.column(field.name), field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- Files on the disk ---


def remove_files(table: str | Path, files: Iterable[ArchiveFile]) -> None:
    """Files that the table does not know and never will."""
    for file in files:
        (Path(table) / file.path).unlink(missing_ok=True)


def _sync(table: Path, files: list[ArchiveFile]) -> None:
    """On the disk before anybody is told of them: the log of the table must not name what a crash takes away."""
    if len(files) > _SYNCED_ALONE_MAX:
        os.sync()
        return
    directories = set()
    for file in files:
        path = table / file.path
        sync_path(path)
        directories |= {path.parent, path.parent.parent, table}
    for path in directories:
        sync_path(path)


def sync_path(path: Path) -> None:
    """A file's bytes, or a directory's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
