"""Runs a streaming query to its end: reports progress, stops it, and explains its failure."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from runnel import errors
from runnel.errors import ClientFault, RunnelError, Unavailable
from runnel.spark.read import stream_offset

# Queries whose rows are not messages, or that read messages twice, observe the number of messages as `rows`: under this
# name, or under several names that begin with it and a slash.
OBSERVATION: Final = "runnel"
# Queries that write other rows than they read observe the number of written `rows` under this name.
WRITTEN: Final = "written"

_LOOK_EVERY_S: Final = 1
_STREAM_FAILED: Final = re.compile(r"^\[STREAM_FAILED\] .*? terminated with exception: ")
_CONCURRENT: Final = "[CONCURRENT_STREAM_LOG_UPDATE]"
_PLAN_OR_TRACE: Final = re.compile(r"\n=== Streaming Query ===|\nJVM stacktrace")
# The last line of a Python worker's traceback, which Spark wraps in its own text and that of the JVM.
# A user's mistake has no traceback: the line follows Spark's own text.
_OUR_ERROR: Final = re.compile(
    r"(?:^(?:\w+\.)*|: runnel\.errors\.)(\w+(?:Error|Fault)|Unavailable): (.+)$", re.MULTILINE
)


class PipelineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a pipeline."""

    batches: int  # micro-batches since its start
    rows: int  # messages read; for a batch query, the same as `written`
    rows_per_second: float  # of the last micro-batch
    entries_behind: int | None  # in all shards together; None if unknown
    # Rows too late for the watermark. Spark counts them after its partial aggregation, so it may be more messages.
    dropped: int = 0
    # Rows passed to the target, including rows that become dead letters there; None if unknown.
    written: int | None = None
    is_stream: bool = True


OnProgress: TypeAlias = Callable[[PipelineProgress], object]


class PipelineFailedError(RunnelError):
    """A pipeline ended with an error. The text says what went wrong, as far as Spark reports it."""

    code = "pipeline_failed"


class PipelineRefusedError(PipelineFailedError, ClientFault):
    """The pipeline cannot do what was asked; the same call would fail again."""


class PipelineUnavailableError(PipelineFailedError, Unavailable):
    """Something that the pipeline needs is unavailable, as the broker; the same call may work later."""

    code = "pipeline_failed"


def run_query(query: StreamingQuery, on_progress: OnProgress | None = None) -> PipelineProgress:
    """Wait until a query has ended or was stopped; returns its final progress.

    Ctrl-C stops the query and raises KeyboardInterrupt. PipelineFailedError if the query failed.
    """
    tally = _ProgressTally()
    with _interrupt_noted() as interrupt:
        try:
            while not query.awaitTermination(_LOOK_EVERY_S):
                if tally.update(query) and on_progress is not None:
                    on_progress(tally.progress)
                if interrupt.is_set():
                    raise KeyboardInterrupt
        except PySparkException as error:
            raise failure_of(error) from error
        finally:
            if query.isActive:
                query.stop()
    if tally.update(query) and on_progress is not None:
        on_progress(tally.progress)
    return tally.progress


@contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Note Ctrl-C for between two calls to Java, because inside a call it would break the next. A second one raises."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(*_: object) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


def failure_of(error: PySparkException) -> PipelineFailedError:
    """The error for a pipeline that Spark ended. Its class says whose fault it was."""
    name, sentence = _cause_in(str(error), _trace_of(error))
    kind = getattr(errors, name, RunnelError)
    if issubclass(kind, ClientFault):
        return PipelineRefusedError(sentence)
    if issubclass(kind, Unavailable):
        return PipelineUnavailableError(sentence)
    return PipelineFailedError(sentence)


def reason_of(error: PySparkException) -> str:
    """The relevant sentence of Spark's error: Runnel's own, if a Runnel error was the cause."""
    return reason_in(str(error), _trace_of(error))


def reason_in(text: str, trace: str = "") -> str:
    """The relevant sentence of an error that Spark reports as text."""
    return _cause_in(text, trace)[1]


def _trace_of(error: PySparkException) -> str:
    """Java's trace, which has the reason of a failed commit. Spark Connect has it in another attribute."""
    return getattr(error, "_stackTrace", None) or getattr(error, "_stacktrace", None) or ""


def _cause_in(text: str, trace: str) -> tuple[str, str]:
    """The name of the error's class, if it is a Python error, and the sentence."""
    if _CONCURRENT in text:
        return errors.LockedError.__name__, "another query runs with this checkpoint: one at a time"
    if found := _OUR_ERROR.findall(text) or _OUR_ERROR.findall(trace):
        name, sentence = found[-1]
        return name, sentence
    return "", _STREAM_FAILED.sub("", _PLAN_OR_TRACE.split(text)[0]).strip()


class _ProgressTally:
    """Adds up the progress reports of a query. Spark keeps only the last hundred."""

    def __init__(self) -> None:
        self.progress = PipelineProgress(
            batches=0, rows=0, rows_per_second=0.0, entries_behind=None
        )
        self._batch_id = -1

    def update(self, query: StreamingQuery) -> bool:
        """Add the new reports; returns whether there were any."""
        # An idle trigger reports the next batch without rows. It counts once it has rows.
        fresh = [
            report
            for report in query.recentProgress
            # A micro-batch without messages may write rows that the watermark has released.
            if report["batchId"] > self._batch_id and (report.numInputRows or _written(report))
        ]
        if not fresh:
            return False
        self._batch_id = fresh[-1]["batchId"]
        self.progress = PipelineProgress(
            batches=self.progress.batches + len(fresh),
            rows=self.progress.rows + sum(map(_rows, fresh)),
            rows_per_second=_rows(fresh[-1])
            / max(fresh[-1].numInputRows, 1)
            * fresh[-1].processedRowsPerSecond,
            entries_behind=_entries_behind(fresh[-1]["sources"]),
            dropped=self.progress.dropped + sum(map(_dropped, fresh)),
            written=self._written_with(fresh),
        )
        return True

    def _written_with(self, fresh: list[StreamingQueryProgress]) -> int | None:
        counts = [written for report in fresh if (written := _written(report)) is not None]
        if not counts:
            return self.progress.written
        return (self.progress.written or 0) + sum(counts)


def _rows(report: StreamingQueryProgress) -> int:
    observed = [
        _observed_rows(metric)
        for name, metric in report["observedMetrics"].items()
        if name == OBSERVATION or name.startswith(f"{OBSERVATION}/")
    ]
    return sum(observed) if observed else report.numInputRows


def _written(report: StreamingQueryProgress) -> int | None:
    metric = report["observedMetrics"].get(WRITTEN)
    return None if metric is None else _observed_rows(metric)


def _observed_rows(metric: Row) -> int:
    """The observed number. Spark Connect represents its row as JSON."""
    rows = metric["values"][0] if "values" in metric else metric["rows"]
    return int(rows or 0)


def _dropped(report: StreamingQueryProgress) -> int:
    return sum(state["numRowsDroppedByWatermark"] for state in report["stateOperators"])


def _entries_behind(sources: list[dict[str, object]]) -> int | None:
    behind = 0
    for source in sources:
        ends = [source[name] for name in ("endOffset", "latestOffset")]
        # A repeated micro-batch begins without asking the source for its latest offset.
        if not all(isinstance(end, str) and end != "null" for end in ends):
            return None
        end, latest = (
            stream_offset.decode(msgspec.json.decode(str(end), type=dict[str, list[int]]))
            for end in ends
        )
        behind += sum(
            max(0, place.entry - end[key].entry if key in end else place.entry)
            for key, place in latest.items()
        )
    return behind
