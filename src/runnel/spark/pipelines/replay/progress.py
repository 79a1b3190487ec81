"""The progress of a replay, added up from the reports of its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from runnel.spark.pipelines.replay.state import ReplayState, StateDirectory

# Without a report for this long, nothing is being sent.
_SILENCE_S: Final = 5.0
_NS_PER_SECOND: Final = 10**9


class ReplayProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a replay."""

    messages: int  # messages that the broker has, including earlier runs
    messages_total: int
    messages_per_second: float  # recently
    seconds_left: float | None  # by the timetable; None if there is none


OnProgress: TypeAlias = Callable[[ReplayProgress], object]


class ProgressWatch:
    """Reads the progress reports in a replay's directory."""

    def __init__(self, state: ReplayState, directory: StateDirectory, tasks: int) -> None:
        self._messages_total = state.rows
        self._length_ns = _length_ns(state)
        self._directory = directory
        self._tasks = tasks
        self._messages: int | None = (
            None  # None at first: messages of earlier runs do not count for the rate
        )
        self._per_second = 0.0
        self._counted_at_s = time.monotonic()

    def look(self) -> ReplayProgress:
        reports = [self._directory.progress(task) for task in range(self._tasks)]
        messages = sum(each.rows for each in reports)
        self._count(messages)
        left_s = None
        if self._length_ns is not None:
            reached_ns = max(each.reached_ns for each in reports)
            is_all = messages == self._messages_total
            left_s = 0.0 if is_all else max(0.0, (self._length_ns - reached_ns) / _NS_PER_SECOND)
        return ReplayProgress(
            messages=messages,
            messages_total=self._messages_total,
            messages_per_second=self._per_second,
            seconds_left=left_s,
        )

    def _count(self, messages: int) -> None:
        """Update the rate. Tasks report less often than this is called; in between, the rate stays."""
        now_s = time.monotonic()
        passed_s = now_s - self._counted_at_s
        if messages == self._messages and passed_s < _SILENCE_S:
            return
        if self._messages is not None:
            self._per_second = max(0, messages - self._messages) / max(passed_s, 1e-9)
        self._messages, self._counted_at_s = messages, now_s


def _length_ns(state: ReplayState) -> float | None:
    """The length of the timetable; None if there is none."""
    options = state.options
    if options.rate is not None:
        return state.rows / options.rate * _NS_PER_SECOND
    if options.speed is None:
        return None
    left_out_ns = state.cuts[-1].earlier_ns if state.cuts else 0
    return (state.last_ns - state.first_ns - left_out_ns) / options.speed
