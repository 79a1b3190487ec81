"""The record of each query that fills a table: `_runnel/<name>/archive.json` in the table's directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runnel.errors import ClientFault, CorruptionError
from runnel.spark.pipelines.archive.layout import OWN_DIRECTORY

_FILE: Final = "archive.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class QueryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The topics that a query archives, and where Spark and the broker keep its position."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    url: str
    checkpoint: str
    cursor: str
    query_id: str | None = None  # None before its first start

    @property
    def selection(self) -> str:
        """The topics in words, for messages."""
        if self.pattern is not None:
            return f"pattern {self.pattern}"
        return f"topics {', '.join(self.topics)}"


def directory(table: Path, name: str) -> Path:
    """The directory of a query. ClientFault if its name is invalid."""
    if not _NAME.fullmatch(name):
        raise ClientFault(
            f"the archive's name is {name!r}: it must be up to 64 letters, digits, `.`, `_` and `-`, "
            "and begin with a letter or digit"
        )
    return table / OWN_DIRECTORY / name


def load(table: Path, name: str) -> QueryRecord | None:
    path = directory(table, name) / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=QueryRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CorruptionError(str(path), 0, f"not the record of an archive: {error}") from None


def save(table: Path, record: QueryRecord) -> None:
    """Write a record atomically."""
    folder = directory(table, record.name)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f".{_FILE}.{os.getpid()}"
    written.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    written.replace(folder / _FILE)


def load_all(table: Path) -> Iterator[QueryRecord]:
    """All records, in the order of their names."""
    for folder in sorted((table / OWN_DIRECTORY).glob("*/")):
        if _NAME.fullmatch(folder.name) and (record := load(table, folder.name)) is not None:
            yield record
