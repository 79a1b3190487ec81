"""A Spark driver that a test can kill: a process of its own, in which tasks are retried, unlike in a plain local[2].

Usage: python driver.py URL DIRECTORY. It writes rows through a sink whose tasks fail after they have written, first so
that they are retried, then so that the stage before them is too. Then it runs a query that writes twice for each batch
and fails, and runs it again. Last it begins one whose first commit never returns. A line on standard output tells of
each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from runnel.spark.session import session
from runnel.spark.writer import BatchWriter, StreamWriter

ROWS = 25_000


class FailingWriter(BatchWriter):
    """Writes everything, and fails: each task once. With `lost_files`, what the stage before wrote is gone then."""

    failed: str
    lost_files: str | None = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        told = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        mark = Path(f"{self.failed}-{context.partitionId()}")
        if not mark.exists():
            mark.touch()
            if self.lost_files is not None:
                for path in Path(self.lost_files).rglob("shuffle_*"):
                    path.unlink(missing_ok=True)
            raise RuntimeError("failed after writing")
        return told


class StuckWriter(StreamWriter):
    """Never commits, and says when it should."""

    marker: str

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        Path(self.marker).touch()
        threading.Event().wait()


class FailingSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "failing"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        options = dict(self.options)
        failed, lost_files = options.pop("failed"), options.pop("lostfiles", None)
        writer = FailingWriter(options, schema, overwrite=overwrite)
        writer.failed, writer.lost_files = failed, lost_files
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        options = dict(self.options)
        marker = options.pop("marker")
        writer = StuckWriter(options, schema, overwrite=overwrite)
        writer.marker = marker
        return writer


def numbered(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS payload")


def stage_attempts(spark: SparkSession) -> int:
    """Of the stage that was tried most often."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    return 1 + max(stage.currentAttemptId for stage in stages if stage)


def write_twice(spark: SparkSession, url: str, directory: Path, *, fails: bool) -> None:
    """The rows there are, within foreachBatch: all into one topic, a few into another."""

    def write(rows: DataFrame, batch_id: int) -> None:
        sink = rows.write.format("runnel").mode("append").option("url", url)
        sink.options(topic="all", producer="all").save()
        sink = rows.where("payload < 10").write.format("runnel").mode("append").option("url", url)
        sink.options(topic="few", producer="few").save()
        if fails:
            raise RuntimeError("after writing")

    rows = spark.readStream.schema("payload string").json(str(directory / "rows"))
    stream = rows.writeStream.foreachBatch(write).trigger(availableNow=True)
    query = stream.option("checkpointLocation", str(directory / "foreach")).start()
    query.awaitTermination()


def main(url: str, directory: Path) -> None:
    spark = session(
        "driver",
        "local[2,3]",
        {
            "spark.local.dir": str(directory / "local"),
            "spark.sql.shuffle.partitions": "2",
            # It does not live long enough for the better compiler to pay.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
    )
    spark.dataSource.register(FailingSink)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    print("java", jvm.System.getProperty("java.version"), flush=True)

    sink = numbered(spark).write.format("failing").mode("append").option("url", url)
    sink.option("failed", str(directory / "task")).option("topic", "task").save()
    print("task", flush=True)

    shuffled = numbered(spark).repartition(2, "payload").sortWithinPartitions("payload")
    sink = shuffled.write.format("failing").mode("append").option("url", url)
    sink = sink.option("failed", str(directory / "stage")).option("topic", "stage")
    sink.option("lostFiles", str(directory / "local")).save()
    print("stage", stage_attempts(spark), flush=True)

    try:
        write_twice(spark, url, directory, fails=True)
    except StreamingQueryException as error:
        print("foreach", "after writing" if "after writing" in str(error) else error, flush=True)
    write_twice(spark, url, directory, fails=False)

    rows = spark.readStream.schema("payload string").json(str(directory / "rows"))
    stream = rows.writeStream.format("failing").option("url", url).option("topic", "stream")
    stream = stream.option("marker", str(directory / "committing"))
    stream.option("checkpointLocation", str(directory / "checkpoint")).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
