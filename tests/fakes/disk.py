"""A disk in memory that fails as real disks do. A seed decides how.

It keeps what `runnel.platform.disk` promises, and nothing more: `inode` says what a crash does to content, `names` what
it does to directories. The disk is for one thread; with `SimulatedWorkers` a whole history repeats from its seed.
"""

from __future__ import annotations

import builtins
import enum
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, NoReturn

from runnel.errors import LockedError
from runnel.platform.disk import Buffer, FileAccess
from tests.fakes.inode import Allocate, Inode, Truncate, Write
from tests.fakes.names import Tree, os_error
from tests.fakes.power import PowerLoss

__all__ = ["FakeDisk", "FakeFile", "FakeLock", "Kind", "Operation", "PowerLoss"]

UNLIMITED_BYTES = 1 << 50


class Kind(enum.Enum):
    """What an operation does; all but the first three change something."""

    OPEN = enum.auto()
    LIST = enum.auto()
    READ = enum.auto()
    CREATE = enum.auto()
    WRITE = enum.auto()
    SYNC = enum.auto()
    ALLOCATE = enum.auto()
    TRUNCATE = enum.auto()
    MAKE_DIRECTORY = enum.auto()
    RENAME = enum.auto()
    REMOVE = enum.auto()
    SYNC_DIRECTORY = enum.auto()
    LOCK = enum.auto()


class Operation(NamedTuple):
    """A changing operation as it was asked for."""

    kind: Kind
    path: str
    position: int = 0
    size: int = 0
    synced: bool = False


@dataclass(slots=True)
class _Fault:
    """Operations of one kind that fail, on some paths and for some times."""

    kind: Kind
    errno: int
    path: Callable[[str], bool]
    skip: int
    times: int | None
    probability: float


