"""The servers of one part: fresh for each run, or standing for all of it where starting one takes long.

One that stands sleeps (SIGSTOP) while others are measured. Even idle, those of Java and Erlang take processor time now
and then, and on two cores the measured system waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType, TracebackType
from typing import Self

import msgspec
import psutil

from bench.systems.system import RunningServer


class Servers:
    """Leaving the block ends those that stand.

    A server that stands (`STANDS` in its module) is told run by run by what comes after the # of its address:
    topics and queues take their names from it, so that each run has its own.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._standing: dict[str, RunningServer] = {}
        self._runs = itertools.count(1)

    @contextmanager
    def serve(self, system: ModuleType, *, stored: str = "") -> Iterator[RunningServer]:
        if not getattr(system, "STANDS", False):
            with system.serve(stored=stored) as fresh:
                yield fresh
            return
        if system.NAME not in self._standing:
            standing = self._standing[system.NAME] = self._stack.enter_context(system.serve())
            self._stack.callback(_tell_all, standing, psutil.Process.resume)  # asleep it cannot end
        standing = self._standing[system.NAME]
        run = f"{stored or 'default'}-{next(self._runs)}"
        _tell_all(standing, psutil.Process.resume)
        try:
            yield msgspec.structs.replace(standing, url=f"{standing.url}#{run}")
        finally:
            _tell_all(standing, psutil.Process.suspend)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _tell_all(served: RunningServer, tell: Callable[[psutil.Process], None]) -> None:
    """The server's process and those that it has started; where it has ended by itself, `serving` tells."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(served.pid)
        for each in (process, *process.children(recursive=True)):
            tell(each)
