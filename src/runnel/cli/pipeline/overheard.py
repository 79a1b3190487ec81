"""What Java and Spark's Python processes say on standard error, without what they say whenever they end.

Spark's daemons print a trace if Java closes a connection that they were about to write to, as it does at Ctrl-C and at
the end of many a query. Nothing is wrong then, so users of a command do not see it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

_STDERR: Final = 2
_TRACE: Final = b"Traceback (most recent call last):"
_DAEMON: Final = b"pyspark/daemon.py"
# Said by Java itself at every start, because Spark's launcher asks for that module.
_INCUBATOR: Final = b"WARNING: Using incubator modules"


@contextmanager
def overheard() -> Iterator[None]:
    """Processes that are started within have their standard error passed on line by line, as `worth_telling` says."""
    reading, writing = os.pipe()
    told = os.dup(_STDERR)
    os.dup2(writing, _STDERR)
    os.close(writing)
    threading.Thread(
        target=_pass_on, args=(reading, told), name="runnel-overheard", daemon=True
    ).start()
    try:
        yield
    finally:
        os.dup2(told, _STDERR)


def _pass_on(reading: int, told: int) -> None:
    with os.fdopen(reading, "rb") as lines, os.fdopen(told, "wb", buffering=0) as out:
        for line in worth_telling(lines):
            out.write(line)


def worth_telling(lines: Iterable[bytes]) -> Iterator[bytes]:
    """All lines but those of Python traces that lead through Spark's daemon. A trace is told when it is complete."""
    trace: list[bytes] = []
    for line in lines:
        if line.startswith(_TRACE):
            yield from _unless_daemon(trace)
            trace = [line]
        elif trace and line.startswith(b" "):
            trace.append(line)
        elif trace:
            yield from _unless_daemon([*trace, line])
            trace = []
        elif not line.startswith(_INCUBATOR):
            yield line


def _unless_daemon(trace: list[bytes]) -> list[bytes]:
    return [] if any(_DAEMON in line for line in trace) else trace
