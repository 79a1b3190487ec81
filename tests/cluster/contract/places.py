"""Where a cluster's state is kept, each made afresh for a scenario."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from pathlib import Path

from runnel.cluster.memory import MemoryCluster
from runnel.cluster.sqlite import SqliteState
from runnel.cluster.state import ClusterState
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.platform.disk import RealDisk
from tests.fakes.clock import VirtualClock

DEADLINE_S = 20.0


class Kind(enum.Enum):
    MEMORY = "memory"
    SQLITE = "sqlite"


class StatePlace:
    """A cluster. `state(name)` is one process's access to it, as if each had a process of its own."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.clock = VirtualClock()
        self._kind = kind
        self._path = str(folder / "cluster.sqlite")
        self._memory = MemoryCluster(self.clock)
        self._states: list[ClusterState] = []
        self._databases: list[ClusterDatabase] = []
        if kind is Kind.SQLITE:
            make_file(RealDisk(), self._path, ())

    async def state(self, name: str) -> ClusterState:
        state: ClusterState
        if self._kind is Kind.MEMORY:
            state = self._memory.state(name)
        else:
            database = await ClusterDatabase.open(self._path)
            self._databases.append(database)
            state = await SqliteState.open(database, name, self.clock)
        self._states.append(state)
        return state

    async def joined(self, name: str, address: str = "") -> ClusterState:
        state = await self.state(name)
        await state.join(address or f"{name}:7470")
        return state

    async def close(self) -> None:
        for state in self._states:
            await state.close()
        for database in self._databases:
            await database.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other nodes see in a moment."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - other processes change it too
            await asyncio.sleep(0.001)


Scenario = Callable[[StatePlace], Awaitable[None]]


def scenario(run: Scenario) -> Callable[[Kind, Path], None]:
    """A test of this scenario, in a place of each kind."""

    def test(kind: Kind, tmp_path: Path) -> None:
        async def act() -> None:
            place = StatePlace(kind, tmp_path)
            try:
                await run(place)
            finally:
                await place.close()

        asyncio.run(act())

    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test
