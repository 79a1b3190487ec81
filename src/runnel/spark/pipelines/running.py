"""A streaming query from its start to its end: how far it is, how it is stopped, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from runnel.errors import RunnelError
from runnel.spark import stream_offset

_LOOK_EVERY_S: Final = 1
# The last line of a Python worker's traceback, which Spark wraps in its own words and those of the JVM.
_OUR_ERROR: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Fault|Unavailable): (.+)$", re.MULTILINE)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a pipeline is."""

    batches: int  # micro-batches since it began
    rows: int
    rows_per_second: float  # of the last one
    entries_behind: int | None  # in all shards together; None if the query does not say


OnProgress: TypeAlias = Callable[[Progress], object]


class PipelineFailedError(RunnelError):
    """A pipeline ended with an error: what went wrong, as far as Spark tells."""

    code = "pipeline_failed"


def run_query(query: StreamingQuery, on_progress: OnProgress | None = None) -> Progress:
    """Wait until a query has ended, by itself or because someone stopped it; Ctrl-C stops it and goes on up.

    What it had done by the end is returned. PipelineFailedError if the query failed.
    """
    tally = _Tally()
    try:
        while not query.awaitTermination(_LOOK_EVERY_S):
            if tally.look(query) and on_progress is not None:
                on_progress(tally.progress)
    except PySparkException as error:
        raise PipelineFailedError(reason_of(error)) from error
    finally:
        if query.isActive:
            query.stop()
    if tally.look(query) and on_progress is not None:
        on_progress(tally.progress)
    return tally.progress


def reason_of(error: PySparkException) -> str:
    """The sentence that matters among Spark's: ours, if one of ours was the cause."""
    text = str(error)
    found = _OUR_ERROR.findall(text)
    return found[-1] if found else text.partition("\nJVM stacktrace")[0].strip()


class _Tally:
    """Adds up a query's progress; Spark keeps the last hundred reports."""

    def __init__(self) -> None:
        self.progress = Progress(batches=0, rows=0, rows_per_second=0.0, entries_behind=None)
        self._batch_id = -1

    def look(self, query: StreamingQuery) -> bool:
        """Whether there is something new."""
        # Idle triggers report the batch that would be next, without rows: it is counted once it has some.
        fresh = [
            report
            for report in query.recentProgress
            if report["batchId"] > self._batch_id and report["numInputRows"]
        ]
        if not fresh:
            return False
        self._batch_id = fresh[-1]["batchId"]
        self.progress = Progress(
            batches=self.progress.batches + len(fresh),
            rows=self.progress.rows + sum(report["numInputRows"] for report in fresh),
            rows_per_second=fresh[-1]["processedRowsPerSecond"],
            entries_behind=_entries_behind(fresh[-1]["sources"]),
        )
        return True


def _entries_behind(sources: list[dict[str, object]]) -> int | None:
    behind = 0
    for source in sources:
        ends = [source[name] for name in ("endOffset", "latestOffset")]
        if not all(isinstance(end, str) for end in ends):
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
