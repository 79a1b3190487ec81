"""Copies of a data directory: written under an unfinished name, synced, and renamed when they are whole.

A copy made from a checkpoint shows one moment. A copy that replaces a data directory begins a new epoch: messages
stored from then on never share epoch and entry with messages that the original stored after the copy was made. All
functions block.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from runnel.errors import ClientFault, DiskFullError
from runnel.log.metadata import catalogue
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import Opened
from runnel.log.metadata.sqlite import offline
from runnel.log.segments import paths
from runnel.log.segments.format_file import FIRST_FORMAT, SHARED_FORMAT, read_format
from runnel.log.segments.records import RecordFile
from runnel.platform.disk import Disk

UNFINISHED_SUFFIX: Final = ".unfinished"
# Of a process that has the directory open; SQLite makes its shared memory again from its log.
_LEFT_OUT: Final = frozenset((paths.LOCK_FILE, f"{paths.CLUSTER_FILE}-shm"))
_PIECE_BYTES: Final = 4 * 2**20
_NS_PER_MS: Final = 1_000_000


def check_target(target: Path, *, beside: Path) -> None:
    """Raise ClientFault unless a copy can be made at `target`; `beside` is the directory to copy."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ClientFault(
            f"{target} exists and is not an empty directory; a copy needs one of its own"
        )
    if not target.parent.is_dir():
        raise ClientFault(f"{target.parent} is not a directory: the copy would be made in it")
    unfinished = _unfinished(target)
    if unfinished.exists():
        raise ClientFault(
            f"{unfinished} is there: another copy is being made, or was not finished; remove it if none is"
        )
    for one, other in ((target, beside), (beside, target)):
        if one.resolve().is_relative_to(other.resolve()):
            raise ClientFault(f"{target} and {beside} lie in each other; a copy belongs elsewhere")


def check_room(target: Path, files: Iterable[tuple[str, int]]) -> None:
    """Raise DiskFullError unless there is room for these files."""
    needed = sum(size for _, size in files)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise DiskFullError(
            f"no room for the copy in {target.parent}: {needed} bytes are needed, {free} are free"
        )


@contextmanager
def new_copy(target: Path) -> Iterator[Path]:
    """A folder for the copy. It is renamed to `target` at the end, or removed after a failure."""
    unfinished = _unfinished(target)
    unfinished.mkdir(mode=0o700)
    try:
        yield unfinished
        _sync_folder(unfinished)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def copy_files(source: Path, target: Path, files: Iterable[tuple[str, int]]) -> int:
    """Copy the given number of bytes of each file, by its path within the folders; returns the total."""
    folders: set[Path] = set()
    total = 0
    for relative, size in files:
        path = target / relative
        # One by one from the top: with `parents=True`, mkdir gives its mode to the last folder alone.
        for folder in reversed([path.parent, *path.parent.parents]):
            if folder not in folders and folder.is_relative_to(target):
                folder.mkdir(mode=0o700, exist_ok=True)
                folders.add(folder)
        _copy(source / relative, path, size)
        total += size
    for folder in sorted(folders, reverse=True):
        _sync_folder(folder)
    return total


def files_of(directory: Path) -> list[tuple[str, int]]:
    """Each file of a copy, or of a data directory that no process has open, with its size."""
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(set(folders) - {paths.CHECKPOINT, paths.NODES})
        for name in sorted(names):
            relative = str(Path(folder, name).relative_to(directory))
            is_left_out = name.endswith(paths.UNFINISHED_SUFFIX) or relative in _LEFT_OUT
            if not is_left_out:
                found.append((relative, Path(folder, name).stat().st_size))
    return found


def begin_epoch(disk: Disk, directory: Path) -> int:
    """Let the epochs of all shards be above one that no other copy has. Returns that epoch.

    It is the time in milliseconds, or the newest epoch if that is higher.
    """
    root = str(directory)
    written = read_format(disk, root).format
    if written == SHARED_FORMAT:
        return _begin_shared_epoch(disk, root)
    is_former = written == FIRST_FORMAT
    folder = f"{root}/{paths.CATALOGUE if is_former else paths.METADATA}"
    numbers = [int(name) for name in disk.list(folder) if name.isdecimal()]
    if not numbers:
        return 0  # nothing was ever stored
    if is_former:
        opened = _next_epoch([catalogue.read_format_one(disk, root)])
    else:
        opened = _next_epoch([catalogue.read_metadata(disk, root), *_of_shards(disk, root)])
    file, _, _ = RecordFile.recover(disk, f"{folder}/{max(numbers):020d}")
    try:
        file.append(msgspec.msgpack.encode([opened]))
    finally:
        file.close()
    return opened.epoch


def _begin_shared_epoch(disk: Disk, directory: str) -> int:
    path = f"{directory}/{paths.CLUSTER_FILE}"
    opened = _next_epoch([offline.read_file(path), *_of_shards(disk, directory)])
    offline.begin_epoch(path, opened)
    return opened.epoch


def _next_epoch(found: Iterable[LoadedRecords[Any]]) -> Opened:
    """The record of an opening above all that were found."""
    epochs = [
        record.epoch for loaded in found for record in loaded.records if isinstance(record, Opened)
    ]
    now_ns = time.time_ns()
    return Opened(max(max(epochs, default=0) + 1, now_ns // _NS_PER_MS), now_ns)


def _of_shards(disk: Disk, directory: str) -> Iterator[LoadedRecords[Any]]:
    root = f"{directory}/{paths.JOURNALS}"
    for journal in disk.list(root):
        for shard in disk.list(f"{root}/{journal}"):
            if shard.isdecimal():
                with suppress(FileNotFoundError):  # nothing was ever stored in it
                    yield catalogue.read_catalogue(disk, f"{root}/{journal}/{shard}")


def _unfinished(target: Path) -> Path:
    return target.with_name(target.name + UNFINISHED_SUFFIX)


def _copy(source: Path, target: Path, size: int) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with source.open("rb", buffering=0) as reading, os.fdopen(descriptor, "wb") as writing:
        left = size
        while left:
            piece = reading.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ClientFault(f"{source} ends {left} bytes before it should")
            writing.write(piece)
            left -= len(piece)
        writing.flush()
        with suppress(AttributeError):  # only a hint: the bytes are not needed again
            os.posix_fadvise(reading.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        os.fsync(writing.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
