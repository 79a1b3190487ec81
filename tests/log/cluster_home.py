"""A data directory on the real disk that one log serves, or several with their metadata in SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from runnel.config import LogSettings, Settings, TopicRule
from runnel.log.disk.cluster_directory import ClusterDirectory
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.log.samples import one

DEADLINE_S = 20.0
RULES = (
    TopicRule(match="wide", journal="wide", partitions=4),
    TopicRule(match="*", journal="main"),
)


def with_journal_shards(count: int) -> Settings:
    return Settings(
        log=LogSettings(allocate_bytes=4096, disk_reserve_bytes=0, journal_shards=count)
    )


class ClusterHome:
    """Opens logs on one directory, and closes what a scenario leaves open."""

    def __init__(self, folder: Path) -> None:
        self.directory = str(folder / "data")
        self.clock = VirtualClock()
        self.disk = RealDisk()
        self.workers = ThreadWorkers(2)
        self.settings = with_journal_shards(4)
        self.rules: Sequence[TopicRule] = RULES
        self._databases: dict[DiskLog, ClusterDatabase] = {}
        self._closings: list[Callable[[], Awaitable[None]]] = []

    async def alone(self) -> DiskLog:
        """The only log of the directory."""
        log = await DiskLog.open(
            self.directory,
            settings=self.settings,
            policies=Policies(self.rules),
            disk=self.disk,
            clock=self.clock,
            workers=self.workers,
        )
        self._closings.append(log.close)
        return log

    async def parent(self) -> ClusterDirectory:
        """What the process does that starts several logs."""
        directory = await ClusterDirectory.open(
            self.directory,
            settings=self.settings,
            policies=Policies(self.rules),
            disk=self.disk,
            clock=self.clock,
            workers=self.workers,
        )

        async def release() -> None:
            directory.release()

        self._closings.append(release)
        return directory

    async def node(self, name: str) -> DiskLog:
        """One of several logs. Its parent is open."""
        database = await ClusterDatabase.open(f"{self.directory}/cluster.sqlite")
        self._closings.append(database.close)
        log = await DiskLog.open(
            self.directory,
            settings=self.settings,
            policies=Policies(self.rules),
            disk=self.disk,
            clock=self.clock,
            workers=self.workers,
            shared=SqliteMetadata(database, name),
        )
        self._closings.append(log.close)
        self._databases[log] = database
        return log

    async def end(self, log: DiskLog) -> None:
        """Let the process of a node end."""
        await log.close()
        await self._databases.pop(log).close()

    def moved_clock(self) -> bool:
        """Move the clock to when something wakes."""
        wake_ns = self.clock.next_wake_ns
        if wake_ns is not None:
            self.clock.advance(wake_ns)
        return True

    async def close(self) -> None:
        for closing in reversed(self._closings):
            await closing()
        self._closings.clear()
        self.workers.close()


def in_home(scenario: Callable[[ClusterHome], Awaitable[None]]) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        async def act() -> None:
            home = ClusterHome(tmp_path)
            try:
                await scenario(home)
            finally:
                await home.close()

        asyncio.run(act())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


async def fill(log: DiskLog) -> None:
    """Metadata of every kind, and messages."""
    for topic in ("a", "wide", "gone", "again", "again"):
        if log.metadata.topics.has(topic):
            await log.metadata.delete_topic(topic)
        await log.metadata.ensure_topic(topic)
        await log.append(one(topic, b"in " + topic.encode()))
    await log.metadata.delete_topic("gone")
    await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=1)], "token")
    await log.metadata.set_subscription("s", b"definition")
    await log.metadata.set_subscription("removed", b"definition")
    await log.metadata.remove_subscription("removed")
    await log.metadata.take_term("p")


def known(log: DiskLog) -> set[str]:
    """All metadata as the log knows it. Openings apart: each adds one."""
    return {str(record) for record in log.snapshot_of_metadata()[1:]}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other logs see in a moment."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - other processes change it too
            await asyncio.sleep(0.001)
