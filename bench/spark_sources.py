"""What Runnel is measured against in Spark: sources that have their rows in memory, sinks that drop what they get.

Spark's workers import this module, so it knows nothing of Runnel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType


@lru_cache(maxsize=4)
def _loaded(path: str) -> tuple[pa.RecordBatch, ...]:
    """Read by a worker when it is first asked, and in its memory from then on."""
    with pa.OSFile(path) as file, pa.ipc.open_file(file) as batches:
        return tuple(batches.get_batch(number) for number in range(batches.num_record_batches))


class MemorySource(DataSource):
    """Record batches that were made before. Option `folder`: a file of them for each partition."""

    @classmethod
    def name(cls) -> str:
        return "bench_memory"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - the files' own
        return _MemoryReader(Path(self.options["folder"]))


class _MemoryReader(DataSourceReader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(self._folder.glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return iter(_loaded(partition.value))


class ConstantSource(DataSource):
    """So many rows a second, always the same ones. Options `rate`, and `file` with the rows, at least a second's."""

    @classmethod
    def name(cls) -> str:
        return "bench_constant"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return _ConstantReader(int(self.options["rate"]), self.options["file"])


class _ConstantReader(DataSourceStreamReader):
    def __init__(self, rate: int, file: str) -> None:
        self._rate = rate
        self._file = file
        self._begun_at_s = time.monotonic()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name, as the next
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002, N802
        return {"rows": int((time.monotonic() - self._begun_at_s) * self._rate)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(end["rows"] - start["rows"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        left = partition.value
        while left > 0:
            for batch in _loaded(self._file):
                yield batch.slice(0, left)
                left -= batch.num_rows
                if left <= 0:
                    return


class NothingSink(DataSource):
    """Takes record batches and drops them."""

    @classmethod
    def name(cls) -> str:
        return "bench_nothing"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002, FBT001
        return _NothingWriter()

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002
        overwrite: bool,  # noqa: ARG002, FBT001
    ) -> DataSourceStreamArrowWriter:
        return _NothingStreamWriter()


def _drop(rows: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    for _ in rows:
        pass
    return WriterCommitMessage()


class _NothingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _drop(iterator)


class _NothingStreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _drop(iterator)
