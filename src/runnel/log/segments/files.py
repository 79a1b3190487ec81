"""A bounded number of open files, shared by all shards: the least recently used is closed for the next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import TracebackType

from runnel.platform.disk import Disk, File, FileAccess


class _Open:
    __slots__ = ("file", "is_stale", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0
        self.is_stale = False


class OpenFiles:
    """Open files by path. Used from workers and from the loop, so a lock guards the table.

    A file in use is never closed; if all are in use, the limit is passed rather than a reader refused, by as
    many files as there are workers.
    """

    def __init__(self, disk: Disk, open_files_max: int) -> None:
        self._disk = disk
        self._open_files_max = open_files_max
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, path: str, access: FileAccess = FileAccess.WRITE) -> FileUse:
        """The file, open for reading and writing for the time of a `with`."""
        return FileUse(self, path, access)

    def forget(self, path: str) -> None:
        """The path now names another file, or none: whoever still reads the old one may finish."""
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is not None:
                entry.is_stale = True
                if not entry.users:
                    entry.file.close()

    def close(self) -> None:
        for path in list(self._open):
            self.forget(path)

    def take(self, path: str, access: FileAccess) -> _Open:
        """What `use` does first. Whoever takes must give back."""
        # Opening under the lock: two openers of one path would leave a file behind that nobody closes.
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = _Open(self._disk.open(path, access))
                self._close_idle()
            entry.users += 1
            self._open.move_to_end(path)
            return entry

    def give_back(self, entry: _Open) -> None:
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
    """The time of one `with`. A class: a generator would cost a page of batches a hundredth (bench/log.py, "read")."""

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
