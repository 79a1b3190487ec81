"""A Spark driver in a process of its own, which does what a test asks for, and can be killed.

Usage: python driver.py MASTER DIRECTORY. A line of JSON on standard input names one of the jobs below, with its
arguments; a line on standard output answers with what it returned, or why it failed. Classes that Spark sends to its
executors are made here, where they are those of the main program: executors need not be able to import this module.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from runnel.spark.pipelines.streaming_query import reason_of
from runnel.spark.runtime.session import session
from runnel.spark.write.writer import BatchWriter, StreamWriter

ROWS = 25_000  # two chunks for each of two tasks

# It does not live long enough for the better compiler to pay.
_JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


# --- Sinks that fail ---


class FailingWriter(BatchWriter):
    """Writes everything, and then fails: each task once."""

    how: str
    directory: str

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        told = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        mark = Path(self.directory, f"{self.how}-{partition}")
        if mark.exists():
            return told
        mark.touch()
        if self.how == "executor":
            if partition:  # one is enough
                return told
            next(above for above in psutil.Process().parents() if above.name() == "java").kill()
        if self.how == "shuffle":  # what the stage before wrote
            for path in Path(self.directory).rglob("shuffle_*"):
                path.unlink(missing_ok=True)
        raise RuntimeError("failed after writing")


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
        how, directory = options.pop("how"), options.pop("directory")
        writer = FailingWriter(options, schema, overwrite=overwrite)
        writer.how, writer.directory = how, directory
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        options = dict(self.options)
        marker = options.pop("marker")
        writer = StuckWriter(options, schema, overwrite=overwrite)
        writer.marker = marker
        return writer


def numbered(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS payload")


def rows_of(spark: SparkSession, directory: str) -> DataFrame:
    return spark.readStream.schema("payload string").json(directory)


# --- Jobs ---


class Jobs:
    """What a test can ask for, by the names of these methods."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory

    def where(self) -> dict[str, Any]:
        """The Javas that run, and from where each executor has Runnel."""

        def look(_: Any) -> Iterator[tuple[str, str]]:
            import runnel

            assert runnel.__file__ is not None
            yield str(Path.cwd()), runnel.__file__

        version = "reflect('java.lang.System', 'getProperty', 'java.version')"
        executors = self._spark.range(0, 2, 1, 2).selectExpr(version).collect()
        jvm = self._spark.sparkContext._jvm
        assert jvm is not None
        found = self._spark.sparkContext.range(0, 20, 1, 20).mapPartitions(look).collect()
        return {
            "java": [jvm.System.getProperty("java.version"), *(row[0] for row in executors)],
            "runnel": sorted(set(found)),
        }

    def read(self, **options: str) -> list[Any]:
        """Topic, offset and payload of each message, from a batch read."""
        rows = self._spark.read.format("runnel").options(**options).load()
        chosen = rows.selectExpr("topic", "offset", "cast(payload AS string)").collect()
        return sorted(tuple(row) for row in chosen)

    def copy(self, checkpoint: str, into: str, **options: str) -> list[int]:
        """A stream from topics into a topic, with all there is; the rows of each micro-batch."""
        rows = self._spark.readStream.format("runnel").options(**options).load()
        stream = rows.select("payload", "key", "tags", "event_time_ns").writeStream.format("runnel")
        stream = stream.options(url=options["url"], topic=into, checkpointLocation=checkpoint)
        query = stream.trigger(availableNow=True).start()
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress]

    def archive(self, table: str, **options: Any) -> list[Any]:
        """Topics into an archive; topic, offset and payload of each message in it."""
        from runnel.spark import archive, read_archive

        archive(self._spark, table, **options)
        rows = read_archive(self._spark, table)
        chosen = rows.selectExpr("topic", "offset", "cast(payload AS string)").collect()
        return sorted(tuple(row) for row in chosen)

    def stats(self, **options: Any) -> int:
        """Statistics of topics into a table and topics; of how many messages."""
        from runnel.spark import stats

        return stats(self._spark, **options).rows

    def write_failing(self, url: str, topic: str, how: str) -> int:
        """A batch write whose tasks fail after they have written; how often the stage was tried that was tried most.

        `task`: they raise. `shuffle`: so that the stage before them is run again too. `executor`: it is killed.
        """
        rows = numbered(self._spark)
        if how == "shuffle":
            rows = rows.repartition(2, "payload").sortWithinPartitions("payload")
        sink = rows.write.format("failing").mode("append").options(url=url, topic=topic, how=how)
        sink.option("directory", str(self._directory)).save()
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return 1 + max(stage.currentAttemptId for stage in stages if stage)

    def write_twice(self, url: str, rows: str, checkpoint: str, *, fails: bool) -> None:
        """The rows there are, within foreachBatch: all into one topic, a few into another."""

        def write(rows: DataFrame, batch_id: int) -> None:
            sink = rows.write.format("runnel").mode("append").option("url", url)
            sink.options(topic="all", producer="all").save()
            few = rows.where("payload < 10").write.format("runnel").mode("append")
            few.options(url=url, topic="few", producer="few").save()
            if fails:
                raise RuntimeError("after writing")

        stream = rows_of(self._spark, rows).writeStream.foreachBatch(write)
        stream = stream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
        stream.start().awaitTermination()

    def write_stuck(self, url: str, topic: str, rows: str, checkpoint: str, marker: str) -> None:
        """A stream whose first commit never returns."""
        stream = rows_of(self._spark, rows).writeStream.format("failing")
        stream = stream.options(url=url, topic=topic, marker=marker)
        stream.option("checkpointLocation", checkpoint).start().awaitTermination()


def main(master: str, directory: Path) -> None:
    # Whatever else this process and its JVM print goes where errors do.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spark = session(
        "driver",
        master,
        {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": _JVM_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": _JVM_OPTIONS,
            # What a task takes away of a shuffle, Spark misses one executor after the other: two attempts for each of
            # two tasks, unless they are quick enough to do it together. By itself it gives up when the fourth fails.
            "spark.stage.maxConsecutiveAttempts": "8",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    spark.dataSource.register(FailingSink)
    jobs = Jobs(spark, directory)
    for line in sys.stdin:
        asked = json.loads(line)
        job: Callable[..., Any] = getattr(jobs, asked.pop("job"))
        try:
            answer = {"value": job(**asked)}
        except PySparkException as error:
            answer = {"error": reason_of(error)}
        except Py4JError as error:  # what the JVM threw and PySpark has no class for
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
