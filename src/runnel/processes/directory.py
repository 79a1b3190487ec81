"""The data directory as the parent of several nodes holds it: its lock, and the state that the nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Self

from runnel.cluster.sqlite import SqliteState
from runnel.config import Settings
from runnel.log.disk.cluster_directory import ClusterDirectory
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.platform.clock import SystemClock
from runnel.platform.diagnostics import get_logger
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies

logger = get_logger("runnel")

# The parent's name in the state. It is no node, and never joins.
_OBSERVER: Final = "parent"


class ParentDirectory:
    """The directory of a parent. Make it with `await ParentDirectory.open(…)`."""

    def __init__(
        self, recovered: Sequence[str], state: SqliteState, opened: AsyncExitStack
    ) -> None:
        self.recovered: Final = recovered
        self._state = state
        self._opened = opened

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        """Lock the directory, recover it, and prepare it for several nodes. Fails as the start of one broker does."""
        clock = SystemClock()
        async with AsyncExitStack() as opened:
            workers = ThreadWorkers(settings.log.writers)
            opened.callback(workers.close)
            directory = await ClusterDirectory.open(
                settings.data,
                settings=settings,
                policies=Policies(settings.topics, partitions_max=settings.limits.partitions_max),
                disk=RealDisk(),
                clock=clock,
                workers=workers,
            )
            opened.push_async_callback(directory.close)
            database = await ClusterDatabase.open(directory.database_path)
            opened.push_async_callback(database.close)
            state = await SqliteState.open(database, _OBSERVER, clock)
            opened.push_async_callback(state.close)
            parent = cls(directory.recovered.lines, state, opened.pop_all())
        for line in parent.recovered:
            logger.warning("the data directory was recovered", found=line)
        return parent

    def life_of(self, name: str) -> int | None:
        """The incarnation of a node that lives, as far as is known; None: it does not."""
        node = self._state.view().nodes.get(name)
        return node.incarnation if node is not None and node.is_alive else None

    async def declare_dead(self, name: str, incarnation: int) -> None:
        """Fence a node whose process has ended. Unavailable: try again."""
        await self._state.declare_dead(name, incarnation)

    async def close(self) -> None:
        """Record that all nodes have ended in good order, and release the lock."""
        await self._opened.aclose()
