"""Filters the standard error of Java and Spark's Python processes: drops lines that mean nothing.

Spark's daemons print a traceback if Java closes a connection that they were about to write to, which happens at
Ctrl-C and at the end of many queries. Nothing is wrong then, so users of a command do not see it.
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
# Java prints this at every start, because Spark's launcher asks for that module.
_INCUBATOR: Final = b"WARNING: Using incubator modules"


@contextmanager
def filtered_stderr() -> Iterator[None]:
    """Pass the standard error of processes started inside through `worth_telling`, line by line."""
    reading, writing = os.pipe()
    original = os.dup(_STDERR)
    os.dup2(writing, _STDERR)
    os.close(writing)
    threading.Thread(
        target=_pass_on, args=(reading, original), name="runnel-stderr-filter", daemon=True
    ).start()
    try:
        yield
    finally:
        os.dup2(original, _STDERR)


def _pass_on(reading: int, original: int) -> None:
    with os.fdopen(reading, "rb") as lines, os.fdopen(original, "wb", buffering=0) as out:
        for line in worth_telling(lines):
            out.write(line)


def worth_telling(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Drop Python tracebacks through Spark's daemon, and Java's warning. A traceback is yielded when it is complete."""
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
