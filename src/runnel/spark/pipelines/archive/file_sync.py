"""Syncs files to the disk before the table names them: its log must not name files that a crash removes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

# More files than this are synced together with everything else on the machine, in one call.
_SYNCED_ALONE_MAX: Final = 64


def sync_path(path: Path, *, leaves_cache: bool = False) -> None:
    """Sync a file's bytes, or a directory's names. `leaves_cache`: also drop its pages from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if leaves_cache and hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def sync_files(table: Path, paths: Iterable[Path]) -> None:
    """Sync complete files of a table, and their names."""
    wanted = list(paths)
    if len(wanted) > _SYNCED_ALONE_MAX:
        os.sync()
        return
    directories = set()
    for path in wanted:
        sync_path(path)
        directories |= {path.parent, path.parent.parent, table}
    for path in directories:
        sync_path(path)


class EarlySync:
    """Syncs files in a thread while they grow, so that little is left to wait for when they are complete.

    Synced pages leave the page cache, which the broker can use better. They are at once available for the next writes;
    fresh pages can take nearly as long as all the rest (bench/spark.py, "archive"). Call `stop` at the end. The system
    reports an error only once, so call `check` before relying on the files.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "runnel-archive-sync")
        self._under_way: Future[None] | None = None

    def begin(self, path: Path) -> None:
        """Start syncing the file's current content, unless a sync is under way; the next call is soon enough then."""
        if self._under_way is not None:
            if not self._under_way.done():
                return
            self._under_way.result()
        self._under_way = self._thread.submit(sync_path, path, leaves_cache=True)

    def check(self) -> None:
        """Wait for the sync under way. OSError if it failed."""
        if self._under_way is not None:
            self._under_way.result()

    def stop(self) -> None:
        self._thread.shutdown()
