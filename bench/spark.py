"""The Spark connector's speed, each figure beside a source or sink in Python that has nothing else to do.

read       a topic into Spark, through the broker | the same record batches, from a worker's memory
           from the broker's files                | through the broker
archive    a topic into a Delta table             | Spark's own Parquet sink behind the same source
stream     a micro-batch at 10,000 rows/s         | a Python source that yields a constant
write      a stream of rows into a topic          | a sink in Python that drops its Arrow batches

One session (`spark.runtime.session`, local[2]) for everything, messages of 100 bytes, a broker in a process of its own.
Both sides of a comparison have the same rows, settings and number of tasks, and take turns; every run counts its rows.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench.contest import Contender, Sample, Standing, compared, contest
from bench.processes import Team
from bench.report import Result
from bench.spark_feed import feed, fill, random_payloads
from bench.spark_sources import ConstantSource, MemorySource, NothingSink
from bench.systems.system import PAYLOAD_BYTES, RolePlan, free_port, scratch, serving
from runnel.client import connect_blocking
from runnel.spark import read_archive
from runnel.spark.connections import BrokerLogin
from runnel.spark.pipelines.archive.job import ArchivePlan
from runnel.spark.read.page_connection import close_page_connections
from runnel.spark.read.ranges import TopicRange, read
from runnel.spark.read.schema import SPARK_SCHEMA, arrow_schema, rows
from runnel.spark.runtime.session import session

TOPIC = "bench/a"
TASKS = 2
STEADY_RATE = 10_000
# A message of 100 bytes with its time, and a tenth more: files are cut at blocks.
BYTES_PER_ROW = 124
# What the archive gives a task.
ARCHIVE_BYTES_PER_TASK = 128 * 2**20

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
    "spark.driver.memory": "2g",
}
# Most of what is read is sealed, as history is: only the last segment of a journal has no index beside it.
_RULES = 'topics=[{ match = "*", rotate = { bytes = "64MiB" } }]'
_QUERY_SECONDS_MAX = 120.0


class SparkServer(msgspec.Struct, frozen=True):
    url: str
    data: Path
    folder: Path  # for whatever the measurement writes


@contextmanager
def setting() -> Iterator[None]:
    """The session that all parts share."""
    # Workers import Runnel; a package that was installed is compiled, and so it is here after the first time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    spark = session("bench", f"local[{TASKS}]", _SETTINGS)
    spark.sparkContext.setLogLevel("FATAL")  # that a query was stopped while it ran is no news here
    for source in (MemorySource, ConstantSource, NothingSink):
        spark.dataSource.register(source)
    try:
        yield
    finally:
        spark.stop()


def more_facts() -> dict[str, str]:
    return {"spark": f"pyspark {version('pyspark')}, local[{TASKS}]"}


def _spark() -> SparkSession:
    found = SparkSession.getActiveSession()
    assert found is not None, "outside of `setting`"
    return found


@contextmanager
def _broker() -> Iterator[SparkServer]:
    with scratch() as folder:
        port = free_port()
        data = folder / "data"
        words = ["--data", str(data), "--listen", f"127.0.0.1:{port}", "--set", _RULES]
        words += ["--http", "none", "--grpc", "none"]
        command = [sys.executable, "-m", "runnel", "serve", *words]
        try:
            with serving(command, port, "runnel", folder) as served:
                yield SparkServer(served.url, data, folder)
        finally:
            close_page_connections()


def _rounds(*, quick: bool) -> int:
    return 1 if quick else 5


# --- Rates and processor time ---


def _cpu_s() -> float:
    """What the broker, Spark and its workers have had of the processors, those that ended included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])  # its own and that of children it has waited for
        except psutil.Error:  # it has just ended
            continue
    return total


