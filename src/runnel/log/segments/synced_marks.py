"""Synced marks: a file that records how far the newest file of each folder has been synced.

A file whose tail is gone (cut at the end of a record, zeroed, emptied, removed) looks like a file that was never
longer. The mark of its folder reveals the loss. A mark is written after the sync that it records, and is not synced
itself: a killed process leaves it in the page cache, and a power loss may leave an older mark. So a mark may lag behind
its file, but never runs ahead of it. A file that is shorter than its mark has lost stored bytes.

The file `synced` in the data directory is an array of slots. The first one stands for the array itself and always
exists:

    0    4   magic     "RNM" 0x01
    4    4   crc       CRC-32C of bytes 8 to 255
    8    8   number    u64, of the newest file in the folder
    16   8   end       u64, synced bytes of that file
    24   2   size      u16, of the folder
    26       folder    within the data directory, UTF-8, zero-padded to 256

Little-endian. A slot lies within one sector, so a power loss leaves it whole, as of some moment. A slot of zeros was
lost in a power loss. The marks of a folder only rise: by number, then by end.

Readers beside the writer, and backups, read the marks before the files that the marks describe.

Where several logs serve one directory, each writes a file of its own, `synced.<name of the log>`, and reads those of
the others before it takes over a shard: of two marks for one folder the higher one holds. A log that has the directory
for itself merges them all into `synced`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from runnel.errors import MalformedError
from runnel.formats.checksum import crc32c
from runnel.log.segments import paths
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk, File, FileAccess

SLOT_BYTES: Final = 256

_MAGIC: Final = b"RNM\x01"
_HEAD: Final = struct.Struct("<4sI")
_FIELDS: Final = struct.Struct("<QQH")
_FOLDER_BYTES_MAX: Final = SLOT_BYTES - _HEAD.size - _FIELDS.size
_FIRST_SLOT: Final = ""  # the folder name in the first slot
_EMPTY: Final = bytes(SLOT_BYTES)


class Mark(NamedTuple):
    """A file's number in its folder, and how many of its bytes have been synced."""

    number: int
    end: int


def encode_slot(folder: str, mark: Mark) -> bytes:
    name = folder.encode()
    assert len(name) <= _FOLDER_BYTES_MAX, folder
    content = (_FIELDS.pack(*mark, len(name)) + name).ljust(SLOT_BYTES - _HEAD.size, b"\0")
    return _HEAD.pack(_MAGIC, crc32c(content)) + content


def decode_slot(slot: bytes) -> tuple[str, Mark]:
    """The folder and its mark. MalformedError if the slot is not whole."""
    if len(slot) < SLOT_BYTES:
        raise MalformedError("synced mark", f"{len(slot)} bytes of {SLOT_BYTES}")
    magic, crc = _HEAD.unpack_from(slot)
    content = slot[_HEAD.size :]
    if magic != _MAGIC or crc32c(content) != crc:
        raise MalformedError("synced mark", "does not match its checksum")
    number, end, size = _FIELDS.unpack_from(content)
    return content[_FIELDS.size : _FIELDS.size + size].decode(), Mark(number, end)


class MarksFound(NamedTuple):
    """The marks found in a data directory, by folder, and the damage of their file."""

    marks: dict[str, Mark]
    damage: Sequence[Damage]
    torn: Sequence[Damage]  # slots: the process died or the disk was full during their write
    bytes: int

    @property
    def is_present(self) -> bool:
        """Whether the file of marks exists: directories of earlier versions have none."""
        return bool(self.bytes or self.damage)

    @property
    def is_dense(self) -> bool:
        """Whether every slot is in use, so that the marks are in the order of the slots."""
        return (
            self.bytes == (1 + len(self.marks)) * SLOT_BYTES and not self.damage and not self.torn
        )


def read_marks(disk: Disk, directory: str) -> MarksFound:
    """Read the marks of a data directory, in all of its files of marks. Blocks, and changes nothing."""
    files = [_read_file(disk, path) for path in _files(disk, directory)]
    marks: dict[str, Mark] = {}
    for found in files:
        for folder, mark in found.marks.items():
            marks[folder] = max(mark, marks.get(folder, mark))
    return MarksFound(
        marks,
        [damage for found in files for damage in found.damage],
        [torn for found in files for torn in found.torn],
        sum(found.bytes for found in files),
    )


def _files(disk: Disk, directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in disk.list(directory) if paths.is_marks_file(name)]


def _read_file(disk: Disk, path: str) -> MarksFound:
    try:
        file = disk.open(path, FileAccess.READ)
    except FileNotFoundError:
        return MarksFound({}, (), (), 0)
    try:
        content = file.read(0, file.size())
    finally:
        file.close()
    marks: dict[str, Mark] = {}
    torn: list[Damage] = []
    for position in range(0, len(content), SLOT_BYTES):
        slot = content[position : position + SLOT_BYTES]
        if slot == _EMPTY[: len(slot)]:
            continue
        try:
            folder, mark = decode_slot(slot)
        except MalformedError as error:
            problem = f"{error}; losing the end of the file that it spoke of would go unnoticed"
            torn.append(Damage(path, position, SLOT_BYTES, problem))
            continue
        marks[folder] = max(mark, marks.get(folder, mark))
    damage = [] if _FIRST_SLOT in marks else [Damage(path, 0, SLOT_BYTES, "the first slot is gone")]
    marks.pop(_FIRST_SLOT, None)
    return MarksFound(marks, damage, torn, len(content))


