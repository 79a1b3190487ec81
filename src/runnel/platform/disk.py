"""The disk: files, directories and locks as the log needs them, and the real ones.

Everything here blocks, so it is called from workers. An `OSError` passes through as it came, with
`errno` and `filename`. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import builtins
import enum
import errno
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from runnel.errors import LockedError

Buffer = bytes | bytearray | memoryview

IOV_MAX = 1024  # the most buffers that Linux takes in one call
ZEROS_BYTES = 1 << 20

# Only the broker's user may read messages. Existing files keep their permissions.
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700

# Absent where the platform has no such flag.
_RWF_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_RWF_DSYNC: int | None = getattr(os, "RWF_DSYNC", None)
# A number that no open file can have: every system call answers it with EBADF.
_CLOSED = 0x7FFF_FFFF
# Errors of kernels and file systems that do not know a flag or a call.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class FileAccess(enum.Enum):
    """What a file is opened for."""

    READ = enum.auto()
    WRITE = enum.auto()  # an existing file, to read and write
    CREATE = enum.auto()  # a new file, to read and write; FileExistsError if there is one


class File(Protocol):
    """An open file. Positions are bytes from its beginning; nothing moves a shared cursor."""

    @property
    def path(self) -> str: ...

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes from `position` on; fewer only at the end of the file."""
        ...

    def read_nowait(self, position: int, size: int) -> memoryview | bytes | None:
        """The same if it can be had without waiting for the device, else None."""
        ...

    def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        """Write all of the buffers, one behind the other, or raise with any part of them written.

        With `sync` they survive a power loss once this returns. That covers these bytes alone:
        earlier writes, truncations and allocations of the file still need `sync()`.
        """
        ...

    def sync(self) -> None:
        """Make everything done to the file's content and size survive a power loss.

        After this has failed, nothing is known of what was written since the last success, and
        trying again proves nothing: the system may have dropped the data and forgotten the error.
        """
        ...

    def allocate(self, size: int) -> None:
        """Grow the file to `size` with zero bytes whose space is reserved; never shrinks it.

        When it fails (ENOSPC) the file may have grown part of the way.
        """
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None:
        """Let go of the file without syncing it. May be called again; other calls then raise."""
        ...


class DiskLock(Protocol):
    """A lock held by this process until it releases it or ends."""

    def release(self) -> None:
        """May be called again."""
        ...


class Disk(Protocol):
    """A file system, and what it promises across a power loss."""

    def open(self, path: str, access: FileAccess) -> File:
        """A created file's name survives a power loss only after `sync_directory`."""
        ...

    def list(self, directory: str) -> builtins.list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Make it, with its parents, durably; fine if it exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replace `target` in one step; survives a power loss only after `sync_directory`."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory; survives only after `sync_directory`."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the creations, renames and removals in this directory survive a power loss."""
        ...

    def free_bytes(self, path: str) -> int:
        """What may still be written to the file system that holds `path`."""
        ...

    def free_files(self, path: str) -> int | None:
        """How many files may still be made on the file system that holds `path`. None: it has no such limit."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Lock a directory by a file made for it there; LockedError, naming the holder's pid, when it is taken."""
        ...


class RealDisk:
    """The machine's file systems. Built for Linux; elsewhere it works with more system calls."""

    def open(self, path: str, access: FileAccess) -> File:
        return RealFile(path, os.open(path, _OPEN_FLAGS[access], _FILE_MODE))

    def list(self, directory: str) -> builtins.list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        directory = Path(path).absolute()
        if not directory.parent.is_dir():
            self.make_directory(str(directory.parent))
        try:
            directory.mkdir(_DIRECTORY_MODE, exist_ok=True)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST, "it is a file, not a directory", str(directory)
            ) from None
        # Also if it existed: its maker may have been killed before syncing its name.
        self.sync_directory(str(directory.parent))

    def rename(self, source: str, target: str) -> None:
        Path(source).replace(target)

    def remove(self, path: str) -> None:
        if Path(path).is_dir():
            Path(path).rmdir()
        else:
            Path(path).unlink()

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def free_files(self, path: str) -> int | None:
        status = os.statvfs(path)
        return status.f_favail if status.f_files else None

    def lock(self, path: str) -> DiskLock:
        return FileLock(path)


