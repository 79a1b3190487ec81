"""A data directory that a test opens, closes, kills and opens again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import msgspec

from runnel.config import LimitSettings, LogSettings, Settings, TopicRule
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.group_writer import MakeGroupStore
from runnel.log.segments import paths
from runnel.platform.disk import FileAccess
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers
from tests.log.images import without_segment_marks

LOG = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0)


class Home:
    """One directory on a fake disk, with the settings for its next opening."""

    def __init__(
        self, *rules: TopicRule, log: LogSettings = LOG, disk: FakeDisk | None = None
    ) -> None:
        self.rules = rules
        self.settings = Settings(log=log)
        self.disk = disk or FakeDisk(7)
        self.clock = VirtualClock()
        self.directory = "data"
        self._random = Random(7)
        self.workers = SimulatedWorkers(self._random)

    def limit(self, **limits: int) -> Home:
        set_limits = msgspec.structs.replace(LimitSettings(), **limits)
        self.settings = Settings(log=self.settings.log, limits=set_limits)
        return self

    async def open(self, make_group_store: MakeGroupStore | None = None) -> DiskLog:
        self.workers = SimulatedWorkers(self._random)
        return await DiskLog.open(
            self.directory,
            settings=self.settings,
            policies=Policies(self.rules),
            disk=self.disk,
            clock=self.clock,
            workers=self.workers,
            make_group_store=make_group_store,
        )

    async def reopen(self, log: DiskLog) -> DiskLog:
        """Closed in good order, and opened again."""
        await log.close()
        return await self.open()

    async def kill(self) -> DiskLog:
        """The process dies; the next one opens what it left."""
        self.disk = self.disk.restart()
        return await self.open()

    async def crash(self) -> DiskLog:
        """The machine dies: of what was not synced, anything may be lost."""
        self.disk.crash()
        self.disk = self.disk.restart()
        return await self.open()

    # --- The files ---

    def shard_files(self, suffix: str, journal: str = "main") -> list[str]:
        """Paths of a shard's files, oldest first."""
        folder = f"{self.directory}/journals/{journal}/0"
        return [f"{folder}/{name}" for name in self.disk.list(folder) if name.endswith(suffix)]

    def metadata_files(self) -> list[str]:
        return self._files(f"{self.directory}/{paths.METADATA}")

    def catalogue_files(self, journal: str = "main", shard: int = 0) -> list[str]:
        folder = paths.shard_folder(self.directory, journal, shard)
        return self._files(paths.catalogue_folder(folder))

    def _files(self, folder: str) -> list[str]:
        return [f"{folder}/{name}" for name in self.disk.list(folder)]

    def content(self, path: str) -> bytes:
        file = self.disk.open(path, FileAccess.READ)
        return file.read(0, file.size())

    def lose_segment_marks(self) -> None:
        """As after a power loss: nothing is known of the segments that were written to last."""
        path = f"{self.directory}/{paths.MARKS_FILE}"
        self.overwrite(path, without_segment_marks(self.content(path)))

    def overwrite(self, path: str, content: bytes) -> None:
        file = self.disk.open(path, FileAccess.WRITE)
        file.truncate(0)
        file.write(0, [content], sync=True)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function as a test's body."""

    async def main() -> None:
        await scenario()

    asyncio.run(main())
