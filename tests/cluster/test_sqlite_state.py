"""What is special to nodes and owners in SQLite: how they and the metadata of their logs go together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from runnel.cluster.sqlite import SqliteState
from runnel.cluster.state import ClusterView
from runnel.errors import FencedError
from runnel.log.log import ShardId
from runnel.log.metadata.records import SubscriptionSet
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.platform.disk import RealDisk
from tests.cluster.contract.places import until
from tests.fakes.clock import VirtualClock

SHARD = ShardId("main", 3)


class Place:
    """A file, with a connection for each process."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._databases: list[ClusterDatabase] = []
        make_file(RealDisk(), self._path, ())

    async def process(self, name: str) -> tuple[SqliteState, SqliteMetadata]:
        database = await ClusterDatabase.open(self._path)
        self._databases.append(database)
        state = await SqliteState.open(database, name, VirtualClock())
        return state, SqliteMetadata(database, name)

    async def node(self, name: str) -> tuple[SqliteState, SqliteMetadata]:
        """A process whose log is open, and which has joined then."""
        state, metadata = await self.process(name)
        await metadata.load(lambda _: None)
        await state.join("")
        return state, metadata

    async def close(self) -> None:
        for database in self._databases:
            await database.close()


def scenario(run: Callable[[Place], Awaitable[None]]) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        async def act() -> None:
            place = Place(tmp_path / "cluster.sqlite")
            try:
                await run(place)
            finally:
                await place.close()

        asyncio.run(act())

    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test


@scenario
async def test_node_declared_dead_cannot_change_metadata(place: Place) -> None:
    _, metadata = await place.node("first")
    parent, _ = await place.process("")
    await parent.declare_dead("first", 1)
    with pytest.raises(FencedError):
        await metadata.add(SubscriptionSet("s", b""))


@scenario
async def test_late_declaration_of_a_death_does_not_fence_the_next_life(place: Place) -> None:
    """The parent may have had to try again, and the next process is there already."""
    await place.node("first")
    parent, _ = await place.process("")
    state, metadata = await place.process("first")
    await metadata.load(lambda _: None)
    await parent.declare_dead("first", 1)
    await metadata.add(SubscriptionSet("s", b""))
    assert (await state.join("")).incarnation == 2
    await parent.declare_dead("first", 1)
    await metadata.add(SubscriptionSet("t", b""))
    await state.begin_term(SHARD, 1, 1)
    await parent.declare_dead("first", 2)
    with pytest.raises(FencedError):
        await metadata.add(SubscriptionSet("u", b""))


@scenario
async def test_single_log_ends_the_lives_of_all_nodes(place: Place) -> None:
    """It is opened only when none of them runs."""
    state, metadata = await place.node("first")
    await state.begin_term(SHARD, 1, 1)
    single = (await place.process("second"))[1]
    await SqliteMetadata.alone(single._database).load_alone()
    await until(lambda: not state.view().is_served(SHARD))
    for change in (state.end_term(SHARD, 1, 2), metadata.take_term("p", 1)):
        with pytest.raises(FencedError):
            await change
    assert (await state.join("")).incarnation == 2


@scenario
async def test_change_is_seen_by_other_processes_within_a_moment(place: Place) -> None:
    """Also by one that has been idle for long: it asks 20 times a second."""
    first, _ = await place.node("first")
    second, _ = await place.node("second")
    await asyncio.sleep(0.4)  # the attention to what follows a change ends
    seen: list[ClusterView] = []
    second.watch(seen.append)
    await first.want(SHARD, "second", "asked for")
    await until(lambda: bool(seen))
    assert seen[0].owners[SHARD].wanted == "second"
