"""A group store that loses answers: it stores or not, and may say that it does not know."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from runnel.errors import DiskFullError
from runnel.log.disk.group_writer import FileGroupStore, GroupWriter, MakeGroupStore
from runnel.log.group_store import STORED, BatchGroup, Failed, GroupStore, Outcome, Stored, Unknown
from runnel.log.log import ShardId
from runnel.platform.workers import Workers


class Fate(enum.Enum):
    """What becomes of one attempt to store a group."""

    STORED = "stored"
    LOST_BEFORE = "not stored, and unknown"
    LOST_AFTER = "stored, and unknown"
    FAILED = "not stored, and failed"
    HANGS = "silent until told"


class LossyStore:
    """Stores groups in the segment files, and loses answers as `draw` says.

    It is as simple as a database with a unique key: a group whose first entry is present is stored, whatever else it
    holds. `draw` gets each attempt, and whether its group is a repetition.
    """

    def __init__(self, inner: GroupStore, draw: Callable[[BatchGroup, bool], Fate]) -> None:
        self._inner = inner
        self._draw = draw
        self._present: set[tuple[int, int]] = set()  # epoch and first entry
        self._unknown: tuple[int, int] | None = None
        self._told: asyncio.Event = asyncio.Event()
        self.attempts: list[tuple[BatchGroup, Fate]] = []
        self.failures: list[DiskFullError] = []  # that it invented itself
        self.is_abandoned = False

    def store(self, group: BatchGroup) -> asyncio.Future[Outcome]:
        fate = self._draw(group, self._unknown is not None)
        self.attempts.append((group, fate))
        if fate is Fate.HANGS:
            self._told.clear()
        return asyncio.ensure_future(self._attempt(group, fate))

    def abandon(self) -> None:
        self.is_abandoned = True
        self._told.set()

    def tell(self) -> None:
        """What hangs goes on: it is stored and answered."""
        self._told.set()

    async def _attempt(self, group: BatchGroup, fate: Fate) -> Outcome:
        key = (group.epoch, group.first_entry)
        if fate is Fate.HANGS:
            await self._told.wait()
        outcome = await self._outcome(group, key, fate)
        self._unknown = key if isinstance(outcome, Unknown) else None
        return outcome

    async def _outcome(self, group: BatchGroup, key: tuple[int, int], fate: Fate) -> Outcome:
        if self.is_abandoned or fate is Fate.LOST_BEFORE:
            return Unknown("the connection was lost")
        if fate is Fate.FAILED:
            self.failures.append(DiskFullError("the test's medium has no room"))
            return Failed(self.failures[-1])
        if key not in self._present:
            outcome = await self._inner.store(group)
            if not isinstance(outcome, Stored):
                return outcome
            self._present.add(key)
        return Unknown("the answer was lost") if fate is Fate.LOST_AFTER else STORED


def lossy(workers: Workers, draw: Callable[[BatchGroup, bool], Fate]) -> MakeGroupStore:
    """For `DiskLog.open`: every shard's store loses answers as `draw` says."""

    def make(shard: ShardId, writer: GroupWriter) -> LossyStore:
        return LossyStore(FileGroupStore(shard, writer, workers), draw)

    return make