def _timed(work: Callable[[], int], expected: int) -> Sample:
    """Rows a second, and nanoseconds of processor time a row. The work says how many rows it had."""
    cpu_s, begin_s = _cpu_s(), time.perf_counter()
    count = work()
    seconds, cpu_s = time.perf_counter() - begin_s, _cpu_s() - cpu_s
    trouble = "" if count == expected else f"{count:,} of {expected:,} rows"
    return Sample((expected / seconds, cpu_s / expected * 1e9), trouble)


def _counted(rate: float, count: int, expected: int) -> Sample:
    return Sample((rate,), "" if count == expected else f"{count:,} of {expected:,} rows")


def _cpu_note(*standings: Standing) -> str:
    told = ", ".join(f"{each.name} {each.median(1) or math.nan:.0f} ns" for each in standings)
    return f"processor time a row: {told}"


# --- Reading ---


def _into_nothing(frame: DataFrame) -> int:
    frame.write.format("noop").mode("overwrite").save()
    return _rows_of_last_query()


def _rows_of_last_query() -> int:
    """By Spark's own count of it: to observe the rows would be a part of the work."""
    spark = _spark()
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # noqa: SLF001 - py4j's way to Scala
    store = spark._jsparkSession.sharedState().statusStore()  # noqa: SLF001
    query = store.executionsList().last()
    values = store.executionMetrics(query.executionId())
    metrics = query.metrics().iterator()
    counts = [0]
    while metrics.hasNext():
        metric = metrics.next()
        if metric.name() == "number of output rows":
            counts.append(int(values.apply(metric.accumulatorId()).replace(",", "")))
    return max(counts)


def _source(count: int, **options: str) -> DataFrame:
    per_task = count // TASKS * BYTES_PER_ROW
    chosen = {"topics": TOPIC, "bytesPerPartition": str(per_task)} | options
    return _spark().read.format("runnel").options(**chosen).load()


