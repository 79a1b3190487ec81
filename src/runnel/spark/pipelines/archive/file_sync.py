"""Files on the disk before anybody is told of them: the log of a table must not name what a crash takes away."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

# More files than this are synced with everything else on the machine, in one go.
_SYNCED_ALONE_MAX: Final = 64


def sync_path(path: Path, *, leaves_cache: bool = False) -> None:
    """A file's bytes, or a directory's names. What `leaves_cache` is read from the disk when it is next wanted."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if leaves_cache and hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def sync_files(table: Path, paths: Iterable[Path]) -> None:
    """Files of a table that are complete, and their names."""
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
    """Syncs files while they grow, in a thread, so that little is left to wait for when they are complete.

    What is on the disk leaves the page cache, which the broker has better use for; and its pages are there at once for
    what is written next, where fresh ones can take nearly as long as all the rest (bench/spark.py, "archive").
    It must be stopped. The system tells an error only once: so whoever ends well has to `check`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "runnel-archive-sync")
        self._under_way: Future[None] | None = None

    def begin(self, path: Path) -> None:
        """With what this file has now, unless a sync is under way: then the next time is soon enough."""
        if self._under_way is not None:
            if not self._under_way.done():
                return
            self._under_way.result()
        self._under_way = self._thread.submit(sync_path, path, leaves_cache=True)

    def check(self) -> None:
        """Wait for what has begun. OSError if it failed."""
        if self._under_way is not None:
            self._under_way.result()

    def stop(self) -> None:
        self._thread.shutdown()
