"""Writes messages to Parquet files, one for each topic, partition and day: the work of an archive's task.

Columns stay columns. Each file has a unique name, so a failed attempt leaves at worst a file that the table does not
know.
"""

from __future__ import annotations

import enum
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

from runnel.spark.pipelines.archive.file_sync import EarlySync, sync_files
from runnel.spark.pipelines.archive.layout import (
    CURRENT,
    STATISTICS,
    TIMES,
    ArchiveFile,
    file_path,
    statistics,
)
from runnel.spark.pipelines.archive.row_groups import GROUP_BYTES, GROUP_ROWS

# The limit of all open files together. Beyond it they are closed, and further rows begin new files.
_HELD_BYTES_MAX: Final = 256 * 2**20

_NS_PER_DAY: Final = 86_400 * 10**9
_KEY_BITS: Final = (
    21  # for the partition and for the day, beside the topic's number in a record batch
)

# Columns as Parquet names them.
_TAGS: Final = ["tags.key_value.key", "tags.key_value.value"]
_COLUMNS: Final = [*(name for name in CURRENT.file_schema.names if name != "tags"), *_TAGS]

# Dictionaries only where values repeat, and differences for rising numbers. Both save time and space (bench/spark.py).
_DICTIONARIES: Final = ["topic", *_TAGS, "partition", "key", "size"]
_READY_DICTIONARIES: Final = [
    "topic",
    *_TAGS,
]  # the rows already have these as dictionaries, so encoding them is free
_RISING: Final = ["offset", *TIMES, *(f"{name}_ns" for name in TIMES)]
_ENCODED_ROWS: Final = 16 * 1024  # at once

# Payloads are compressed if a sample shrinks to this share or less. Random bytes, images and the like do not.
_SAMPLE_BYTES: Final = 64 * 1024
_COMPRESSED_SHARE_MAX: Final = 0.9


class Packing(enum.Enum):
    """How a file's columns are packed. Readers read both alike."""

    # For messages from the broker: a third less processor time.
    QUICK = enum.auto()
    # For the results of compaction.
    DENSE = enum.auto()


class _Key(NamedTuple):
    """The messages that one file holds."""

    topic: str
    partition: int
    day: int  # since 1970


class _GrowingFile:
    """An open file of one topic, partition and day. It collects rows until they make a row group."""

    def __init__(self, table: Path, key: _Key, packing: Packing, early_sync: EarlySync) -> None:
        self._key = key
        self._packing = packing
        self._early_sync = early_sync
        self._date = str(np.datetime64(key.day, "D"))
        self._path = file_path(key.topic, self._date)
        self._table = table
        self._writer: pq.ParquetWriter | None = None
        self._gathered: list[pa.Table] = []
        self._gathered_rows = 0
        self._gathered_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._gathered_bytes

    @property
    def full_path(self) -> Path:
        return self._table / self._path

    def add(self, rows: pa.Table) -> None:
        self._gathered.append(rows)
        self._gathered_rows += rows.num_rows
        self._gathered_bytes += rows.nbytes
        if self._gathered_rows >= GROUP_ROWS or self._gathered_bytes >= GROUP_BYTES:
            self._write_group()
            self._early_sync.begin(self.full_path)

    def close(self) -> ArchiveFile:
        self._write_group()
        writer = self._writer
        assert writer is not None, "a file of no rows"
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
            rows = pa.concat_tables(self._gathered)
            if len(self._gathered) > 1:
                # A column with several dictionaries would be written without any.
                rows = rows.unify_dictionaries()
            if self._writer is None:
                self._writer = self._open(rows)
            self._writer.write_table(rows, row_group_size=rows.num_rows)
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0

    def _open(self, rows: pa.Table) -> pq.ParquetWriter:
        """A writer for rows with this schema."""
        self.full_path.parent.mkdir(parents=True, exist_ok=True)
        is_dense = self._packing is Packing.DENSE
        return pq.ParquetWriter(
            self.full_path,
            rows.schema,
            compression="zstd" if is_dense else _quick_compression(rows),
            use_dictionary=_DICTIONARIES if is_dense else _READY_DICTIONARIES,
            column_encoding=dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"),
            write_statistics=["topic", "partition", *_RISING],
            store_schema=False,
            write_batch_size=_ENCODED_ROWS,
        )


def _quick_compression(rows: pa.Table) -> str | dict[str, str]:
    """Snappy, except for payloads whose sample does not shrink, which saves a quarter of their time."""
    sample = _sample(rows.column("payload"))
    share = len(pa.compress(sample, "snappy")) / _SAMPLE_BYTES
    if len(sample) < _SAMPLE_BYTES or share <= _COMPRESSED_SHARE_MAX:
        return "snappy"
    return {**dict.fromkeys(_COLUMNS, "snappy"), "payload": "none"}


