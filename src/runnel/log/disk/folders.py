"""Folders of journals and shards, made when something is first to lie in them."""

from __future__ import annotations

import threading

from runnel.log.log import ShardId
from runnel.log.segments import paths
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk


class ShardFolders:
    """Those of one data directory. Workers share it: a shard's first segment and its first state may come together."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._made: set[ShardId] = set()
        self._making = threading.Lock()

    def make(self, shard_id: ShardId) -> None:
        """In a worker: the journal's folder, with its real name in a file, before anything is in it."""
        with self._making:
            if shard_id in self._made:
                return
            journal = paths.journal_folder(self._directory, shard_id.journal)
            self._disk.make_directory(journal)
            if paths.NAME_FILE not in self._disk.list(journal):
                write_whole(self._disk, f"{journal}/{paths.NAME_FILE}", shard_id.journal.encode())
            self._disk.sync_directory(journal)  # also for one who was killed before he could
            self._disk.make_directory(
                paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)
            )
            self._made.add(shard_id)
