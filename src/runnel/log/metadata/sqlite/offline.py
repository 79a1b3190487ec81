"""Reads `cluster.sqlite` beside its brokers, or without any, and writes nothing.

While a file of SQLite's log lies beside it, the file alone is not the whole truth: then it is read as another process
does, under locks in the shared memory of its users. Otherwise nobody has it open, and it is read as it is: a reader
that made those files would leave them behind, perhaps where the broker may not touch them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from runnel.errors import FormatVersionError, MalformedError, RunnelError, Unavailable
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import MetadataRecord, Opened
from runnel.log.metadata.sqlite import record_rows, schema
from runnel.log.metadata.sqlite.database import BUSY_MS_MAX, connect
from runnel.log.metadata.sqlite.failures import failure, is_missing
from runnel.log.segments.scan import Damage

_ATTEMPTS: Final = 4
_PROBLEMS_SHOWN_MAX: Final = 100

T = TypeVar("T")


def read_file(path: str) -> LoadedRecords[MetadataRecord]:
    """All records of metadata; a file that cannot be read is damage. FileNotFoundError if there is none. Blocks."""

    def read(connection: sqlite3.Connection) -> LoadedRecords[MetadataRecord]:
        found, damage = record_rows.read_all(connection, path)
        return LoadedRecords(found, damage, None)

    return _read_settled(path, read)


def verify_file(path: str) -> LoadedRecords[MetadataRecord]:
    """The same, after a check of the whole file."""

    def check(connection: sqlite3.Connection) -> LoadedRecords[MetadataRecord]:
        found, damage = record_rows.read_all(connection, path)
        check = f"PRAGMA integrity_check({_PROBLEMS_SHOWN_MAX})"
        damage += [
            Damage(path, 0, 0, str(problem))
            for (problem,) in connection.execute(check)
            if problem != "ok"
        ]
        for version, content in record_rows.iterate(connection, 0, ""):
            try:
                record_rows.decode(content) if content else ()
            except MalformedError as error:
                damage.append(Damage(path, 0, len(content), f"change {version}: {error}"))
        return LoadedRecords(found, damage, None)

    return _read_settled(path, check)


def begin_epoch(path: str, record: Opened) -> None:
    """Let the epochs of all shards of a copy be above this one. Nobody has the file open. Blocks."""
    try:
        with closing(connect(path)) as connection:
            schema.check_version(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            record_rows.put(connection, 1, [record])
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise failure(error, path) from error


def _read_settled(
    path: str, read: Callable[[sqlite3.Connection], LoadedRecords[MetadataRecord]]
) -> LoadedRecords[MetadataRecord]:
    """Read again if it seems damaged: a broker may have opened the file meanwhile, or closed it."""
    problem = ""
    for attempt in range(_ATTEMPTS):
        try:
            with _opened(path) as connection:
                found = read(connection)
        except FormatVersionError:
            raise
        except RunnelError as error:
            if isinstance(error, Unavailable) and attempt == _ATTEMPTS - 1:
                raise
            if str(error) == problem:
                break
            problem = str(error)
        else:
            return found
    return LoadedRecords((), (Damage(path, 0, Path(path).stat().st_size, problem),), None)


@contextmanager
def _opened(path: str) -> Iterator[sqlite3.Connection]:
    """The file as of one moment."""
    is_in_use = Path(f"{path}-wal").exists()
    if not Path(path).exists():
        raise FileNotFoundError(path)
    options = "mode=ro" if is_in_use else "mode=ro&immutable=1"
    try:
        with closing(
            sqlite3.connect(
                f"file:{quote(path)}?{options}",
                uri=True,
                timeout=BUSY_MS_MAX / 1_000,
                isolation_level=None,
            )
        ) as connection:
            connection.execute("BEGIN")
            schema.check_version(connection, path)
            yield connection
    except sqlite3.Error as error:
        if is_missing(error):
            raise Unavailable(
                f"{path} is in use, or was when its brokers ended, and cannot be read from here without writing beside "
                "it: read it as their user, or read a backup"
            ) from error
        raise failure(error, path) from error
