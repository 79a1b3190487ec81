"""Spark: archives everything while it happens, and at the end counts it in windows of event time.

python -m examples.demo.pipeline runnel://127.0.0.1:7470 DIRECTORY
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession

from examples.demo.evidence import PipelineReport
from runnel import spark
from runnel.errors import Unavailable
from runnel.spark.pipelines.streaming_query import PipelineProgress

WINDOW_S: Final = 5.0
_EVERY_S: Final = 2.0
_RETRY_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.4
_REST_MAX_S: Final = 60.0
_COUNTING: Final = "counting windows"
_EVERYTHING: Final = "*"  # every topic but the system's own
# A Java that lives for a minute: optimising its code thoroughly would cost more than it gains.
_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_CONF: Final = {"spark.sql.shuffle.partitions": "2", "spark.sql.session.timeZone": "UTC"}


class Pipeline:
    """Prints its progress as lines of JSON. On `finish 17` it archives 17 messages in all, counts, and ends."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._archive = directory / "archive"
        self._windows = directory / "windows"
        self._report = PipelineReport()
        self._before = (0, 0)  # rows and batches of queries that have ended
        self._is_over = threading.Event()
        self._session: SparkSession | None = None

    def run(self) -> None:
        self._say("starting Java and Spark")
        threading.Thread(target=self._listen, daemon=True).start()
        os.environ.setdefault("SPARK_SUBMIT_OPTS", _JAVA_OPTIONS)
        self._session = session = spark.session("demo", "local[2]", _CONF)
        self._say("starting the archive")
        while not self._is_over.is_set():
            self._archive_on(session)
        spark.compact(self._archive)
        self._count(session)
        session.stop()
        self._say("done")

    def _archive_on(self, session: SparkSession) -> None:
        """Run until it is stopped. A running query waits for a broker that is down; a new one does not."""
        try:
            spark.archive(
                session,
                self._archive,
                pattern=_EVERYTHING,
                url=self._url,
                every_s=_EVERY_S,
                on_progress=self._note,
            )
        except Unavailable:
            self._is_over.wait(_RETRY_S)
        self._before = (self._report.archived, self._report.batches)

    def _note(self, progress: PipelineProgress) -> None:
        rows, batches = self._before
        self._report.archived = rows + progress.rows
        self._report.batches = batches + progress.batches
        self._say("archiving")

    def _count(self, session: SparkSession) -> None:
        """Counted from the archive, so that the archive is tested, too."""
        self._say(_COUNTING)
        begin = time.perf_counter()
        messages = spark.read_archive(session, self._archive)
        figures = spark.stats_of(messages, window_s=WINDOW_S)
        spark.write_stats(figures, self._windows)
        self._report.windows_s = time.perf_counter() - begin

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, messages = line.strip().partition(" ")
            if word == "finish":
                self._finish(int(messages))
        os._exit(1)  # its parent has ended; Java notices and ends, too

    def _finish(self, messages: int) -> None:
        """Wait for the table, but not for ever: the count shows what is missing."""
        ends_at = time.monotonic() + _REST_MAX_S
        while time.monotonic() < ends_at and self._rows() < messages:
            time.sleep(_LOOK_EVERY_S)
        self._is_over.set()
        # A query that is just beginning cannot be stopped yet.
        while self._report.state != _COUNTING:
            for query in () if self._session is None else self._session.streams.active:
                query.stop()
            time.sleep(_LOOK_EVERY_S)

    def _rows(self) -> int:
        """The number of rows, from the table's own log."""
        if not self._archive.exists():
            return 0
        return spark.archive_status(self._archive, url=self._url).rows

    def _say(self, state: str) -> None:
        self._report.state = state
        sys.stdout.buffer.write(msgspec.json.encode(self._report) + b"\n")
        sys.stdout.buffer.flush()


def _leave(*_: object) -> None:
    """Java was asked to end as well, and cleans up first: a wait for this process waits for both."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    Pipeline(sys.argv[1], Path(sys.argv[2])).run()
