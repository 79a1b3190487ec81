"""The process that loads a project's files and runs them through Spark Connect, as `spark-pipelines` does.

Usage: python -m runnel.spark.pipelines.project_process REQUEST. It writes one JSON object per line to standard output:
{"said": …} for output of Spark and the project, {"problem": …} for the reason of a failure.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from io import TextIOBase
from pathlib import Path
from typing import Final, TextIO

import msgspec

_TIME: Final = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: ")
# From here on, Spark's message only advises to read the earlier output.
_SEE_ABOVE: Final = "\n\nTo view the exceptions"
_EXIT_FAILED: Final = 1


class ProjectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run a project."""

    spec: str
    tables: tuple[str, ...] = ()
    full_refresh: bool = False
    dry_run: bool = False

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class ProjectOutput(msgspec.Struct, frozen=True):
    """A line of output of Spark or the project."""

    text: str


class ProjectProblem(msgspec.Struct, frozen=True):
    """The reason why a project failed."""

    text: str


class _Line(msgspec.Struct, omit_defaults=True):
    """A line of the process's standard output, as JSON."""

    said: str | None = None
    problem: str | None = None


def parse_line(line: str) -> ProjectOutput | ProjectProblem:
    """Parse a line of the process. A line that is not in this format was printed by other code."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError:
        return ProjectOutput(line.rstrip("\n"))
    return (
        ProjectOutput(found.said or "") if found.problem is None else ProjectProblem(found.problem)
    )


def condensed(text: str) -> str:
    """Spark's text for an event in one line; for an error, only its reason, without plans and traces."""
    from runnel.spark.pipelines.statement import explained
    from runnel.spark.pipelines.streaming_query import reason_in

    text = _TIME.sub("", text.strip())
    head, newline, rest = text.partition("\n")
    return f"{head} {' '.join(explained('', reason_in(rest)).split())}" if newline else head


class _Lines(TextIOBase):
    """The project's standard output. Each printed text becomes a line."""

    def __init__(self, to: TextIO) -> None:
        self._to = to

    def write(self, text: str) -> int:
        if text.strip():
            self.write_line(_Line(said=condensed(text)))
        return len(text)

    def write_line(self, line: _Line) -> None:
        self._to.write(f"{msgspec.json.encode(line).decode()}\n")
        self._to.flush()


def main() -> int:
    request = msgspec.json.decode(sys.argv[1], type=ProjectRequest)
    lines = _Lines(sys.stdout)
    sys.stdout = lines  # it has all that print needs
    warnings.simplefilter("ignore")
    from pyspark.errors import PySparkException
    from pyspark.pipelines import cli

    from runnel.spark.pipelines.streaming_query import reason_of

    refreshed = request.full_refresh
    try:
        cli.run(
            spec_path=Path(request.spec),
            full_refresh=list(request.tables) if refreshed else [],
            full_refresh_all=refreshed and not request.tables,
            refresh=[] if refreshed else list(request.tables),
            dry=request.dry_run,
        )
    except PySparkException as error:
        reason = reason_of(error).partition(_SEE_ABOVE)[0].strip()
        lines.write_line(_Line(problem=_placed(error, reason, request)))
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the project's own code: whatever it raises
        text = "".join(traceback.format_exception_only(error)).strip()
        lines.write_line(_Line(problem=_placed(error, text, request)))
        return _EXIT_FAILED
    return 0


def _placed(error: BaseException, text: str, request: ProjectRequest) -> str:
    """The text with the project's file and line that raised the error, if one did."""
    root = Path(request.spec).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root)
    ]
    if not frames:
        return text
    return f"{Path(frames[-1].filename).relative_to(root)}, line {frames[-1].lineno}: {text}"


if __name__ == "__main__":
    sys.exit(main())