def _sample(payloads: pa.ChunkedArray) -> bytes:
    """The first _SAMPLE_BYTES of all payloads, one after the other; fewer only if there are no more."""
    found = b""
    for chunk in payloads.chunks:
        _, offsets, data = chunk.buffers()
        places = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        begin, end = places.item(0), places.item(-1)
        if end > begin:
            found += data[begin : min(end, begin + _SAMPLE_BYTES - len(found))].to_pybytes()
        if len(found) == _SAMPLE_BYTES:
            break
    return found


def _bounds(found: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    """The least and greatest values of columns, from Parquet's own statistics."""
    places = {found.schema.column(place).path: place for place in range(found.num_columns)}
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    bounds = {}
    for name in STATISTICS:
        known = [group.column(places[name]).statistics for group in groups]
        bounds[name] = (min(one.min for one in known), max(one.max for one in known))
    return bounds


class FileWriter:
    """Writes rows to files of a table. Use it in a `with`, which removes the files after an error."""

    def __init__(self, table: str | Path, packing: Packing = Packing.QUICK) -> None:
        self._table = Path(table)
        self._packing = packing
        self._early_sync = EarlySync()
        self._open: dict[_Key, _GrowingFile] = {}
        self._done: list[ArchiveFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._early_sync.stop()
        if error is not None:
            for file in self._open.values():
                file.discard()
            remove_files(self._table, self._done)

    def add(self, rows: pa.Table) -> None:
        """Add rows with the columns of the layout, except `date`, in the order of their offsets.

        Topics and tags may be dictionary arrays, but then in all rows.
        """
        for key, part in _parts(rows):
            file = self._open.get(key)
            if file is None:
                file = self._open[key] = _GrowingFile(
                    self._table, key, self._packing, self._early_sync
                )
            file.add(part)
        if sum(file.held_bytes for file in self._open.values()) > _HELD_BYTES_MAX:
            self._close_all()

    def finish(self) -> list[ArchiveFile]:
        """Close and sync the files; returns them."""
        self._close_all()
        self._early_sync.check()
        sync_files(self._table, [self._table / file.path for file in self._done])
        return self._done

    def _close_all(self) -> None:
        while self._open:
            _, file = self._open.popitem()
            try:
                self._done.append(file.close())
            except BaseException:
                file.discard()
                raise


def _parts(rows: pa.Table) -> Iterator[tuple[_Key, pa.Table]]:
    """The rows of each topic, partition and day, in their original order."""
    if not rows.num_rows:
        return
    times_ns, partitions = rows.column("receive_time_ns"), rows.column("partition")
    first_day, last_day = (time_ns // _NS_PER_DAY for time_ns in _least_and_greatest(times_ns))
    first_partition, last_partition = _least_and_greatest(partitions)
    names = rows.column("topic").unique()
    if len(names) == 1 and first_partition == last_partition and first_day == last_day:
        yield _Key(names[0].as_py(), first_partition, first_day), rows
        return
    topics = rows.column("topic").combine_chunks().dictionary_encode()
    names = topics.dictionary.to_pylist()
    days = np.floor_divide(times_ns.to_numpy(), _NS_PER_DAY)
    keys: NDArray[np.int64] = topics.indices.to_numpy().astype(np.int64)
    keys = ((keys << _KEY_BITS) | partitions.to_numpy()) << _KEY_BITS | (days - first_day)
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


def _least_and_greatest(numbers: pa.ChunkedArray) -> tuple[int, int]:
    found = pc.min_max(numbers)
    return found["min"].as_py(), found["max"].as_py()


def rewrite(table: str | Path, topic: str, paths: Iterable[str]) -> list[ArchiveFile]:
    """Copy the rows of several files of one topic, in order, into as few files as possible."""
    with FileWriter(table, Packing.DENSE) as files:
        for path in paths:
            with pq.ParquetFile(Path(table) / path) as stored:
                for rows in stored.iter_batches():
                    files.add(_as_now(rows, topic))
        return files.finish()


def _as_now(rows: pa.RecordBatch, topic: str) -> pa.Table:
    """The rows with all columns of the current layout. Columns that the file does not have are null."""
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
    return pa.Table.from_arrays(columns, schema=schema)


# --- Files on the disk ---


def remove_files(table: str | Path, files: Iterable[ArchiveFile]) -> None:
    """Delete files that are not part of the table and never will be."""
    for file in files:
        (Path(table) / file.path).unlink(missing_ok=True)
