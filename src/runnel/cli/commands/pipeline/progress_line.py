"""Prints a pipeline's progress on standard error: one line that changes on a terminal, otherwise a line every 10 s."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Self

from runnel.cli.render.tables import counted

if TYPE_CHECKING:
    from runnel.spark.pipelines.streaming_query import PipelineProgress

_LINE_EVERY_S: Final = 10.0


class ProgressLine:
    """Prints progress. Use it as a context manager, and call it with each progress of the pipeline."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._printed_at_s = -_LINE_EVERY_S
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=sys.stderr)

    def __call__(self, progress: PipelineProgress) -> None:
        self.tell(text_of(progress))

    def tell(self, text: str) -> None:
        """Print a text, for pipelines with other progress."""
        line = f"{self._what}: {text}"
        if self._is_terminal:
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif time.monotonic() - self._printed_at_s >= _LINE_EVERY_S:
            self._printed_at_s = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def text_of(progress: PipelineProgress) -> str:
    """`120,000 messages in 3 batches, 40,000/s, at most 12 entries behind`, and the number of rows written."""
    if progress.written is not None and not progress.is_stream:
        return f"{counted(progress.written, 'row')} written"
    messages = counted(progress.rows, "message")
    if progress.written is not None:
        messages += f" read, {counted(progress.written, 'row')} written"
    parts = [
        f"{messages} in {counted(progress.batches, 'batch', 'batches')}",
        f"{progress.rows_per_second:,.0f}/s",
    ]
    if progress.entries_behind is not None:
        # Entries of all topics: Spark knows which of them match only after reading them.
        at_most = "at most " if progress.entries_behind else ""
        parts.append(f"{at_most}{counted(progress.entries_behind, 'entry', 'entries')} behind")
    return ", ".join(parts)
