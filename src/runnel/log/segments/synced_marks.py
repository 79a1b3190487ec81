"""Synced marks: how far the newest file of each folder has been synced, remembered in a file of their own.

A file whose tail is gone (cut at the end of a record, zeroed, emptied, removed) looks like one that never had more. The
mark of its folder knows better. It is written after the sync that it tells of, and is not synced itself: a killed
process leaves it in the page cache, a power loss may leave an older one. So a mark may lag behind its file and never
runs ahead of it. A file with less than its mark says has lost something that was stored.

The file `synced` in the data directory is a row of slots; the first is for the row itself and is always there:

    0    4   magic     "RNM" 0x01
    4    4   crc       CRC-32C of bytes 8 to 255
    8    8   number    u64, of the newest file in the folder
    16   8   end       u64, bytes of that file that have survived a sync
    24   2   size      u16, of the folder
    26       folder    within the data directory, UTF-8, zero-padded to 256

Little-endian. A slot lies within one sector, so a power loss leaves it whole, as it was at some moment. A slot of zeros
is one that a power loss took. The marks of a folder only rise: by number, then by end.

Readers beside the writer, and copies, take the marks before the files that they speak of.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
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
_ROW: Final = ""  # the folder of the first slot
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
    """The folder and its mark. MalformedError if this is no whole slot."""
    if len(slot) < SLOT_BYTES:
        raise MalformedError("synced mark", f"{len(slot)} bytes of {SLOT_BYTES}")
    magic, crc = _HEAD.unpack_from(slot)
    content = slot[_HEAD.size :]
    if magic != _MAGIC or crc32c(content) != crc:
        raise MalformedError("synced mark", "does not match its checksum")
    number, end, size = _FIELDS.unpack_from(content)
    return content[_FIELDS.size : _FIELDS.size + size].decode(), Mark(number, end)


class MarksFound(NamedTuple):
    """The marks of a data directory as they were found, by folder, and what of them cannot be read."""

    marks: dict[str, Mark]
    damage: Sequence[Damage]
    torn: Sequence[
        Damage
    ]  # slots: a process may have died, or the disk been full, while one was written
    bytes: int

    @property
    def is_present(self) -> bool:
        """Whether there is a file of them: directories of earlier versions have none."""
        return bool(self.bytes or self.damage)

    @property
    def is_dense(self) -> bool:
        """Whether every slot is in use, so that the order of the marks is that of the slots."""
        return (
            self.bytes == (1 + len(self.marks)) * SLOT_BYTES and not self.damage and not self.torn
        )


def read_marks(disk: Disk, directory: str) -> MarksFound:
    """Blocks, and changes nothing."""
    path = f"{directory}/{paths.MARKS_FILE}"
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
    damage = [] if _ROW in marks else [Damage(path, 0, SLOT_BYTES, "the first slot is gone")]
    marks.pop(_ROW, None)
    return MarksFound(marks, damage, torn, len(content))


def missing_marks(directory: str) -> Damage:
    """What is told of a directory that had marks once."""
    problem = "missing; losing the end of another file would have gone unnoticed"
    return Damage(f"{directory}/{paths.MARKS_FILE}", 0, 0, problem)


def missing_file(path: str, mark: Mark) -> Damage:
    """What is told of a file that a mark knows and that is not there."""
    return Damage(path, 0, mark.end, f"missing; {mark.end} bytes of it had been stored")


class SyncedMarks:
    """The marks of a data directory, for the process that writes it. Methods block, and any worker may call them."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{paths.MARKS_FILE}"
        self._lock = threading.Lock()
        self._file: File | None = None
        self._marks: dict[str, Mark] = {}
        self._slots: dict[str, int] = {}
        self._unasked: set[str] = set()

    def open(self) -> MarksFound:
        """Read what an earlier process left; make the file, or make it anew where slots of it are lost."""
        found = read_marks(self._disk, self._directory)
        self._marks = dict(found.marks)
        self._unasked = set(found.marks)
        self._slots = {folder: number for number, folder in enumerate(self._marks, start=1)}
        if not found.is_dense:
            row = [(_ROW, Mark(0, 0)), *self._marks.items()]
            write_whole(self._disk, self._path, b"".join(encode_slot(*item) for item in row))
        # Also for a process that was killed before it could: the catalogue will say that the file is there.
        self._disk.sync_directory(self._directory)
        self._file = self._disk.open(self._path, FileAccess.WRITE)
        return found

    def get(self, folder: str) -> Mark | None:
        """The mark of a folder, given with its path. Whoever asks tells what is missing."""
        name = self._name(folder)
        self._unasked.discard(name)
        return self._marks.get(name)

    def unasked(self) -> list[tuple[str, Mark]]:
        """Folders with a mark that nobody has asked for since the start: they are gone, with all that was in them."""
        return [(f"{self._directory}/{name}", self._marks[name]) for name in sorted(self._unasked)]

    def note(self, folder: str, number: int, end: int) -> None:
        """So much of the folder's newest file has been synced. One call at a time for each folder."""
        name, mark = self._name(folder), Mark(number, end)
        with self._lock:
            file = self._file
            if file is None or mark <= self._marks.get(name, Mark(0, 0)):
                return
            slot = self._slots.setdefault(name, len(self._slots) + 1)
        # If it fails, the mark lags behind its file until the next one: less is known, and nothing wrong.
        with suppress(OSError):
            file.write(slot * SLOT_BYTES, [encode_slot(name, mark)], sync=False)
            self._marks[name] = mark

    def close(self) -> None:
        """Sync, so that a power loss after an orderly end finds every mark."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            try:
                with suppress(OSError):  # older marks are as true
                    file.sync()
            finally:
                file.close()

    def let_go(self) -> None:
        """Close the file without syncing it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _name(self, folder: str) -> str:
        return folder.removeprefix(f"{self._directory}/")
