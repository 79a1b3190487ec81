"""What the systems of the queue benchmark have in common: the plan of a role, and the tally that all of them keep."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bench.processes import RoleReport

TOPIC = "stored/work"
SUBSCRIPTION = "work"
_SLOT = struct.Struct("<q")


class WorkPlan(msgspec.Struct, frozen=True):
    """What a role has to do."""

    url: str
    tally: str = ""  # the file of the tally
    place: int = 0  # of this consumer in it
    count: int = 0  # messages to publish, or to hold
    keys: int = 0  # over how many keys they are spread; 0: they have none
    mode: str = "shared"
    subscriptions: int = 0  # how many to make
    is_shuffled: bool = False  # acknowledge in random order


class AckTally:
    """How many messages each consumer has acknowledged: a few bytes that all processes see.

    A consumer does not know how many will come to it; who adds them up knows when all of them have been taken.
    """

    def __init__(self, path: str | Path, place: int = 0) -> None:
        self._file = Path(path).open("r+b")  # noqa: SIM115 - closed by __exit__
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._position = place * _SLOT.size
        self.count = 0
        self.end_ns = 0

    @classmethod
    def make(cls, path: Path, places: int) -> Self:
        path.write_bytes(bytes(places * _SLOT.size))
        return cls(path)

    def add(self, messages: int) -> None:
        self.reach(self.count + messages)

    def reach(self, count: int) -> None:
        """So many altogether are acknowledged, as of now."""
        self.count = count
        self.end_ns = time.time_ns()
        _SLOT.pack_into(self._memory, self._position, count)

    def total(self) -> int:
        return sum(count for (count,) in _SLOT.iter_unpack(self._memory))

    def report(self, *, misplaced: int = 0) -> RoleReport:
        return RoleReport(end_ns=self.end_ns, messages=self.count, misplaced=misplaced)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.close()
        self._file.close()