class FakeDisk:
    """The disk as one process sees it.

    After `crash()` (power loss) or `kill()` (only the process dies) this disk and its files raise PowerLoss;
    `restart()` returns the disk that the next process finds. `crash_at(k)` loses power in `operations[k - 1]`.
    """

    def __init__(
        self,
        random: Random | int,
        *,
        capacity_bytes: int | None = None,
        nowait_probability: float = 0.5,
        tree: Tree | None = None,
        process_id: int = 1000,
    ) -> None:
        self.random = Random(random) if isinstance(random, int) else random
        self.capacity_bytes = capacity_bytes
        self.room_files: int | None = (
            None  # what `free_files` returns; the disk does not enforce it
        )
        self.nowait_probability = nowait_probability
        self.process_id = process_id
        self.operations: builtins.list[Operation] = []
        self.read_count = 0
        self.read_bytes = 0
        self.sync_count = 0
        self._tree = tree or Tree()
        self._processes: list[FakeDisk] = [self]  # of the machine, which loses power as a whole
        self._locked: set[Inode] = set()
        self._faults: builtins.list[_Fault] = []
        self._crash_at: int | None = None
        self._is_kill = False
        self._end: str | None = None

    # --- The disk ---

    def open(self, path: str, access: FileAccess) -> FakeFile:
        if access is FileAccess.CREATE:
            with self.changing(Operation(Kind.CREATE, path)):
                inode = self._tree.create(path)
        else:
            self._looking(Kind.OPEN, path)
            inode = self._tree.file(path)
        return FakeFile(self, path, inode, writable=access is not FileAccess.READ)

    def list(self, directory: str) -> builtins.list[str]:
        self._looking(Kind.LIST, directory)
        if self._tree.find(directory) is None:
            return []
        return sorted(self._tree.directory(directory).entries)

    def make_directory(self, path: str) -> None:
        for directory in [*self._tree.missing(path), path]:
            with self.changing(Operation(Kind.MAKE_DIRECTORY, directory)):
                self._tree.make_directory(directory)

    def rename(self, source: str, target: str) -> None:
        with self.changing(Operation(Kind.RENAME, source)):
            self._tree.rename(source, target)

    def remove(self, path: str) -> None:
        with self.changing(Operation(Kind.REMOVE, path)):
            self._tree.remove(path)

    def sync_directory(self, path: str) -> None:
        with self.changing(Operation(Kind.SYNC_DIRECTORY, path)):
            self._tree.sync(path)

    def free_bytes(self, path: str) -> int:
        self._looking(Kind.OPEN, path)
        if self._tree.find(path) is None:
            raise os_error(errno.ENOENT, path)
        return self.room_bytes

    def free_files(self, path: str) -> int | None:
        return self.room_files

    def lock(self, path: str) -> FakeLock:
        with self.changing(Operation(Kind.LOCK, path)):
            inode = self._tree.create(path) if self._tree.find(path) is None else None
            inode = inode or self._tree.file(path)
            if any(inode in each._locked for each in self._processes):
                raise LockedError(f"{path} is locked by process {self.process_id}")
            self._locked.add(inode)
            inode.change(Truncate(0))
            inode.change(Write(0, b"%d\n" % self.process_id))
        return FakeLock(self, inode)

    # --- Power loss, kills and faults ---

    def crash(self) -> None:
        """Lose power now. The seed decides what is left of the changes that were not synced."""
        if self._end is None:
            for each in self._processes:
                each._die("the power is gone")
            self._tree.crash(self.random)

    def kill(self) -> None:
        """End only the process: the system keeps all its changes, but none becomes durable by it."""
        if self._end is None:
            self._die("the process was killed")

    def restart(self) -> FakeDisk:
        """The disk as the next process finds it, without faults and with fresh counts."""
        if self._end is None:
            self.kill()
        return FakeDisk(
            self.random,
            capacity_bytes=self.capacity_bytes,
            nowait_probability=self.nowait_probability,
            tree=self._tree,
            process_id=self.process_id + 1,
        )

    def beside(self) -> FakeDisk:
        """The disk as another process sees it that runs at the same time."""
        other = FakeDisk(
            self.random,
            capacity_bytes=self.capacity_bytes,
            nowait_probability=self.nowait_probability,
            tree=self._tree,
            process_id=max(each.process_id for each in self._processes) + 1,
        )
        other._processes = self._processes
        self._processes.append(other)
        return other

    def crash_at(self, operation: int) -> None:
        """Lose power in the middle of the changing operation with that number; the first is 1."""
        self._crash_at = operation
        self._is_kill = False

    def kill_at(self, operation: int) -> None:
        """End only the process in the middle of that operation."""
        self._crash_at = operation
        self._is_kill = True

    def fail(
        self,
        kind: Kind,
        error_number: int,
        *,
        path: Callable[[str], bool] = lambda path: True,
        skip: int = 0,
        times: int | None = 1,
        probability: float = 1.0,
    ) -> None:
        """Make operations of this kind fail, after `skip` of them, `times` times (None: always).

        A failing write or allocation does a random part of its work first. A failing sync loses
        what was pending, except for a random part and smaller sizes, and later syncs succeed
        without it. Faults of SYNC also strike writes with `sync=True`.
        """
        self._faults.append(_Fault(kind, error_number, path, skip, times, probability))

    def heal(self) -> None:
        """End all faults; their effects stay."""
        self._faults.clear()

    def flip_bit(self, path: str, position: int, bit: int) -> None:
        """Flip one bit of a file, in memory and on the platter."""
        self._tree.file(path).flip_bit(position, bit)

    # --- For tests ---

    @property
    def room_bytes(self) -> int:
        if self.capacity_bytes is None:
            return UNLIMITED_BYTES
        return self.capacity_bytes - self.used_bytes

    @property
    def used_bytes(self) -> int:
        return sum(len(inode.content) for inode in self._tree.inodes())

    @property
    def alive(self) -> bool:
        return self._end is None

    # --- For the files of this disk ---

    def fault(self, kind: Kind, path: str) -> OSError | None:
        """The error that this operation has to fail with, if any."""
        for fault in self._faults:
            if fault.kind is not kind or fault.times == 0 or not fault.path(path):
                continue
            if fault.skip:
                fault.skip -= 1
            elif fault.probability >= 1.0 or self.random.random() < fault.probability:
                if fault.times is not None:
                    fault.times -= 1
                return os_error(fault.errno, path)
        return None

    def begin(self, operation: Operation) -> bool:
        """Record a changing operation. Returns whether the power fails in the middle of it."""
        self.check_alive()
        self.operations.append(operation)
        return len(self.operations) == self._crash_at

    def lose_power(self) -> NoReturn:
        if self._is_kill:
            self.kill()
        else:
            self.crash()
        what = "killed" if self._is_kill else "power lost"
        raise PowerLoss(f"{what} in operation {len(self.operations)}: {self.operations[-1]}")

    def check_alive(self) -> None:
        if self._end is not None:
            raise PowerLoss(f"{self._end}: the next process uses disk.restart()")

    def unlock(self, inode: Inode) -> None:
        self._locked.discard(inode)

    def count_read(self, path: str, size: int) -> None:
        self._looking(Kind.READ, path)
        self.read_count += 1
        self.read_bytes += size

    @contextmanager
    def changing(self, operation: Operation) -> Iterator[None]:
        """An operation that happens completely or not at all, even if the power fails."""
        crashing = self.begin(operation)
        if crashing and self.random.random() < 0.5:
            self.lose_power()
        try:
            if (error := self.fault(operation.kind, operation.path)) is not None:
                raise error
            yield
        finally:
            if crashing:
                self.lose_power()

    def _looking(self, kind: Kind, path: str) -> None:
        self.check_alive()
        if (error := self.fault(kind, path)) is not None:
            raise error

    def _die(self, reason: str) -> None:
        self._end = self._end or reason
        self._locked.clear()


