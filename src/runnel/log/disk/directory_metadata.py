"""`DirectoryMetadata`: the metadata of a log that has its data directory for itself, in a journal or in SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from runnel.log.metadata.catalogue import LoadedMetadata, MetadataJournal
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import MetadataRecord
from runnel.log.metadata.shared_metadata import Apply, MetadataRecords
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.log.segments import paths
from runnel.log.segments.scan import Damage
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers


class DirectoryMetadata:
    """A `MetadataRecords` that `load` chooses: `cluster.sqlite` once several logs have served the directory."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        workers: Workers,
        journal: MetadataJournal,
        snapshot: Callable[[], Sequence[MetadataRecord]],
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._workers = workers
        self._journal = journal
        self._snapshot = snapshot
        self._database: ClusterDatabase | None = None
        self._shared: SqliteMetadata | None = None

    @property
    def _records(self) -> MetadataRecords:
        return self._journal if self._shared is None else self._shared

    # --- Opening ---

    async def load(self, *, is_shared: bool) -> LoadedMetadata:
        """Read everything. A file of SQLite that is gone is made again, without content."""
        if not is_shared:
            return await self._workers.submit(self._journal.open)
        path = f"{self._directory}/{paths.CLUSTER_FILE}"
        missing: list[Damage] = []
        if paths.CLUSTER_FILE not in self._disk.list(self._directory):
            missing.append(Damage(path, 0, 0, "missing, with all metadata"))
            await self._workers.submit(make_file, self._disk, path, ())
        self._database = await ClusterDatabase.open(path)
        self._shared = SqliteMetadata.alone(self._database)
        loaded = await self._shared.load_alone()
        return LoadedRecords(loaded.records, [*missing, *loaded.damage], None)

    async def renew(self) -> None:
        """Replace what is damaged by a snapshot of the log's tables."""
        if self._shared is None:
            await self._workers.submit(self._journal.renew)
        else:
            await self._shared.renew(await self._workers.submit(self._snapshot))

    # --- Records ---

    def add(
        self,
        *records: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,
    ) -> asyncio.Future[None]:
        return self._records.add(*records, apply=apply, replaces=replaces)

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        return self._records.add_made(make, apply)

    async def take_term(self, producer: str, term: int) -> int:
        return await self._records.take_term(producer, term)

    # --- Copies ---

    async def pause(self) -> None:
        await self._records.pause()

    def resume(self) -> None:
        self._records.resume()

    async def copy_to(self, folder: str) -> None:
        """Write what is recorded into a checkpoint, while paused. The files of a journal are in it already."""
        if self._database is not None:
            await self._database.copy_to(f"{folder}/{paths.CLUSTER_FILE}")

    # --- The end ---

    async def close(self, *records: MetadataRecord) -> None:
        await self._records.close(*records)
        if self._database is not None:
            await self._database.close()

    def release(self) -> None:
        self._journal.release()
        if self._database is not None:
            self._database.release()
