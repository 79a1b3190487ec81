"""The servers of one part: fresh for each run, or standing for all of it where starting one takes long."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import Self

import msgspec

from bench.systems.system import Served


class Servers:
    """Leaving the block ends those that stand.

    A server that stands (`STANDS` in its module) is told run by run by what comes after the # of its address:
    topics and queues take their names from it, so that each run has its own.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._standing: dict[str, Served] = {}
        self._runs = itertools.count(1)

    @contextmanager
    def serve(self, system: ModuleType, *, stored: str = "") -> Iterator[Served]:
        if not getattr(system, "STANDS", False):
            with system.serve(stored=stored) as fresh:
                yield fresh
            return
        if system.NAME not in self._standing:
            self._standing[system.NAME] = self._stack.enter_context(system.serve())
        standing = self._standing[system.NAME]
        run = f"{stored or 'default'}-{next(self._runs)}"
        yield msgspec.structs.replace(standing, url=f"{standing.url}#{run}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
