"""`archive_status`: the content of an archive, and the progress of the queries that fill it."""

from __future__ import annotations

import os

import msgspec

from runnel.client import connect_blocking
from runnel.errors import RunnelError
from runnel.spark.pipelines.archive.query_record import QueryRecord, load_all
from runnel.spark.pipelines.archive.source import app_id
from runnel.spark.pipelines.archive.table import ArchiveTable


class QueryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A query. `messages_behind`: its cursor has still to pass at most this many messages; None if unknown."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    checkpoint: str
    cursor: str
    last_batch: int | None
    messages_behind: int | None
    problem: str | None


class ArchiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The table, and the queries that fill it. Dates are of the messages' receive times."""

    table: str
    version: int
    layout: int
    files: int
    rows: int
    bytes: int
    topics: int
    first_date: str | None
    last_date: str | None
    last_change_ms: int
    queries: tuple[QueryStatus, ...]


def archive_status(
    table: str | os.PathLike[str], *, url: str | None = None, token: str | None = None
) -> ArchiveStatus:
    """The status of an archive. Lags come from the broker at `url`, or else at each query's own URL."""
    opened = ArchiveTable.open(table)
    files = opened.files()
    dates = sorted({file.date.isoformat() for file in files})
    return ArchiveStatus(
        table=str(opened.path),
        version=opened.version,
        layout=opened.layout_version,
        files=len(files),
        rows=sum(file.rows or 0 for file in files),
        bytes=sum(file.size_bytes for file in files),
        topics=len({file.topic for file in files}),
        first_date=dates[0] if dates else None,
        last_date=dates[-1] if dates else None,
        last_change_ms=opened.last_change_ms(),
        queries=tuple(
            _query_status(opened, record, url or record.url, token)
            for record in load_all(opened.path)
        ),
    )


def _query_status(
    opened: ArchiveTable, record: QueryRecord, url: str, token: str | None
) -> QueryStatus:
    behind, problem = _messages_behind(record.cursor, url, token)
    return QueryStatus(
        name=record.name,
        topics=record.topics,
        pattern=record.pattern,
        checkpoint=record.checkpoint,
        cursor=record.cursor,
        last_batch=None if record.query_id is None else opened.last_batch(app_id(record.query_id)),
        messages_behind=behind,
        problem=problem,
    )


def _messages_behind(cursor: str, url: str, token: str | None) -> tuple[int | None, str | None]:
    try:
        with connect_blocking(url, token=token) as bus:
            found = bus.cursor(cursor)
    except RunnelError as error:
        return None, str(error)
    if found is None:
        return None, f"there is no cursor {cursor!r} at {url}"
    return sum(place.lag for place in found.places), None
