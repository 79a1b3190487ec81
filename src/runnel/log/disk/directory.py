"""The lock of the process that writes a data directory, and what makes a directory one."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Final

from runnel.errors import DiskFullError, FormatVersionError, SettingsError
from runnel.log.segments import paths
from runnel.log.segments.format_file import (
    FIRST_FORMAT,
    FORMAT,
    SHARED_FORMAT,
    FormatFile,
    read_format,
    write_format,
)
from runnel.platform.disk import Disk, DiskLock

_NAMES_SHOWN_MAX: Final = 3


def checked_directory(directory: str | PathLike[str]) -> str:
    """The path as text. An empty path is refused: with a file name added it would mean the root of the file system."""
    try:
        text = fspath(directory)
    except TypeError:
        raise SettingsError(f"data directory {directory!r}: a path is needed") from None
    if not isinstance(text, str) or not text.rstrip("/") or "\0" in text:
        raise SettingsError(f"data directory {text!r}: a path below the root is needed")
    return text.rstrip("/")


def lock_directory(disk: Disk, directory: str) -> DiskLock:
    """Make the directory, or check its format, and lock it for this process. Runs in a worker."""
    try:
        disk.make_directory(directory)
        _refuse_foreign(directory, disk.list(directory))
        lock = disk.lock(f"{directory}/{paths.LOCK_FILE}")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no room to make the data directory {directory}: {error}"
            ) from error
        raise SettingsError(f"{directory} cannot be used as a data directory: {error}") from error
    try:
        names = disk.list(directory)
        if paths.FORMAT_FILE in names:
            read_format(disk, directory)
        else:
            is_new = paths.JOURNALS not in names
            write_format(disk, directory, FormatFile(_format_of(names), is_new))
    except BaseException:
        lock.release()
        raise
    return lock


def check_present_format(disk: Disk, directory: str) -> None:
    """FormatVersionError unless the directory has the present format, also if an older one could be migrated."""
    found = read_format(disk, directory)
    if found.format == FIRST_FORMAT:
        raise FormatVersionError(
            f"{directory} has format {found.format}: one broker alone has to open it first, which migrates it to "
            f"format {FORMAT}"
        )


def _format_of(names: Sequence[str]) -> int:
    """The format of a directory that has lost its format file, or never had one."""
    if paths.CATALOGUE in names:
        return FIRST_FORMAT
    if paths.CLUSTER_FILE in names and paths.METADATA not in names:
        return SHARED_FORMAT
    return FORMAT


def check_no_nodes(disk: Disk, directory: str) -> None:
    """LockedError if one of several brokers of the directory still runs, though their parent does not. Blocks."""
    root = f"{directory}/{paths.NODES}"
    for name in disk.list(root):
        disk.lock(f"{root}/{name}/{paths.LOCK_FILE}").release()


def lock_node(disk: Disk, directory: str, member: str) -> DiskLock:
    """Lock the directory for one of several logs: the next one to serve it alone waits for all of them. Blocks."""
    folder = paths.node_folder(directory, member)
    disk.make_directory(folder)
    return disk.lock(f"{folder}/{paths.LOCK_FILE}")


def _refuse_foreign(directory: str, names: Sequence[str]) -> None:
    """Refuse a directory with foreign files before anything is written: the path may be mistyped."""
    foreign = [] if paths.FORMAT_FILE in names else paths.foreign_names(names)
    if foreign:
        shown = ", ".join(repr(name) for name in foreign[:_NAMES_SHOWN_MAX])
        more = len(foreign) - _NAMES_SHOWN_MAX
        raise SettingsError(
            f"{directory} is not a data directory of Runnel: it holds {shown}"
            f"{f' and {more} more' if more > 0 else ''}, and no {paths.FORMAT_FILE}; name an empty directory, or one "
            "that does not exist yet (nothing was written)"
        )