def _write_record_batches(served: SparkServer, count: int, parts: int) -> Path:
    """What the source yields, in a file for each task."""
    schema = arrow_schema(SPARK_SCHEMA)
    folder = served.folder / f"memory-{parts}"
    folder.mkdir()
    edges = [1 + count * part // parts for part in range(parts + 1)]
    for part in range(parts):
        work = TopicRange(
            address=BrokerLogin(served.url),
            topic=TOPIC,
            partition=0,
            begin=edges[part],
            end=edges[part + 1],
        )
        with (
            pa.OSFile(str(folder / f"{part}.arrow"), "wb") as file,
            pa.ipc.new_file(file, schema) as writer,
        ):
            for batch in rows(read(work), schema):
                writer.write_batch(batch)
    return folder


def bench_read(*, quick: bool) -> list[Result]:
    count = 1_000_000 if quick else 3_000_000
    with _broker() as served:
        fill(served.url, TOPIC, count)
        folder = _write_record_batches(served, count, TASKS)

        def memory() -> DataFrame:
            reading = _spark().read.format(MemorySource.name()).schema(SPARK_SCHEMA)
            return reading.option("folder", str(folder)).load()

        frames: Mapping[str, Callable[[], DataFrame]] = {
            "memory": memory,
            "broker": lambda: _source(count, url=served.url),
            "files": lambda: _source(count, path=str(served.data)),
        }
        for name, frame in frames.items():
            tasks = frame().rdd.getNumPartitions()
            assert tasks == TASKS, f"{name} has {tasks} tasks"
            _into_nothing(frame())  # workers start, and what they keep is made

        def contender(name: str, frame: Callable[[], DataFrame]) -> Contender:
            return Contender(name, lambda: _timed(lambda: _into_nothing(frame()), count))

        standings = contest(
            [contender(name, frame) for name, frame in frames.items()], _rounds(quick=quick)
        )
    of_memory, of_broker, of_files = (standings[name] for name in ("memory", "broker", "files"))
    size = f"{count:,} messages of {PAYLOAD_BYTES} bytes, {TASKS} tasks"
    return [
        compared(
            f"batch read of {size}, through the broker",
            "rows/s",
            of_broker,
            of_memory,
            target=0.8,
            note=_cpu_note(of_broker, of_memory),
        ),
        compared(
            f"batch read of {size}, from files",
            "rows/s",
            of_files,
            of_broker,
            target=1.0,
            note=_cpu_note(of_files, of_broker),
        ),
    ]


# --- Streams ---


def _reports(query: StreamingQuery) -> list[dict[str, Any]]:
    """Of micro-batches with rows."""
    reports: list[dict[str, Any]] = [
        msgspec.json.decode(each.json) for each in query.recentProgress
    ]
    return [report for report in reports if report["numInputRows"]]


def _micro_batch_ms(report: Mapping[str, Any]) -> float:
    return float(report["durationMs"]["triggerExecution"])


def _steady(frame: DataFrame, checkpoint: Path, batches: int) -> Sample:
    """The median micro-batch of a query that has got going."""
    warming_up = 5
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        deadline_s = time.monotonic() + _QUERY_SECONDS_MAX
        while len(found := _reports(query)) < warming_up + batches:
            if error := query.exception():
                raise error
            if time.monotonic() > deadline_s:
                return Sample((math.nan,), f"{len(found)} micro-batches in {_QUERY_SECONDS_MAX} s")
            time.sleep(0.1)
    finally:
        query.stop()
    counted = found[warming_up : warming_up + batches]
    # Rows come at a steady rate, so what one micro-batch has is what came during the one before it.
    spent_ms = sum(map(_micro_batch_ms, found[warming_up - 1 : warming_up + batches - 1]))
    rate = sum(report["numInputRows"] for report in counted) / spent_ms * 1000
    is_steady = 0.7 * STEADY_RATE < rate < 1.3 * STEADY_RATE
    trouble = "" if is_steady else f"{rate:,.0f} rows/s instead of {STEADY_RATE:,}"
    return Sample((statistics.median(map(_micro_batch_ms, counted)),), trouble)


def bench_stream(*, quick: bool) -> list[Result]:
    batches = 15 if quick else 40
    with _broker() as served, Team() as team:
        fill(served.url, TOPIC, 10_000)
        file = _write_record_batches(served, 10_000, 1) / "0.arrow"
        # The flow goes on beside both.
        feeder = team.add(feed, RolePlan(served.url, (TOPIC,), rate=STEADY_RATE))
        feeder.wait_ready()
        numbers = iter(range(1_000_000))

        def contender(name: str, frame: Callable[[], DataFrame]) -> Contender:
            def measure() -> Sample:
                return _steady(frame(), served.folder / f"checkpoint-{next(numbers)}", batches)

            return Contender(name, measure)

        def ours() -> DataFrame:
            stream = _spark().readStream.format("runnel").option("url", served.url)
            return stream.option("topics", TOPIC).load()

        def constant() -> DataFrame:
            stream = _spark().readStream.format(ConstantSource.name()).schema(SPARK_SCHEMA)
            return stream.options(rate=str(STEADY_RATE), file=str(file)).load()

        contenders = [contender("stream", ours), contender("constant", constant)]
        for each in contenders:
            each.measure()  # the first query of a kind starts its own processes
        standings = contest(contenders, 2 if quick else 3)
        feeder.over()
        feeder.report()
    return [
        compared(
            f"micro-batch of a stream at {STEADY_RATE:,} rows/s, median of {batches}",
            "ms",
            standings["stream"],
            standings["constant"],
            target=1.3,
            is_at_most=True,
        )
    ]


# --- Archive ---


def bench_archive(*, quick: bool) -> list[Result]:
    """Both as a stream that takes what is there and ends: the time is that of its micro-batch, the commit included."""
    count = 2_000_000 if quick else 4_000_000
    with _broker() as served:
        fill(served.url, TOPIC, count, has_tags=True)
        numbers = iter(range(1_000_000))

        def run(query: StreamingQuery, folder: Path) -> Sample:
            query.awaitTermination()
            (report,) = _reports(query)
            stored = sum(pq.read_metadata(file).num_rows for file in folder.rglob("*.parquet"))
            return _counted(stored / _micro_batch_ms(report) * 1000, stored, count)

        def into_archive() -> Sample:
            table = served.folder / f"archive-{next(numbers)}"
            return run(ArchivePlan.make(table, topics=TOPIC, url=served.url).start(_spark()), table)

        def into_parquet() -> Sample:
            folder = served.folder / f"parquet-{next(numbers)}"
            query = (
                _spark()
                .readStream.format("runnel")
                .options(url=served.url, topics=TOPIC, startingOffsets="earliest")
                .option("bytesPerPartition", str(ARCHIVE_BYTES_PER_TASK))
                .load()
                .writeStream.format("parquet")
                .options(path=str(folder), checkpointLocation=f"{folder}-checkpoint")
                .trigger(availableNow=True)
                .start()
            )
            return run(query, folder)

        contenders = [
            Contender("archive", into_archive),
            Contender("Spark's Parquet writer", into_parquet),
        ]
        for each in contenders:
            each.measure()
        archived = read_archive(_spark(), served.folder / "archive-0")
        distinct = archived.select("offset").distinct().count()
        assert distinct == count, f"{distinct} of {count} offsets are in the archive"
        standings = contest(contenders, 2 if quick else 3)
    ours, spark = standings.values()
    return [
        compared(
            f"archive of {count:,} messages with a key and two tags",
            "rows/s",
            ours,
            spark,
            target=5,
        )
    ]


# --- Writing ---


def _write_payloads(folder: Path, files: int, rows_per_file: int) -> None:
    """Rows for a stream that costs Python nothing: Parquet files, which Spark reads by itself."""
    folder.mkdir()
    payloads = random_payloads(rows_per_file)
    for number in range(files):
        table = pa.table({"payload": pa.array(payloads, pa.binary())})
        pq.write_table(table, folder / f"{number:03}.parquet", use_dictionary=False)


def bench_write(*, quick: bool) -> list[Result]:
    rows_per_file, files = 250_000, 6 if quick else 10
    count = rows_per_file * (files - TASKS)  # the first micro-batch is not counted
    with _broker() as served:
        folder = served.folder / "payloads"
        _write_payloads(folder, files, rows_per_file)
        numbers = iter(range(1_000_000))

        def run(kind: str, **options: str) -> Sample:
            stream = (
                _spark()
                .readStream.schema("payload binary")
                .option("maxFilesPerTrigger", str(TASKS))
                .parquet(str(folder))
            )
            query = (
                stream.writeStream.format(kind)
                .options(**options)
                .option("checkpointLocation", str(served.folder / f"written-{next(numbers)}"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            counted = _reports(query)[1:]
            found = sum(report["numInputRows"] for report in counted)
            return _counted(found / sum(map(_micro_batch_ms, counted)) * 1000, found, count)

        def into_topic() -> Sample:
            topic = f"bench/written-{next(numbers)}"
            sample = run("runnel", url=served.url, topic=topic)
            with connect_blocking(served.url) as bus:
                stored = bus.topic(topic).messages
                bus.delete_topic(topic)
            if stored != rows_per_file * files:
                return Sample(sample.values, f"{stored:,} of {rows_per_file * files:,} rows stored")
            return sample

        contenders = [
            Contender("topic", into_topic),
            Contender("nothing", lambda: run(NothingSink.name())),
        ]
        for each in contenders:
            each.measure()
        standings = contest(contenders, _rounds(quick=quick))
    return [
        compared(
            f"stream into a topic, micro-batches of {TASKS * rows_per_file:,} messages",
            "rows/s",
            standings["topic"],
            standings["nothing"],
            target=0.7,
        )
    ]


PARTS = (
    ("read", bench_read),
    ("archive", bench_archive),
    ("stream", bench_stream),
    ("write", bench_write),
)
