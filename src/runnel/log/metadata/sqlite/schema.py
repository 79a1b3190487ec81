"""The tables of `cluster.sqlite`: what several brokers of one data directory know together.

Metadata. `record` has the current records by kind and name; `change` has the latest changes in their order, for the
logs that follow; `follower` has these logs, in which life of its node each was opened, and how far it has come.

Ownership. `node`, `owner`, `term` and `load` have the rows of `runnel.cluster.state`. `view` rises with every change of
a node or an owner, and is the version of the rows that changed.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from runnel.log.metadata.sqlite.failures import damaged, newer

VERSION: Final = 1

_TABLES: Final = """
CREATE TABLE record (
    kind TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE change (version INTEGER PRIMARY KEY, member TEXT NOT NULL, content BLOB NOT NULL);
CREATE TABLE follower (
    member TEXT PRIMARY KEY, life TEXT NOT NULL, incarnation INTEGER NOT NULL, followed INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE view (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL);
INSERT INTO view VALUES (1, 0);
CREATE TABLE node (
    name TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, address TEXT NOT NULL, is_alive INTEGER NOT NULL,
    is_draining INTEGER NOT NULL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE owner (
    journal TEXT NOT NULL, shard INTEGER NOT NULL, owner TEXT NOT NULL, incarnation INTEGER NOT NULL,
    epoch INTEGER NOT NULL, wanted TEXT NOT NULL, moved_ns INTEGER NOT NULL, reason TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (journal, shard)
) WITHOUT ROWID;
CREATE INDEX owner_version ON owner (version);
CREATE TABLE term (
    journal TEXT NOT NULL, shard INTEGER NOT NULL, epoch INTEGER NOT NULL, node TEXT NOT NULL,
    incarnation INTEGER NOT NULL, first_entry INTEGER NOT NULL, next_entry INTEGER NOT NULL,
    PRIMARY KEY (journal, shard, epoch)
) WITHOUT ROWID;
CREATE TABLE load (node TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, content BLOB NOT NULL) WITHOUT ROWID;
"""


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, in the transaction that has begun."""
    for statement in _TABLES.split(";"):
        if statement.strip():
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def check_version(connection: sqlite3.Connection, path: str) -> None:
    """FormatVersionError if a newer Runnel has made the tables, CorruptionError if there are none."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise newer(path, version, VERSION)
    if version != VERSION:
        raise damaged(path, "the file is empty, or not one of Runnel's")
