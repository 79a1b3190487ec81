"""Records of metadata as rows of `cluster.sqlite`, each with a checksum: SQLite has none of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from runnel.errors import MalformedError
from runnel.formats.checksum import crc32c
from runnel.log.metadata import records
from runnel.log.metadata.records import MetadataRecord
from runnel.log.segments.scan import Damage

_CHECKSUM_BYTES: Final = 4
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[MetadataRecord])

OPENED, CLOSED, JOURNAL, TOPIC, DELETED, TERM, CURSOR, SUBSCRIPTION = KINDS = (
    "opened",
    "closed",
    "journal",
    "topic",
    "deleted",
    "term",
    "cursor",
    "subscription",
)
# In the order in which they are read: journals before topics, and how the directory was closed at last.
_READ: Final = (OPENED, JOURNAL, TOPIC, DELETED, TERM, CURSOR, SUBSCRIPTION, CLOSED)


class Row(NamedTuple):
    """The key of a record, and the keys of those that it makes void."""

    kind: str
    name: str
    is_there: bool = True  # False: the record says that it is gone
    voids: str = ""  # the kind of a record of the same name


def row_of(record: MetadataRecord) -> Row:
    match record:
        case records.Opened():
            return Row(OPENED, "", voids=CLOSED)
        case records.Closed():
            return Row(CLOSED, "")
        case records.JournalMade(name):
            return Row(JOURNAL, name)
        case records.TopicMade(name):
            return Row(TOPIC, name, voids=DELETED)
        case records.TopicDeleted(name):
            return Row(DELETED, name)
        case records.CursorSet(cursor):
            return Row(CURSOR, cursor.name)
        case records.CursorRemoved(name):
            return Row(CURSOR, name, is_there=False)
        case records.SubscriptionSet(name):
            return Row(SUBSCRIPTION, name)
        case records.SubscriptionRemoved(name):
            return Row(SUBSCRIPTION, name, is_there=False)
        case records.TermTaken(producer):
            return Row(TERM, producer)


def put(connection: sqlite3.Connection, version: int, changed: Iterable[MetadataRecord]) -> None:
    """Let the rows say what these records say."""
    for record in map(partial(_with_epoch, connection), changed):
        row = row_of(record)
        if row.is_there:
            connection.execute(
                "INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)",
                (row.kind, row.name, version, encode([record])),
            )
        else:
            _remove(connection, row.kind, row.name)
        if row.voids:
            _remove(connection, row.voids, row.name)


def _with_epoch(connection: sqlite3.Connection, record: MetadataRecord) -> MetadataRecord:
    """The epoch above which all others are only rises, as if every record of it was still there."""
    if isinstance(record, records.Opened):
        known = find(connection, OPENED, "")
        if isinstance(known, records.Opened) and known.epoch > record.epoch:
            return msgspec.structs.replace(record, epoch=known.epoch)
    return record


def _remove(connection: sqlite3.Connection, kind: str, name: str) -> None:
    connection.execute("DELETE FROM record WHERE kind = ? AND name = ?", (kind, name))


def find(connection: sqlite3.Connection, kind: str, name: str) -> MetadataRecord | None:
    """The current record of this kind and name. MalformedError if it is damaged."""
    found = connection.execute(
        "SELECT content FROM record WHERE kind = ? AND name = ?", (kind, name)
    ).fetchone()
    return None if found is None else decode(found[0])[0]


def read_all(
    connection: sqlite3.Connection, path: str
) -> tuple[list[MetadataRecord], list[Damage]]:
    """All current records, in an order in which they can be applied, and the damage of those that cannot be read."""
    found: list[MetadataRecord] = []
    damage: list[Damage] = []
    for kind in _READ:
        # The table of terms is bounded: the oldest go first.
        order = "version, name" if kind == TERM else "name"
        query = f"SELECT name, content FROM record WHERE kind = ? ORDER BY {order}"
        for name, content in connection.execute(query, (kind,)):
            try:
                [record] = decode(content)
                if row_of(record)[:2] != (kind, name):
                    raise MalformedError("record", "stands under another name")
            except (MalformedError, ValueError) as error:
                problem = f"the {kind} {name!r} cannot be read: {error}"
                damage.append(Damage(path, 0, len(content), problem))
            else:
                found.append(record)
    return found, damage


# --- Bytes ---


def encode(changed: Sequence[MetadataRecord]) -> bytes:
    """CRC-32C, little-endian, then a MessagePack array of records."""
    content = _encoder.encode(changed)
    return crc32c(content).to_bytes(_CHECKSUM_BYTES, "little") + content


def decode(content: bytes) -> list[MetadataRecord]:
    """The records. MalformedError if the content is not whole."""
    body = content[_CHECKSUM_BYTES:]
    if crc32c(body).to_bytes(_CHECKSUM_BYTES, "little") != content[:_CHECKSUM_BYTES]:
        raise MalformedError("record", "does not match its checksum")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MalformedError("record", str(error)) from None


def iterate(connection: sqlite3.Connection, after: int, member: str) -> Iterator[tuple[int, bytes]]:
    """The changes behind this version, each with its content, which is empty for those of this log."""
    return connection.execute(
        "SELECT version, CASE WHEN member = ? THEN x'' ELSE content END FROM change WHERE version > ? "
        "ORDER BY version",
        (member, after),
    )
