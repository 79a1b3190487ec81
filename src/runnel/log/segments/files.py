"""Keeps a bounded number of files open for all shards; the least recently used one is closed first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import TracebackType

from runnel.platform.disk import Disk, File, FileAccess


class _OpenFile:
    """A file in the table, and the number of its current users."""

    __slots__ = ("file", "is_stale", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0
        self.is_stale = False


class OpenFiles:
    """Open files by path. Used from workers and from the loop, so a lock guards the table.

    A file in use is never closed. If all files are in use, the table exceeds its limit instead of refusing a reader, by
    as many files as there are workers.
    """

    def __init__(self, disk: Disk, open_files_max: int) -> None:
        self._disk = disk
        self._open_files_max = open_files_max
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, path: str, access: FileAccess = FileAccess.WRITE) -> FileUse:
        """A context manager that holds the file open for reading and writing."""
        return FileUse(self, path, access)

    def forget(self, path: str) -> None:
        """Drop a file whose path now names another file or none. Its current readers may finish."""
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is not None:
                entry.is_stale = True
                if not entry.users:
                    entry.file.close()

    def close(self) -> None:
        for path in list(self._open):
            self.forget(path)

    def take(self, path: str, access: FileAccess) -> _OpenFile:
        """Open or reuse the file for `FileUse`. Each call needs a `give_back`."""
        # Open under the lock: two openers of one path would leave a file that is never closed.
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = _OpenFile(self._disk.open(path, access))
                self._close_idle()
            entry.users += 1
            self._open.move_to_end(path)
            return entry

    def give_back(self, entry: _OpenFile) -> None:
        with self._lock:
            entry.users -= 1
            if entry.is_stale and not entry.users:
                entry.file.close()

    def _close_idle(self) -> None:
        for path, entry in list(self._open.items()):
            if len(self._open) <= self._open_files_max:
                return
            if not entry.users and path != next(reversed(self._open)):
                del self._open[path]
                entry.file.close()


class FileUse:
    """Holds a file open for one `with`. A generator would make a page of batches 1 % slower (bench/log.py, "read")."""

    __slots__ = ("_access", "_entry", "_files", "_path")

    def __init__(self, files: OpenFiles, path: str, access: FileAccess) -> None:
        self._files = files
        self._path = path
        self._access = access

    def __enter__(self) -> File:
        self._entry = self._files.take(self._path, self._access)
        return self._entry.file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.give_back(self._entry)