def missing_marks(directory: str) -> Damage:
    """The damage of a directory that has lost its file of marks."""
    problem = "missing; losing the end of another file would have gone unnoticed"
    return Damage(f"{directory}/{paths.MARKS_FILE}", 0, 0, problem)


def missing_file(path: str, mark: Mark) -> Damage:
    """The damage of a missing file that has a mark."""
    return Damage(path, 0, mark.end, f"missing; {mark.end} bytes of it had been stored")


class SyncedMarks:
    """The marks of a data directory, for a log that writes there. Methods block and are thread-safe.

    A `member` is one of several logs that serve the directory, and writes a file of its own.
    """

    def __init__(self, disk: Disk, directory: str, member: str = "") -> None:
        self._disk = disk
        self._directory = directory
        self._member = member
        self._path = f"{directory}/{paths.marks_file(member)}"
        self._lock = threading.Lock()
        self._file: File | None = None
        self._marks: dict[str, Mark] = {}
        self._slots: dict[str, int] = {}
        self._unread: set[str] = set()

    def open(self) -> MarksFound:
        """Read the marks of an earlier process; make the file, or rewrite it if slots are lost.

        Without other logs in the directory, it takes over the marks that such logs have left.
        """
        others: list[str] = []
        if self._member:
            found = _read_file(self._disk, self._path)
        else:
            found = read_marks(self._disk, self._directory)
            others = [path for path in _files(self._disk, self._directory) if path != self._path]
        self._marks = dict(found.marks)
        self._unread = set() if self._member else set(found.marks)
        self._slots = {folder: number for number, folder in enumerate(self._marks, start=1)}
        if others or not found.is_dense:
            self._rewrite()
        if others:
            self._disk.sync_directory(self._directory)  # before the files that it replaces go
            for path in others:
                self._disk.remove(path)
        # Also for a process that was killed before its sync: the catalogue will say that the file exists.
        self._disk.sync_directory(self._directory)
        self._file = self._disk.open(self._path, FileAccess.WRITE)
        return found

    def _rewrite(self) -> None:
        slots = [(_FIRST_SLOT, Mark(0, 0)), *self._marks.items()]
        write_whole(self._disk, self._path, b"".join(encode_slot(*slot) for slot in slots))

    def forget(self, folders: Iterable[str]) -> None:
        """Remove the marks of folders that are gone for good. Before anything is written to the others."""
        names = {self._name(folder) for folder in folders} & self._marks.keys()
        if names:
            with self._lock:
                for name in names:
                    del self._marks[name]
                    self._unread.discard(name)
                self._slots = {folder: number for number, folder in enumerate(self._marks, start=1)}
                self._rewrite()
                self._disk.sync_directory(self._directory)
                if self._file is not None:
                    self._file.close()
                self._file = self._disk.open(self._path, FileAccess.WRITE)

    def take_over(self, folders: Iterable[str]) -> None:
        """Learn the marks that other logs have left for these folders: this log writes there from now on."""
        names = {self._name(folder) for folder in folders}
        for path in _files(self._disk, self._directory):
            if path == self._path:
                continue
            marks = _read_file(self._disk, path).marks
            with self._lock:
                for name in names & marks.keys():
                    self._marks[name] = max(marks[name], self._marks.get(name, marks[name]))

    def get(self, folder: str) -> Mark | None:
        """The mark of a folder, given by its path. The caller reports what is missing there."""
        name = self._name(folder)
        self._unread.discard(name)
        return self._marks.get(name)

    def orphans(self) -> list[tuple[str, Mark]]:
        """The marks that `get` has not returned since the start: their folders are gone, with all content."""
        return [(f"{self._directory}/{name}", self._marks[name]) for name in sorted(self._unread)]

    def note(self, folder: str, number: int, end: int) -> None:
        """Record that the folder's newest file is synced up to `end`. One call at a time for each folder."""
        name, mark = self._name(folder), Mark(number, end)
        with self._lock:
            file = self._file
            if file is None or mark <= self._marks.get(name, Mark(0, 0)):
                return
            slot = self._slots.setdefault(name, len(self._slots) + 1)
        # After a failure the mark lags behind its file until the next note, which is safe.
        with suppress(OSError):
            file.write(slot * SLOT_BYTES, [encode_slot(name, mark)], sync=False)
            self._marks[name] = mark

    def close(self) -> None:
        """Sync and close the file, so that all marks survive a power loss after an orderly end."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            try:
                with suppress(OSError):  # older marks are true too
                    file.sync()
            finally:
                file.close()

    def release(self) -> None:
        """Close the file without syncing it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _name(self, folder: str) -> str:
        return folder.removeprefix(f"{self._directory}/")
