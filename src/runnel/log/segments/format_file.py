"""The file `runnel.json` in a data directory: which format the directory has.

Format 2 has the metadata apart from the catalogues of the shards. Format 1 had one catalogue for all of it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.errors import FormatVersionError
from runnel.log.segments import paths
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk, FileAccess

FORMAT: Final = 2
_FORMATS_READ: Final = (1, FORMAT)


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
            f"{' and '.join(map(str, _FORMATS_READ))}; use the Runnel that wrote it, or a newer one"
        )
    return found


def keep_account(disk: Disk, directory: str) -> None:
    """State that removals are recorded from now on. An older Runnel ignores this. Runs in a worker."""
    found = read_format(disk, directory)
    if not found.keeps_account:
        write_format(disk, directory, FormatFile(found.format, keeps_account=True))
