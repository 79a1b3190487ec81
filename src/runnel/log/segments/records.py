"""Files of small checksummed records: the format of the catalogue and of state journals.

    0   4   magic             "RNR" 0x01
    4   4   size              u32, of the content
    8   8   durable_position  u64, bytes of the file that were synced when this was written
    16  4   zero
    20  4   crc               CRC-32C of bytes 0 to 19 and of the content
    24      content           zero-padded to a multiple of 8

Little-endian. `scan` decides which records are whole after a crash. Each record is synced before the next is written.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from runnel.errors import MalformedError
from runnel.formats.checksum import crc32c
from runnel.log.segments.scan import Scanned, Scanner, ScanUnit, ScanWindow, TooShort
from runnel.platform.disk import Disk, File, FileAccess

# A snapshot of a million topics may be one record; a larger size is damage.
CONTENT_BYTES_MAX: Final = 1 << 30

_MAGIC: Final = b"RNR\x01"
_HEADER: Final = struct.Struct("<4sIQ4x")
_CRC: Final = struct.Struct("<I")
_HEADER_BYTES: Final = 24
_UNIT_MAGIC: Final = re.compile(rb"RNR\x01")
_SEARCH_BYTES: Final = 64 * 2**20


def _pack(content: bytes, durable_position: int) -> tuple[bytes, bytes, bytes]:
    checked = _HEADER.pack(_MAGIC, len(content), durable_position)
    crc = crc32c(content, crc32c(checked))
    return checked + _CRC.pack(crc), content, bytes(-len(content) % 8)


def _read_record(view: memoryview, position: int) -> ScanUnit[bytes]:
    if len(view) < _HEADER_BYTES:
        raise MalformedError("record header", f"{len(view)} bytes of {_HEADER_BYTES}")
    magic, size, durable = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise MalformedError(
            "record magic", f"{bytes(magic).hex(' ')} is not the beginning of a record"
        )
    if size > CONTENT_BYTES_MAX:
        raise MalformedError("record size", f"{size} is above {CONTENT_BYTES_MAX}")
    whole = _HEADER_BYTES + size + -size % 8
    if len(view) < whole:
        raise TooShort(whole)
    content = bytes(view[_HEADER_BYTES : _HEADER_BYTES + size])
    if crc32c(content, crc32c(view[:20])) != _CRC.unpack_from(view, 20)[0]:
        raise MalformedError("record crc", "content does not match its checksum")
    return ScanUnit(position, whole, durable, content)


class RecordFile:
    """A file of records, for appending. All methods block: they are for workers.

    It can be closed to free its descriptor, and must then be reopened before the next append.
    """

    def __init__(self, disk: Disk, path: str, file: File, end: int) -> None:
        self._disk = disk
        self._path = path
        self._file: File | None = file
        self.end = end

    @classmethod
    def create(cls, disk: Disk, path: str) -> RecordFile:
        return cls(disk, path, disk.open(path, FileAccess.CREATE), 0)

    @classmethod
    def recover(
        cls, disk: Disk, path: str, durable: int = 0
    ) -> tuple[RecordFile, list[bytes], Scanned]:
        """Open the file, keep its whole records, cut off the rest, and make sure that the kept records are stored.

        `durable`: this many bytes of the file are known to have been stored.
        """
        file = disk.open(path, FileAccess.WRITE)
        contents, scanned = read_records(file, durable)
        if file.size() > scanned.end:
            file.truncate(scanned.end)
        store_again(file, scanned)
        return cls(disk, path, file, scanned.end), contents, scanned

    def append(self, content: bytes) -> None:
        """Append a record; it is stored when this returns. After an OSError `cut_back` has to remove its remains."""
        assert self._file is not None
        self._file.write(self.end, _pack(content, self.end), sync=True)
        self.end += _HEADER_BYTES + len(content) + -len(content) % 8

    def cut_back(self) -> None:
        """Remove the remains of a failed `append`, durably, so that no scan finds them."""
        assert self._file is not None
        self._file.truncate(self.end)
        self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def reopen(self) -> None:
        if self._file is None:
            self._file = self._disk.open(self._path, FileAccess.WRITE)


def read_records(file: File, durable: int = 0) -> tuple[list[bytes], Scanned]:
    """All whole records of a file, and what the scan found. Changes nothing."""
    window = ScanWindow(file.read, file.size())
    scanner = Scanner(
        file.path,
        window,
        _read_record,
        _UNIT_MAGIC,
        start=0,
        search_bytes=_SEARCH_BYTES,
        durable=durable,
    )
    contents = [unit.content for unit in scanner if unit.content is not None]
    return contents, scanner.result()


def store_again(file: File, scanned: Scanned) -> None:
    """Write the bytes that no later unit vouches for once more, and sync.

    The sync of an earlier process may have failed. Then the kernel considers these pages clean, and a sync alone would
    report success without storing them.
    """
    tail = file.read(scanned.durable, scanned.end - scanned.durable)
    file.write(scanned.durable, [tail], sync=False)
    file.sync()
