"""A Spark stream from topics to a topic, for as long as you like: its Python workers must not grow or lose a row."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import psutil
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from runnel.client import BlockingBus
from runnel.config import Retain, Rotate, TopicRule
from runnel.spark.runtime.session import session
from tests.spark.brokers import DiskBroker

# Retention removes old messages, so that hours fit on a disk. A cursor holds what the query has not read.
RULES: Final = (
    TopicRule(match="*", rotate=Rotate(bytes_max=8 * 2**20), retain=Retain(bytes_max=64 * 2**20)),
)
SOURCES: Final = ("in/a", "in/b", "in/c")
TARGET: Final = "out"
ROWS_PER_S: Final = 10_000
STEP_S: Final = 0.02
PAYLOAD_BYTES_MAX: Final = 200
LOOK_EVERY_S: Final = 0.5
WARM_UP_BATCHES: Final = 5
CATCH_UP_SECONDS_MAX: Final = 60.0
# Micro-batches differ in size, and with them what the allocator keeps.
GROWTH_BYTES_MAX: Final = 24 * 2**20


class StreamFault(AssertionError):
    """A worker grew, or rows were lost."""


class PythonWorker(NamedTuple):
    """A Python process of Spark: the median of its memory in the first and in the last third of the time."""

    pid: int
    first_bytes: int
    last_bytes: int


class StreamReport(NamedTuple):
    rows: int
    batches: int
    workers: list[PythonWorker]


class _Feeder:
    """Publishes messages of all kinds from a seed, at a steady rate, in its own thread."""

    def __init__(self, bus: BlockingBus, seed: int) -> None:
        self._bus = bus
        self._chance = Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        chance = self._chance
        filler = chance.randbytes(PAYLOAD_BYTES_MAX)
        with self._bus.publisher() as publisher:
            while not self._is_over.wait(STEP_S):
                for _ in range(chance.randrange(int(2 * ROWS_PER_S * STEP_S))):
                    kind = chance.randrange(8)
                    publisher.send(
                        filler[: chance.randrange(PAYLOAD_BYTES_MAX)],
                        SOURCES[kind % len(SOURCES)],
                        b"key-%d" % kind if kind < 2 else None,
                        {"unit": "C"} if kind == 0 else None,
                    )
                    self.sent += 1


def watch_stream(spark: SparkSession, folder: Path, seconds: float, seed: int) -> StreamReport:
    """Run a stream for so long. Raises StreamFault if its workers grow or rows are missing in the end."""
    with DiskBroker(folder / "data", RULES) as broker, broker.connect() as bus:
        for topic in SOURCES:
            bus.publish(topic, b"")
        reading = spark.readStream.format("runnel").option("url", broker.url)
        stream = reading.option("pattern", "in/*").option("startingOffsets", "earliest").load()
        query = (
            stream.select("payload", "key", "tags", "event_time_ns")
            .writeStream.format("runnel")
            .options(url=broker.url, topic=TARGET, checkpointLocation=str(folder / "checkpoint"))
            .start()
        )
        feeder = _Feeder(bus, seed)
        feeder.start()
        try:
            _wait_for_batches(query, WARM_UP_BATCHES)
            looks = _look(query, seconds)
        finally:
            feeder.stop()
            try:
                rows = feeder.sent + len(SOURCES)
                stored = _wait_for_rows(query, bus, rows)
                query.processAllAvailable()  # the progress of the last micro-batch is reported, too
            finally:
                query.stop()
        if stored != rows:
            raise StreamFault(f"{rows:,} messages were published, {stored:,} came through")
    return StreamReport(rows, _batches(query), _judged(looks))


def _batches(query: StreamingQuery) -> int:
    last = query.lastProgress
    return 0 if last is None else int(last["batchId"])


def _wait_for_batches(query: StreamingQuery, count: int) -> None:
    while _batches(query) < count:
        _check(query)
        time.sleep(0.05)


def _wait_for_rows(query: StreamingQuery, bus: BlockingBus, rows: int) -> int:
    """The number of rows in the target, when all are there or time is up."""
    ends_at_s = time.monotonic() + CATCH_UP_SECONDS_MAX
    while (stored := bus.topic(TARGET).partitions[0].next_offset - 1) < rows:
        _check(query)
        if time.monotonic() > ends_at_s:
            break
        time.sleep(0.05)
    return stored


def _check(query: StreamingQuery) -> None:
    if (error := query.exception()) is not None:
        raise StreamFault(f"the query failed: {error}") from error


def _look(query: StreamingQuery, seconds: float) -> list[dict[int, int]]:
    """Record the memory of each worker at intervals."""
    looks = []
    ends_at_s = time.monotonic() + seconds
    while time.monotonic() < ends_at_s:
        _check(query)
        looks.append(_memory_bytes())
        time.sleep(LOOK_EVERY_S)
    return looks


def _memory_bytes() -> dict[int, int]:
    """The memory of Spark's Python processes: planners, workers, and the daemon that forks them."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("python") and "pyspark" in " ".join(process.cmdline()):
                found[process.pid] = process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return found


def _judged(looks: list[dict[int, int]]) -> list[PythonWorker]:
    """The processes that ran all the time. There must be some, and no more at the end than at the beginning."""
    third = max(1, len(looks) // 3)
    first, last = looks[:third], looks[-third:]
    stayed = set.intersection(*(set(look) for look in looks))
    workers = [
        PythonWorker(
            pid,
            int(median(look[pid] for look in first)),
            int(median(look[pid] for look in last)),
        )
        for pid in sorted(stayed)
    ]
    if not workers:
        raise StreamFault("no Python worker lived as long as the stream did")
    more = int(median(map(len, last)) - median(map(len, first)))
    if more > 1:
        raise StreamFault(f"{more} more Python processes at the end than at the beginning")
    for worker in workers:
        if worker.last_bytes > worker.first_bytes + GROWTH_BYTES_MAX:
            raise StreamFault(
                f"process {worker.pid} has grown: {worker.first_bytes:,} bytes in the first third of the time, "
                f"{worker.last_bytes:,} in the last"
            )
    return workers


def soak_spark(seconds: float, seed: int) -> int:
    """The command: prints what it does, and returns its exit code."""
    print(f"a stream from topics to a topic from seed {seed} on, for {seconds:g} s", flush=True)
    spark = session("soak", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    try:
        with tempfile.TemporaryDirectory(prefix="runnel-stream-") as folder:
            outcome = watch_stream(spark, Path(folder), seconds, seed)
    except StreamFault as fault:
        print(f"seed {seed}: {fault}")
        return 1
    finally:
        spark.stop()
    for worker in outcome.workers:
        print(
            f"  process {worker.pid}: {worker.first_bytes / 2**20:.1f} MiB in the first third of the time, "
            f"{worker.last_bytes / 2**20:.1f} in the last"
        )
    print(f"{outcome.rows:,} messages in {outcome.batches:,} micro-batches; nothing broken")
    return 0
