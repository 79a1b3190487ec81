"""The medium of a history: group stores that lose answers, as the plan says."""

from __future__ import annotations

from random import Random
from typing import Final

from runnel.log.disk.group_writer import FileGroupStore, GroupWriter
from runnel.log.group_store import BatchGroup
from runnel.log.log import ShardId
from runnel.platform.workers import Workers
from tests.fakes.lossy_store import Fate, LossyStore
from tests.log.simulation.plan import Losses

_LOST: Final = (Fate.LOST_BEFORE, Fate.LOST_AFTER)


class Medium:
    """Makes the group stores of the shards, and draws what becomes of each attempt. One for a history."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._random = Random(losses.seed)
        self._stores: list[LossyStore] = []
        self._stuck: set[ShardId] = set()  # every attempt is unknown
        self.is_well = False  # no answer is lost
        self.unknown_count = 0

    def begin_process(self) -> None:
        self._stores = []
        self._stuck = set()

    def make(self, shard: ShardId, writer: GroupWriter, workers: Workers) -> LossyStore:
        store = LossyStore(FileGroupStore(shard, writer, workers), self._draw)
        self._stores.append(store)
        return store

    def _draw(self, group: BatchGroup, is_repeated: bool) -> Fate:
        if self.is_well:
            return Fate.STORED
        losses, random = self._losses, self._random
        if group.shard in self._stuck:
            fate = random.choice((*_LOST, Fate.FAILED)) if is_repeated else Fate.LOST_AFTER
        else:
            shares = (losses.before, losses.after, losses.failed, losses.hangs)
            fates = (*_LOST, Fate.FAILED, Fate.HANGS, Fate.STORED)
            fate = random.choices(fates, (*shares, max(0.2, 1 - sum(shares))))[0]
        if fate in _LOST:
            self.unknown_count += 1
            if random.random() < losses.stays_unknown:
                self._stuck.add(group.shard)
        return fate

    def tell(self, *, heals: bool) -> None:
        """What hangs goes on. If the medium heals, outcomes become known."""
        for store in self._stores:
            store.tell()
        if heals:
            self._stuck.clear()

    @property
    def has_failures(self) -> bool:
        """Whether it has failed cleanly in this process."""
        return any(store.failures for store in self._stores)

    def has_failed(self, error: BaseException) -> bool:
        """Whether this is a failure that the medium invented."""
        return any(error is failure for store in self._stores for failure in store.failures)
