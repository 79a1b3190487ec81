"""The file `runnel.json` in a data directory: which format the directory has.

Format 1 had one catalogue for everything. Format 2 has the metadata apart from the catalogues of the shards. Format 4
is format 2 with the metadata in `cluster.sqlite`: several brokers have served the directory. A directory has the lowest
format that says what is in it, so that Runnels which do not know the others can read it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.errors import FormatVersionError
from runnel.log.segments import paths
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk, FileAccess

FIRST_FORMAT: Final = 1
FORMAT: Final = 2
SHARED_FORMAT: Final = 4  # 3 would be one flipped bit away from both
_FORMATS_READ: Final = (FIRST_FORMAT, FORMAT, SHARED_FORMAT)


class FormatFile(msgspec.Struct):
    """The file `runnel.json`. `keeps_account`: every removal by retention is recorded beside the remaining segments."""

    format: int
    keeps_account: bool = False


def write_format(disk: Disk, directory: str, content: FormatFile) -> None:
    """Write the format file, durably."""
    write_whole(disk, f"{directory}/{paths.FORMAT_FILE}", msgspec.json.encode(content))
    disk.sync_directory(directory)


def read_format(disk: Disk, directory: str) -> FormatFile:
    """The format file. FormatVersionError unless this Runnel can read the data directory."""
    path = f"{directory}/{paths.FORMAT_FILE}"
    file = disk.open(path, FileAccess.READ)
    try:
        found = msgspec.json.decode(file.read(0, 4096), type=FormatFile)
    except msgspec.DecodeError as error:
        raise FormatVersionError(
            f"{path} does not say which format this directory has: {error}"
        ) from None
    finally:
        file.close()
    if found.format not in _FORMATS_READ:
        raise FormatVersionError(
            f"{path}: the directory has format {found.format}, this Runnel reads formats "
            f"{FIRST_FORMAT}, {FORMAT} and {SHARED_FORMAT}; use the Runnel that wrote it, or a newer one"
        )
    return found


def keep_account(disk: Disk, directory: str) -> None:
    """State that removals are recorded from now on. An older Runnel ignores this. Runs in a worker."""
    found = read_format(disk, directory)
    if not found.keeps_account:
        write_format(disk, directory, FormatFile(found.format, keeps_account=True))
