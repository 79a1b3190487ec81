"""Makes `cluster.sqlite` from records: whole under another name, synced, and then renamed."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from runnel.log.metadata.records import MetadataRecord
from runnel.log.metadata.sqlite import record_rows, schema
from runnel.log.metadata.sqlite.failures import failure
from runnel.log.segments import paths
from runnel.platform.disk import Disk, FileAccess

# Files that SQLite keeps beside the one that it has open.
COMPANIONS: Final = ("-wal", "-shm", "-journal")


def make_file(disk: Disk, path: str, content: Sequence[MetadataRecord]) -> None:
    """Make the file with these records. It replaces another one, which nobody has open. Blocks."""
    unfinished = path + paths.UNFINISHED_SUFFIX
    remove_file(disk, unfinished)
    try:
        _write(unfinished, content)
        file = disk.open(unfinished, FileAccess.WRITE)
        try:
            file.sync()
        finally:
            file.close()
    except sqlite3.Error as error:
        remove_file(disk, unfinished)
        raise failure(error, unfinished) from error
    except BaseException:
        with suppress(OSError):
            remove_file(disk, unfinished)
        raise
    remove_file(disk, path)
    disk.rename(unfinished, path)
    disk.sync_directory(path.rpartition("/")[0])


def _write(path: str, content: Sequence[MetadataRecord]) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # A crash leaves an unfinished file, which the next attempt removes.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        schema.make_tables(connection)
        record_rows.put(connection, 1, content)
        connection.execute(
            "INSERT INTO change VALUES (1, '', ?)", (record_rows.encode(()),)
        )  # versions continue behind it
        connection.execute("COMMIT")
    finally:
        connection.close()


def remove_file(disk: Disk, path: str) -> None:
    """Remove the file, if it is there, and what SQLite has left beside it."""
    for name in (path, *(path + companion for companion in COMPANIONS)):
        with suppress(FileNotFoundError):
            disk.remove(name)
