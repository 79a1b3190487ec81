"""What a failure of SQLite means to callers: whose fault it was, and whether to try again."""

from __future__ import annotations

import sqlite3
from typing import Final

from runnel.errors import (
    CorruptionError,
    DiskFullError,
    FormatVersionError,
    ReadOnlyError,
    RunnelError,
    Unavailable,
)

_PRIMARY: Final = 0xFF  # an extended code has its primary code in the lowest byte
_BUSY: Final = frozenset((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED))
_DAMAGED: Final = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT))

# Quotas and limits of a file's size; the shared memory beside the file may not grow either.
_NOT_WRITTEN: Final = frozenset(
    (
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    )
)

REMEDY: Final = (
    "restore a backup; or stop every broker of this directory and move the file away, together with those beside it "
    "that end in -wal and -shm: the next start finds the topics again in their shards, and cursors, durable "
    "subscriptions and terms of publishers are lost"
)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process has the file locked for a moment."""
    return _code(error) in _BUSY


def is_missing(error: sqlite3.Error) -> bool:
    """Whether the file could not be opened at all."""
    return _code(error) == sqlite3.SQLITE_CANTOPEN


def failure(error: sqlite3.Error, path: str) -> RunnelError:
    """The error for callers. Unless the file is damaged, nothing was changed, and the same may succeed later."""
    code = _code(error)
    if code in _DAMAGED:
        return damaged(path, str(error))
    if code == sqlite3.SQLITE_FULL or getattr(error, "sqlite_errorcode", None) in _NOT_WRITTEN:
        return DiskFullError(f"no room to record it in {path}: {error}")
    if code in _BUSY:
        return Unavailable(f"another process keeps {path} locked; try again")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return ReadOnlyError(f"{path} cannot be written: {error}")
    if code is None:
        return CorruptionError(path, 0, f"SQLite refused a statement: {error}; {REMEDY}")
    return Unavailable(f"{path} could not be read or written: {error}")


def damaged(path: str, problem: str) -> CorruptionError:
    """The error for a file, or a row in it, that cannot be read."""
    return CorruptionError(path, 0, f"{problem}; {REMEDY}")


def newer(path: str, version: int, known: int) -> FormatVersionError:
    """The error for a file whose tables a newer Runnel has made."""
    return FormatVersionError(
        f"{path} has tables of version {version}, this Runnel knows version {known}; use the Runnel that wrote it, or "
        "a newer one"
    )


def _code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY
