"""Messages written to a file: JSON lines, Arrow or Parquet, under a temporary name until it is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from runnel.cli.messages import json_lines
from runnel.errors import ClientFault
from runnel.formats.batch import Batch

if TYPE_CHECKING:
    import pyarrow as pa

STANDARD_OUTPUT: Final = "-"

_GATHER_ROWS: Final = 65_536
_GATHER_BYTES: Final = 64 * 2**20
_BUFFER_BYTES: Final = 1 << 20


class Sink(Protocol):
    """Takes batches in order; what it holds back is written by `finish`, or never after `abandon`."""

    def write(self, batch: Batch) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


# Makes a sink that writes to a file, given a function that names all topics to come.
MakeSink = Callable[[BinaryIO, Callable[[], list[str]]], Sink]


def sink_maker(target: str) -> MakeSink:
    """What writes files of this name's kind. ClientFault if there is none, or pyarrow is missing."""
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
    """What was stored privately is exported privately."""
    return os.open(path, flags, 0o600)


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A new file that gets its name when all of it is stored, in place of what had that name."""
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
            with suppress(OSError):  # it would fail to write again what it failed to write before
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
    """Errors of writing say what was written to: the system does not tell."""
    try:
        yield
    except BrokenPipeError:
        raise  # a reader that left early; nothing is said of it
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, target) from error


# --- JSON lines ---


class JsonLinesSink:
    """A JSON object a line, as the commands that talk to a broker print them too."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, batch: Batch) -> None:
        self._out.write(json_lines(batch.messages()))

    def finish(self) -> None:
        self._out.flush()

    def abandon(self) -> None:
        """Nothing is held back."""


# --- Arrow and Parquet ---


class _Gathering:
    """Batches gathered into tables of about 64 thousand rows; topics are numbered alike in all."""

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
    """An Arrow IPC file.

    Its dictionary of topics could grow from batch to batch, but not every reader of such files knows
    how: so it begins complete, and grows only for topics made while we read.
    """

    def __init__(self, out: BinaryIO, topics: Callable[[], list[str]]) -> None:
        import pyarrow as pa

        from runnel.formats.arrow import SCHEMA

        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        self._writer = pa.ipc.new_file(out, SCHEMA, options=options)
        self._gathering = _Gathering(self._writer.write_table, topics())

    def write(self, batch: Batch) -> None:
        self._gathering.add(batch)

    def finish(self) -> None:
        self._gathering.flush()
        self._writer.close()

    def abandon(self) -> None:
        """What is held back is in memory alone."""


class ParquetSink:
    """A Parquet file with times in nanoseconds; its row groups are what was gathered."""

    def __init__(self, out: BinaryIO, _: Callable[[], list[str]]) -> None:
        import pyarrow.parquet as pq

        from runnel.formats.arrow import SCHEMA

        self._writer = pq.ParquetWriter(out, SCHEMA, version="2.6", compression="zstd")
        self._gathering = _Gathering(self._write_row_group, [])

    def _write_row_group(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=len(table))

    def write(self, batch: Batch) -> None:
        self._gathering.add(batch)

    def finish(self) -> None:
        self._gathering.flush()
        self._writer.close()

    def abandon(self) -> None:
        # Otherwise it writes a footer when it is collected, to a file that is closed by then.
        self._writer.is_open = False
