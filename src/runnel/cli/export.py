"""Writes messages to a file as JSON lines, Arrow or Parquet, under a temporary name until the file is complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from runnel.cli.render.messages import json_lines
from runnel.errors import ClientFault
from runnel.formats.batch import Batch

if TYPE_CHECKING:
    import pyarrow as pa

STANDARD_OUTPUT: Final = "-"

_GATHER_ROWS: Final = 65_536
_GATHER_BYTES: Final = 64 * 2**20
_BUFFER_BYTES: Final = 1 << 20


class ExportSink(Protocol):
    """Takes batches in order. `finish` writes buffered rows; `abandon` drops them."""

    def write(self, batch: Batch) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


# Makes a sink that writes to a file. The function given to it returns the names of all topics to come.
MakeSink = Callable[[BinaryIO, Callable[[], list[str]]], ExportSink]


def sink_maker(target: str) -> MakeSink:
    """Choose the sink by the suffix of the file name. ClientFault if no sink has that suffix, or pyarrow is missing."""
    suffix = Path(target).suffix.lower()
    if target == STANDARD_OUTPUT or suffix == ".jsonl":
        return lambda out, _: JsonLinesSink(out)
    if suffix not in (".arrow", ".parquet"):
        raise ClientFault(
            f"--to {target}: the name must end in .parquet, .arrow or .jsonl, or be - for JSON "
            "lines on standard output"
        )
    try:
        import pyarrow  # noqa: F401 - is it there?
    except ImportError:
        raise ClientFault(
            f"--to {target} needs pyarrow: pip install '.[arrow]', or export to .jsonl"
        ) from None
    return ParquetSink if suffix == ".parquet" else ArrowSink


def _open_private(path: str, flags: int) -> int:
    """Open a file for its owner alone: stored data is private, so exported data is too."""
    return os.open(path, flags, 0o600)


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a new file that gets its name, and replaces an older file, when all of it is synced."""
    if target.is_dir():
        raise ClientFault(f"cannot write {target}: it is a directory")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        out = open(unfinished, "xb", buffering=_BUFFER_BYTES, opener=_open_private)  # noqa: SIM115
    except OSError as error:
        raise ClientFault(f"cannot write {target}: {error.strerror}") from None
    try:
        try:
            yield out
        except BaseException:
            with suppress(OSError):  # closing would fail again with the error of the write
                out.close()
            raise
        with naming(str(target)), out:
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            unfinished.unlink()
        raise


@contextmanager
def naming(target: str) -> Iterator[None]:
    """Add the file's name to errors of writing, which the system leaves out."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader left early; nothing is printed about it
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, target) from error


# --- JSON lines ---


class JsonLinesSink:
    """Writes one JSON object per line, as `runnel sub --format json` prints it."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, batch: Batch) -> None:
        self._out.write(json_lines(batch.messages()))

    def finish(self) -> None:
        self._out.flush()

    def abandon(self) -> None:
        """There is no buffer."""


# --- Arrow and Parquet ---


class _TableBuilder:
    """Collects batches into tables of about 64 thousand rows. A topic has the same dictionary index in every table."""

    def __init__(self, write_table: Callable[[pa.Table], None], topics: list[str]) -> None:
        self._write_table = write_table
        self._numbers = {name: number for number, name in enumerate(topics)}
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: Batch) -> None:
        self._waiting.append(batch.to_arrow())
        self._rows += len(batch)
        self._bytes += batch.envelope.body_bytes
        if self._rows >= _GATHER_ROWS or self._bytes >= _GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        import pyarrow as pa

        table = pa.Table.from_batches(self._waiting).unify_dictionaries().combine_chunks()
        self._waiting.clear()
        self._rows = self._bytes = 0
        topics = table.column("topic").chunk(0)
        names = topics.dictionary.to_pylist()
        numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
        renumbered = pa.DictionaryArray.from_arrays(
            pa.array(numbers, pa.int32()).take(topics.indices),
            pa.array(list(self._numbers), pa.string()),
        )
        self._write_table(table.set_column(0, table.schema.field("topic"), renumbered))


class ArrowSink:
    """Writes an Arrow IPC file.

    The dictionary of topics could grow from batch to batch, but not every reader of such files supports that. So it
    begins complete, and grows only for topics that are created during the export.
    """

    def __init__(self, out: BinaryIO, topics: Callable[[], list[str]]) -> None:
        import pyarrow as pa

        from runnel.formats.arrow import SCHEMA

        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        self._writer = pa.ipc.new_file(out, SCHEMA, options=options)
        self._gathering = _TableBuilder(self._writer.write_table, topics())

    def write(self, batch: Batch) -> None:
        self._gathering.add(batch)

    def finish(self) -> None:
        self._gathering.flush()
        self._writer.close()

    def abandon(self) -> None:
        """The buffer is in memory only."""


class ParquetSink:
    """Writes a Parquet file with times in nanoseconds; each collected table is a row group."""

    def __init__(self, out: BinaryIO, _: Callable[[], list[str]]) -> None:
        import pyarrow.parquet as pq

        from runnel.formats.arrow import SCHEMA

        self._writer = pq.ParquetWriter(out, SCHEMA, version="2.6", compression="zstd")
        self._gathering = _TableBuilder(self._write_row_group, [])

    def _write_row_group(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=len(table))

    def write(self, batch: Batch) -> None:
        self._gathering.add(batch)

    def finish(self) -> None:
        self._gathering.flush()
        self._writer.close()

    def abandon(self) -> None:
        # Otherwise the writer adds a footer when it is garbage-collected, to a file that is closed by then.
        self._writer.is_open = False
