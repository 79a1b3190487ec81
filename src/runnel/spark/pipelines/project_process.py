"""The process that loads a project's files and runs them through Spark Connect, as `spark-pipelines` does.

Usage: python -m runnel.spark.pipelines.project_process REQUEST. What happens goes to standard output, a JSON object a
line: {"said": …} for what Spark and the project tell, {"problem": …} for why it failed.
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
# Behind it, Spark advises to read what was told before.
_SEE_ABOVE: Final = "\n\nTo view the exceptions"
_EXIT_FAILED: Final = 1


class ProjectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    spec: str
    tables: tuple[str, ...] = ()
    full_refresh: bool = False
    dry_run: bool = False

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class ProjectOutput(msgspec.Struct, frozen=True):
    text: str


class ProjectProblem(msgspec.Struct, frozen=True):
    text: str


class _Line(msgspec.Struct, omit_defaults=True):
    said: str | None = None
    problem: str | None = None


def parse_line(line: str) -> ProjectOutput | ProjectProblem:
    """A line of the process; anything that is not one of ours is something that somebody printed."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError:
        return ProjectOutput(line.rstrip("\n"))
    return (
        ProjectOutput(found.said or "") if found.problem is None else ProjectProblem(found.problem)
    )


def condensed(text: str) -> str:
    """What Spark says of an event: one line, and of an error its reason, without plans and traces."""
    from runnel.spark.pipelines.statement import explained
    from runnel.spark.pipelines.streaming_query import reason_in

    text = _TIME.sub("", text.strip())
    head, newline, rest = text.partition("\n")
    return f"{head} {' '.join(explained('', reason_in(rest)).split())}" if newline else head


class _Lines(TextIOBase):
    """Standard output of the project: each thing that is printed becomes a line."""

    def __init__(self, to: TextIO) -> None:
        self._to = to

    def write(self, text: str) -> int:
        if text.strip():
            self.tell_of(_Line(said=condensed(text)))
        return len(text)

    def tell_of(self, line: _Line) -> None:
        self._to.write(f"{msgspec.json.encode(line).decode()}\n")
        self._to.flush()


def main() -> int:
    request = msgspec.json.decode(sys.argv[1], type=ProjectRequest)
    lines = _Lines(sys.stdout)
    sys.stdout = lines  # all that print needs of it is there
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
        lines.tell_of(_Line(problem=_placed(error, reason, request)))
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the project's own code: whatever it raises
        told = "".join(traceback.format_exception_only(error)).strip()
        lines.tell_of(_Line(problem=_placed(error, told, request)))
        return _EXIT_FAILED
    return 0


def _placed(error: BaseException, told: str, request: ProjectRequest) -> str:
    """With the line of the project that it came from, if it came from one."""
    root = Path(request.spec).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root)
    ]
    if not frames:
        return told
    return f"{Path(frames[-1].filename).relative_to(root)}, line {frames[-1].lineno}: {told}"


if __name__ == "__main__":
    sys.exit(main())