_OPEN_FLAGS = {
    FileAccess.READ: os.O_RDONLY,
    FileAccess.WRITE: os.O_RDWR,
    FileAccess.CREATE: os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class RealFile:
    """A file descriptor. Its methods may run in several threads at once, but not beside `close`."""

    __slots__ = ("_descriptor", "_dsync", "_nowait", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._nowait = _RWF_NOWAIT
        self._dsync = _RWF_DSYNC

    def read(self, position: int, size: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, position)
            if len(data) == size:
                return data
            # The kernel may give less than it has (a signal, or more than 2 GiB asked for):
            # only an empty read is the end of the file.
            pieces = [data]
            read = len(data)
            while data and read < size:
                data = os.pread(self._descriptor, size - read, position + read)
                pieces.append(data)
                read += len(data)
        except OSError as error:
            self._name(error)
            raise
        return b"".join(pieces)

    def read_nowait(self, position: int, size: int) -> memoryview | bytes | None:
        if self._nowait is None:
            return None
        buffer = np.empty(size, np.uint8).data  # not zeroed first: a fifth of the cost of a read
        try:
            read = os.preadv(self._descriptor, [buffer], position, self._nowait)
            # Less than asked for is the end of the file, or the end of what is in memory.
            if read < size and position + read < os.fstat(self._descriptor).st_size:
                return None
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self._name(error)
                raise
            self._nowait = None
            return None
        return buffer[:read]

    def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        size = sum(len(b) if type(b) is bytes else memoryview(b).nbytes for b in buffers)
        if not size:
            return
        try:
            in_one_call = len(buffers) <= IOV_MAX
            if sync and in_one_call and self._dsync is not None:
                try:
                    written = os.pwritev(self._descriptor, buffers, position, self._dsync)
                    if written == size:
                        self._check_linked()
                        return
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        raise
                    self._dsync = None
                    written = 0
            else:
                written = os.pwritev(self._descriptor, buffers[:IOV_MAX], position)
            if written < size:
                self._write_rest(position, buffers, written)
            if sync:
                _sync_data(self._descriptor)
                self._check_linked()
        except OSError as error:
            self._name(error)
            raise

    def _write_rest(self, position: int, buffers: Sequence[Buffer], written: int) -> None:
        """Write what follows the first `written` bytes, however little each call takes."""
        rest = [memoryview(buffer).cast("B") for buffer in buffers]
        first = 0
        took = written
        while True:
            while first < len(rest) and took >= len(rest[first]):
                took -= len(rest[first])
                first += 1
            if first == len(rest):
                return
            rest[first] = rest[first][took:]
            took = os.pwritev(self._descriptor, rest[first : first + IOV_MAX], position + written)
            if not took:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            written += took

    def sync(self) -> None:
        try:
            _sync_data(self._descriptor)
            self._check_linked()
        except OSError as error:
            self._name(error)
            raise

    def _check_linked(self) -> None:
        """Raise if the file was removed: its data are synced, but no name leads to them."""
        if not os.fstat(self._descriptor).st_nlink:
            raise OSError(errno.ENOENT, "the file was removed while it was in use")

    def allocate(self, size: int) -> None:
        try:
            present = os.fstat(self._descriptor).st_size
            if size > present and not self._reserve(present, size):
                self._write_zeros(present, size)
        except OSError as error:
            self._name(error)
            raise

    def _reserve(self, start: int, end: int) -> bool:
        """Whether the system could do it in one call."""
        if not hasattr(os, "posix_fallocate"):
            return False
        try:
            os.posix_fallocate(self._descriptor, start, end - start)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        return True

    def _write_zeros(self, start: int, end: int) -> None:
        zeros = bytes(min(ZEROS_BYTES, end - start))
        for position in range(start, end, len(zeros)):
            self.write(position, [zeros[: end - position]], sync=False)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._name(error)
            raise

    def size(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            self._name(error)
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            os.close(descriptor)

    def _name(self, error: OSError) -> None:
        """Put the path into an error: calls on a descriptor do not know it."""
        error.filename = self.path

    def __repr__(self) -> str:
        return f"RealFile({self.path!r})"


class FileLock:
    """An exclusive flock; the file holds the pid of its holder for people and error messages.

    It ends with the process, however that ends, unless a child has inherited its descriptors: a process that holds
    one starts children by exec, which passes only what is named. The file stays: removing it would let two
    processes lock two files of the same name. If it is removed all the same, the lock on its
    directory keeps the second process out.
    """

    __slots__ = ("_descriptors", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptors: list[int] = []
        try:
            file = self._open(path, os.O_RDWR | os.O_CREAT)
            folder = self._open(str(Path(path).parent), os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _flock_folder(folder)
            os.ftruncate(file, 0)
            os.pwrite(file, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            # Empty for the instant between the holder's locking and its writing, or since it was removed.
            holder = os.pread(self._descriptors[0], 32, 0).decode("ascii", "replace").strip()
            self._close()
            raise LockedError(
                f"{path} is locked by process {holder or '(unknown)'}; "
                "stop that process or use another directory"
            ) from None
        except OSError as error:
            self._close()
            error.filename = path
            raise

    def _open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags, _FILE_MODE)
        self._descriptors.append(descriptor)
        return descriptor

    def release(self) -> None:
        if self._descriptors:
            os.ftruncate(self._descriptors[0], 0)
        self._close()

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __repr__(self) -> str:
        return f"FileLock({self.path!r})"


def _flock_folder(descriptor: int) -> None:
    """Lock the folder too, where the file system can; otherwise the file's lock alone must do."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


if sys.platform == "darwin":

    def _sync_data(descriptor: int) -> None:
        # fsync there leaves the data in the drive's own memory.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)

else:

    def _sync_data(descriptor: int) -> None:
        os.fdatasync(descriptor)
