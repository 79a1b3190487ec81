"""Makes the folders of journals and shards when their first file is to be written."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runnel.log.log import ShardId
from runnel.log.segments import paths
from runnel.log.segments.segments import write_whole
from runnel.log.segments.shards_file import write_shards
from runnel.platform.disk import Disk


class ShardFolders:
    """The folders of one data directory. Thread-safe: a shard's first segment and state may be written at once."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        shard_count: Callable[[str], int | None],
        member: str = "",
    ) -> None:
        """`shard_count` returns the number of shards of a journal. `member`: see `write_whole`."""
        self._disk = disk
        self._directory = directory
        self._shard_count = shard_count
        self._member = member
        self._made: set[ShardId] = set()
        self._lock = threading.Lock()

    def make(self, shard_id: ShardId) -> None:
        """Make the folders of a shard and its journal, which say its name and shards. Runs in a worker."""
        with self._lock:
            if shard_id in self._made:
                return
            journal = paths.journal_folder(self._directory, shard_id.journal)
            self._disk.make_directory(journal)
            names = self._disk.list(journal)
            if paths.NAME_FILE not in names:
                write_whole(
                    self._disk,
                    f"{journal}/{paths.NAME_FILE}",
                    shard_id.journal.encode(),
                    member=self._member,
                )
            shards = self._shard_count(shard_id.journal)
            if shards is not None and shards > 1 and paths.SHARDS_FILE not in names:
                write_shards(self._disk, journal, shards, member=self._member)
            self._disk.sync_directory(journal)  # also for a process that was killed before its sync
            self._disk.make_directory(
                paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)
            )
            if shards is not None:  # otherwise its first topic is not made yet
                self._made.add(shard_id)
