"""A Spark driver that archives, and that a test can kill: tasks are retried in it, unlike in a plain local[2].

Usage: python archive_driver.py URL DIRECTORY. It archives everything into two tables at once. In both, each task fails
once after it has written its files. The one never gets to its commit, the other never out of it; a file in the
directory tells when they are there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from runnel.spark.pipelines.archive.job import ArchivePlan
from runnel.spark.pipelines.archive.source import ArchiveReader, ArchiveSource, ArchiveWriter
from runnel.spark.runtime.session import session


class FailingReader(ArchiveReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        rows = list(super().read(partition))
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("failed after writing")
        return iter(rows)


class StuckWriter(ArchiveWriter):
    is_committing: bool

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if self.is_committing:
            super().commit(messages, batchId)
        Path(f"{self._table}-stuck").touch()
        threading.Event().wait()


class StuckBefore(ArchiveSource):
    is_committing = False

    @classmethod
    def name(cls) -> str:
        return "stuck_before"

    def streamReader(self, schema: StructType) -> ArchiveReader:  # noqa: N802
        return FailingReader(dict(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> ArchiveWriter:  # noqa: N802
        writer = StuckWriter(dict(self.options))
        writer.is_committing = self.is_committing
        return writer


class StuckAfter(StuckBefore):
    is_committing = True

    @classmethod
    def name(cls) -> str:
        return "stuck_after"


def main(url: str, directory: Path) -> None:
    spark = session(
        "driver",
        "local[2,3]",
        # It does not live long enough for the better compiler to pay.
        {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
    for source in (StuckBefore, StuckAfter):
        plan = ArchivePlan.make(directory / source.name(), pattern="*", url=url)
        plan.start(spark, source=source)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
