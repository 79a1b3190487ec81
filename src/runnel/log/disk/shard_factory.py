"""`ShardFactory`: makes the shards of a data directory, each for one term of ownership."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runnel.config import Keep, Settings
from runnel.log.disk.folders import ShardFolders
from runnel.log.disk.group_writer import FileGroupStore, GroupWriter, MakeGroupStore
from runnel.log.disk.last_value_keeper import LastValueKeeper
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.writer import ShardParts
from runnel.log.log import LogListener, ShardId, SubscriptionHolds
from runnel.log.metadata.catalogue import ShardCatalogue
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.producers import ProducerTable
from runnel.log.retention.holds import ShardHolds
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import IndexCache, SegmentFolder
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.policies import Policies


class ShardFactory:
    """Makes shards and their catalogues from what all shards of a log share."""

    def __init__(
        self,
        directory: str,
        settings: Settings,
        policies: Policies,
        tables: LogTables,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        files: OpenFiles,
        marks: SyncedMarks,
        folders: ShardFolders,
        tasks: OwnedTasks,
        listener: LogListener,
        holds: SubscriptionHolds | None,
        make_group_store: MakeGroupStore | None,
        *,
        of_journal: Callable[[str], Sequence[DiskShard]],
        on_damage: Callable[[Damage], None],
    ) -> None:
        """`of_journal` returns the shards of a journal that are served here."""
        self._directory = directory
        self._settings = settings
        self._policies = policies
        self._tables = tables
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._files = files
        self._marks = marks
        self._folders = folders
        self._tasks = tasks
        self.listener = listener
        self._holds = holds
        self._make_group_store = make_group_store or self._make_file_store
        self._of_journal = of_journal
        self._on_damage = on_damage
        self._cache = IndexCache(settings.log.index_cache_bytes_max)
        self._last_keeper = LastValueKeeper(tables.keeps_last_value, workers, settings.log)

    def folder(self, shard_id: ShardId) -> str:
        return paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)

    def make_folder(self, shard_id: ShardId) -> None:
        """Make the folder of a shard, if there is none. Blocks."""
        self._folders.make(shard_id)

    def catalogue(self, shard_id: ShardId) -> ShardCatalogue:
        """The catalogue of a shard, not opened yet."""
        return ShardCatalogue(
            self._disk,
            self._workers,
            shard_id,
            self.folder(shard_id),
            marks=self._marks,
            bytes_max=self._settings.log.catalogue_log_bytes_max,
            make_shard_folder=lambda: self._folders.make(shard_id),
        )

    def shard(self, shard_id: ShardId, catalogue: ShardCatalogue, epoch: int) -> DiskShard:
        """A shard without messages, for the term of this epoch."""
        return DiskShard(
            shard_id,
            ShardParts(
                self._disk,
                self._clock,
                self._workers,
                self._files,
                self._tasks,
                self._settings.log,
                self.listener,
                self._marks,
                self._make_group_store,
                catalogue,
                epoch,
            ),
            self._policies.for_journal(shard_id.journal, keep=Keep.DISK),
            SegmentFolder(self._disk, self._files, self.folder(shard_id)),
            self._cache,
            self._producers(),
            self._producers(),
            make_folder=lambda: self._folders.make(shard_id),
            of_journal=lambda: self._of_journal(shard_id.journal),
            find=self._tables.find_partition,
            partitions=lambda: self._tables.topics.partitions_in(shard_id),
            shard_holds=ShardHolds(shard_id, self._tables.cursors, self._holds),
            before_removal=self._last_keeper.take_over,
            on_damage=self._on_damage,
        )

    def _producers(self) -> ProducerTable:
        settings = self._settings
        return ProducerTable(settings.limits.producers_max, settings.log.producer_age_max_ns)

    def _make_file_store(self, shard_id: ShardId, writer: GroupWriter) -> FileGroupStore:
        return FileGroupStore(shard_id, writer, self._workers)