class FakeFile:
    """An open file of a FakeDisk."""

    def __init__(self, disk: FakeDisk, path: str, inode: Inode, *, writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._inode = inode
        self._writable = writable
        self._open = True

    def read(self, position: int, size: int) -> bytes:
        self._check(writing=False)
        data = bytes(self._inode.content[position : position + size])
        self._disk.count_read(self.path, len(data))
        return data

    def read_nowait(self, position: int, size: int) -> memoryview | bytes | None:
        self._check(writing=False)
        if self._disk.random.random() >= self._disk.nowait_probability:
            return None
        return self.read(position, size)

    def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        self._check(writing=True)
        disk, inode = self._disk, self._inode
        data = b"".join(buffers)
        if not data:
            return
        crashing = disk.begin(Operation(Kind.WRITE, self.path, position, len(data), sync))
        error = disk.fault(Kind.WRITE, self.path)
        sync_error = disk.fault(Kind.SYNC, self.path) if sync and not error else None
        fits = max(0, disk.room_bytes + len(inode.content) - position)
        if error is None and len(data) > fits and position + len(data) > len(inode.content):
            error = os_error(errno.ENOSPC, self.path)
            data = data[:fits]
        if error is not None or crashing:
            data = data[: disk.random.randint(0, len(data) - 1)] if data else data
            sync = False
        inode.change(Write(position, data, pinned=sync and sync_error is None))
        if crashing:
            disk.lose_power()
        if error is not None:
            raise error
        if sync_error is not None:
            inode.fail_sync(disk.random)
            raise sync_error
        disk.sync_count += sync

    def sync(self) -> None:
        self._check(writing=False)
        disk, inode = self._disk, self._inode
        crashing = disk.begin(Operation(Kind.SYNC, self.path))
        if crashing:  # a crash decides anyway how much the sync stored
            disk.lose_power()
        if (error := disk.fault(Kind.SYNC, self.path)) is not None:
            inode.fail_sync(disk.random)
            raise error
        inode.sync()
        disk.sync_count += 1

    def allocate(self, size: int) -> None:
        self._check(writing=True)
        disk, inode = self._disk, self._inode
        present = len(inode.content)
        if size <= present:
            return
        crashing = disk.begin(Operation(Kind.ALLOCATE, self.path, 0, size))
        error = disk.fault(Kind.ALLOCATE, self.path)
        if error is None and size - present > disk.room_bytes:
            error = os_error(errno.ENOSPC, self.path)
        if error is not None or crashing:
            size = disk.random.randint(present, present + min(size - present, disk.room_bytes))
        inode.change(Allocate(size))
        if crashing:
            disk.lose_power()
        if error is not None:
            raise error

    def truncate(self, size: int) -> None:
        self._check(writing=True)
        with self._disk.changing(Operation(Kind.TRUNCATE, self.path, 0, size)):
            self._inode.change(Truncate(size))

    def size(self) -> int:
        self._check(writing=False)
        return len(self._inode.content)

    def close(self) -> None:
        self._open = False

    def _check(self, *, writing: bool) -> None:
        self._disk.check_alive()
        if not self._open or (writing and not self._writable):
            raise os_error(errno.EBADF, self.path)


class FakeLock:
    """A lock that dies with its process."""

    def __init__(self, disk: FakeDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode

    def release(self) -> None:
        self._disk.unlock(self._inode)
