"""`ClusterDirectory`: a data directory that several logs serve, for the process that starts them."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from typing import Final

from runnel.config import Settings
from runnel.errors import LockedError, SettingsError, Unavailable
from runnel.log.disk import migration
from runnel.log.disk.directory import check_no_nodes, checked_directory, lock_directory
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Recovered
from runnel.log.metadata.records import Closed, MetadataRecord, Opened
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.log.segments import paths
from runnel.log.segments.format_file import SHARED_FORMAT, read_format
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk, DiskLock
from runnel.platform.file_systems import network_file_system
from runnel.platform.workers import Workers
from runnel.topics.policies import Policies

_NODES_WAIT_S: Final = 15.0  # those of a parent that died notice it, and end
_NODES_ASK_S: Final = 0.05
_NS_PER_S: Final = 1_000_000_000


class ClusterDirectory:
    """Holds the directory's lock while others serve it. Make one with `await ClusterDirectory.open(…)`.

    Opening recovers the directory as a single log does, with all that judges it as a whole, and lets its metadata be in
    `cluster.sqlite`. Each shard is recovered again when one of the logs acquires it.
    """

    def __init__(self, directory: str, lock: DiskLock, recovered: Recovered) -> None:
        self.directory: Final = directory
        self.recovered: Final = recovered
        self._lock = lock

    @property
    def database_path(self) -> str:
        return f"{self.directory}/{paths.CLUSTER_FILE}"

    @classmethod
    async def open(
        cls,
        directory: str | PathLike[str],
        *,
        settings: Settings,
        policies: Policies,
        disk: Disk,
        clock: Clock,
        workers: Workers,
    ) -> ClusterDirectory:
        """Lock the directory, or make it; recover it; convert it if one log alone has served it until now.

        LockedError if another process holds it, or if brokers of a process that has died still run after 15 s.
        SettingsError if it lies on a network file system. Otherwise it fails as `DiskLog.open` does.
        """
        path = checked_directory(directory)
        submit = workers.submit
        await submit(_check_local, path)
        lock = await submit(lock_directory, disk, path)
        try:
            await _wait_for_nodes(path, disk, clock, workers)
            log = await DiskLog.open(
                path,
                settings=settings,
                policies=policies,
                disk=disk,
                clock=clock,
                workers=workers,
                is_locked=True,
            )
            await log.close()
            await submit(_share, path, disk, log)
            opened = cls(path, lock, log.recovered)
            await opened._record(Opened(0, clock.time_ns(), has_marks=True))
        except BaseException:
            lock.release()
            raise
        return opened

    async def close(self) -> None:
        """Record that all logs have ended in good order, and release the lock."""
        try:
            with suppress(Unavailable):  # then the next start says that it was not
                await self._record(Closed(0))
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock, after an end that was not in good order. May be called again."""
        self._lock.release()

    async def _record(self, record: MetadataRecord) -> None:
        database = await ClusterDatabase.open(self.database_path)
        try:
            await SqliteMetadata.alone(database).add(record)
        finally:
            await database.close()


def _check_local(directory: str) -> None:
    kind = network_file_system(directory)
    if kind is not None:
        raise SettingsError(
            f"data directory {directory} lies on a network file system ({kind}), whose locks do not keep several "
            "processes apart: use a local disk, or one process"
        )


async def _wait_for_nodes(path: str, disk: Disk, clock: Clock, workers: Workers) -> None:
    """Wait until no log of an earlier parent serves the directory any more."""
    deadline_ns = clock.monotonic_ns() + int(_NODES_WAIT_S * _NS_PER_S)
    while True:
        try:
            await workers.submit(check_no_nodes, disk, path)
        except LockedError:
            if clock.monotonic_ns() > deadline_ns:
                raise
        else:
            return
        await clock.sleep(_NODES_ASK_S)


def _share(path: str, disk: Disk, log: DiskLog) -> None:
    if read_format(disk, path).format == SHARED_FORMAT:
        return
    marks = SyncedMarks(disk, path)
    marks.open()
    try:
        migration.share(disk, path, log.snapshot_of_metadata(), marks)
    finally:
        marks.close()
