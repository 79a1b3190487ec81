"""A streaming query from its start to its end: how far it is, how it is stopped, and why it failed."""

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

# Queries whose rows are not messages, or that read messages twice, observe how many `rows` they stand for: under this
# name, or under several that begin with it and a slash.
OBSERVATION: Final = "runnel"
# Queries that write other rows than they read observe how many `rows` they write under this name.
WRITTEN: Final = "written"

_LOOK_EVERY_S: Final = 1
_STREAM_FAILED: Final = re.compile(r"^\[STREAM_FAILED\] .*? terminated with exception: ")
_CONCURRENT: Final = "[CONCURRENT_STREAM_LOG_UPDATE]"
_PLAN_OR_TRACE: Final = re.compile(r"\n=== Streaming Query ===|\nJVM stacktrace")
# The last line of a Python worker's traceback, which Spark wraps in its own words and those of the JVM.
# Of a user's mistake there is no traceback: the line follows Spark's own words.
_OUR_ERROR: Final = re.compile(
    r"(?:^(?:\w+\.)*|: runnel\.errors\.)(\w+(?:Error|Fault)|Unavailable): (.+)$", re.MULTILINE
)


class PipelineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a pipeline is."""

    batches: int  # micro-batches since it began
    rows: int  # messages that it has read; of a batch query, the same as `written`
    rows_per_second: float  # of the last one
    entries_behind: int | None  # in all shards together; None if the query does not say
    # What came too late for a watermark, as Spark counts it: behind its partial aggregation, so perhaps more messages.
    dropped: int = 0
    # Rows that it gave its target, those among them that become dead letters there included; None if it does not say.
    written: int | None = None
    is_stream: bool = True


OnProgress: TypeAlias = Callable[[PipelineProgress], object]


class PipelineFailedError(RunnelError):
    """A pipeline ended with an error: what went wrong, as far as Spark tells."""

    code = "pipeline_failed"


class PipelineRefusedError(PipelineFailedError, ClientFault):
    """What was asked of it cannot be: the same would fail again."""


class PipelineUnavailableError(PipelineFailedError, Unavailable):
    """Something that it needs is away, as the broker: the same may work later."""

    code = "pipeline_failed"


def run_query(query: StreamingQuery, on_progress: OnProgress | None = None) -> PipelineProgress:
    """Wait until a query has ended, by itself or because someone stopped it; Ctrl-C stops it and goes on up.

    What it had done by the end is returned. PipelineFailedError if the query failed.
    """
    tally = _ProgressTally()
    with _interrupt_noted() as interrupt:
        try:
            while not query.awaitTermination(_LOOK_EVERY_S):
                if tally.look(query) and on_progress is not None:
                    on_progress(tally.progress)
                if interrupt.is_set():
                    raise KeyboardInterrupt
        except PySparkException as error:
            raise failure_of(error) from error
        finally:
            if query.isActive:
                query.stop()
    if tally.look(query) and on_progress is not None:
        on_progress(tally.progress)
    return tally.progress


@contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Ctrl-C is looked at between calls to Java, for in the middle of one it would break the next; a second is not."""
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
    """What became of a pipeline that Spark ended, by whose fault it was."""
    name, sentence = _cause_in(str(error), _trace_of(error))
    kind = getattr(errors, name, RunnelError)
    if issubclass(kind, ClientFault):
        return PipelineRefusedError(sentence)
    if issubclass(kind, Unavailable):
        return PipelineUnavailableError(sentence)
    return PipelineFailedError(sentence)


def reason_of(error: PySparkException) -> str:
    """The sentence that matters among Spark's: ours, if one of ours was the cause."""
    return reason_in(str(error), _trace_of(error))


def reason_in(text: str, trace: str = "") -> str:
    """The same of an error that Spark only tells of."""
    return _cause_in(text, trace)[1]


def _trace_of(error: PySparkException) -> str:
    """Of a commit that failed Spark says no more than that; why is in Java's trace (of Connect, in another one)."""
    return getattr(error, "_stackTrace", None) or getattr(error, "_stacktrace", None) or ""


def _cause_in(text: str, trace: str) -> tuple[str, str]:
    """The name of the error's class, if it is one of Python's, and the sentence."""
    if _CONCURRENT in text:
        return errors.LockedError.__name__, "another query runs with this checkpoint: one at a time"
    if found := _OUR_ERROR.findall(text) or _OUR_ERROR.findall(trace):
        name, sentence = found[-1]
        return name, sentence
    return "", _STREAM_FAILED.sub("", _PLAN_OR_TRACE.split(text)[0]).strip()


class _ProgressTally:
    """Adds up a query's progress; Spark keeps the last hundred reports."""

    def __init__(self) -> None:
        self.progress = PipelineProgress(
            batches=0, rows=0, rows_per_second=0.0, entries_behind=None
        )
        self._batch_id = -1

    def look(self, query: StreamingQuery) -> bool:
        """Whether there is something new."""
        # Idle triggers report the batch that would be next, without rows: it is counted once it has some.
        fresh = [
            report
            for report in query.recentProgress
            # A micro-batch without messages may write what a watermark has let go.
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
        told = [written for report in fresh if (written := _written(report)) is not None]
        if not told:
            return self.progress.written
        return (self.progress.written or 0) + sum(told)


def _rows(report: StreamingQueryProgress) -> int:
    observed = [
        _observed_rows(said)
        for name, said in report["observedMetrics"].items()
        if name == OBSERVATION or name.startswith(f"{OBSERVATION}/")
    ]
    return sum(observed) if observed else report.numInputRows


def _written(report: StreamingQueryProgress) -> int | None:
    said = report["observedMetrics"].get(WRITTEN)
    return None if said is None else _observed_rows(said)


def _observed_rows(said: Row) -> int:
    """The one number that is observed. Through Connect, the row that has it is told of as JSON has it."""
    rows = said["values"][0] if "values" in said else said["rows"]
    return int(rows or 0)


def _dropped(report: StreamingQueryProgress) -> int:
    return sum(state["numRowsDroppedByWatermark"] for state in report["stateOperators"])


def _entries_behind(sources: list[dict[str, object]]) -> int | None:
    behind = 0
    for source in sources:
        ends = [source[name] for name in ("endOffset", "latestOffset")]
        # A micro-batch that is run again begins without asking how far the source is.
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
