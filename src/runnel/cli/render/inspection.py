"""The output of `runnel log inspect`: JSON for programs, tables for people."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from runnel.cli.render.tables import Table, counted, human_bytes, json_text, printable
from runnel.cli.render.times import format_time
from runnel.log.log import CursorPosition, ShardId
from runnel.log.reading import JournalInfo, OfflineLog, SegmentInfo, TopicInfo
from runnel.platform.lock_holder import LockHolder


class Inspected(msgspec.Struct, frozen=True):
    """Everything that is printed. `topics` is None if --topics was not given."""

    log: OfflineLog
    holder: LockHolder | None
    journals: list[tuple[JournalInfo, list[SegmentInfo]]]
    topics: list[TopicInfo] | None


def inspect(log: OfflineLog, *, with_topics: bool) -> Inspected:
    return Inspected(
        log,
        log.holder(),
        [(journal, log.segments(journal)) for journal in log.journals()],
        log.topics() if with_topics else None,
    )


# --- For programs ---


def as_json(found: Inspected) -> str:
    log, holder = found.log, found.holder
    document: dict[str, Any] = {
        "directory": log.directory,
        "format": log.format,
        "open_in_process": None if holder is None else msgspec.to_builtins(holder),
        "epoch": max(log.catalogued.epochs.values(), default=0),
        "was_closed": log.catalogued.was_closed,
        "journals": [_journal_json(log, *item) for item in found.journals],
        "cursors": [msgspec.to_builtins(cursor) for cursor in log.cursors()],
    }
    if found.topics is not None:
        document["topics"] = [_topic_json(topic) for topic in found.topics]
    document["damage"] = [msgspec.to_builtins(damage) for damage in log.report.damage]
    document["notes"] = _notes(log)
    return json_text(document)


def _journal_json(
    log: OfflineLog, journal: JournalInfo, segments: list[SegmentInfo]
) -> dict[str, Any]:
    epochs = log.catalogued.epochs
    return {
        "name": journal.name,
        "folder": journal.folder,
        "shards": [
            {"shard": shard, "epoch": epochs.get(ShardId(journal.name, shard), 0)}
            for shard in journal.shards
        ],
        "file_bytes": sum(segment.file_bytes for segment in segments),
        "segments": [_segment_json(segment) for segment in segments],
    }


def _segment_json(segment: SegmentInfo) -> dict[str, Any]:
    return {
        "shard": segment.name.shard,
        "number": segment.name.number,
        "generation": segment.name.generation,
        "path": segment.name.path,
        "file_bytes": segment.file_bytes,
        "used_bytes": segment.used_bytes,
        "index_bytes": segment.index_bytes,
        "is_sealed": segment.is_sealed,
        "entries": segment.entries,
        "first_entry": segment.first_entry,
        "last_entry": segment.last_entry,
        **_time_json("first_time", segment.first_time_ns),
        **_time_json("last_time", segment.last_time_ns),
        "topic_partitions": segment.topic_partitions,
        "runs": segment.runs,
    }


def _topic_json(topic: TopicInfo) -> dict[str, Any]:
    return {
        "name": topic.name,
        "journal": topic.journal,
        "partitions": [
            {
                "partition": partition.partition,
                "first_offset": partition.first_offset,
                "next_offset": partition.next_offset,
                "messages": partition.messages,
                **_time_json("last_time", partition.last_time_ns),
            }
            for partition in topic.partitions
        ],
    }


def _time_json(name: str, time_ns: int) -> dict[str, Any]:
    return {name: format_time(time_ns) if time_ns else None, f"{name}_ns": time_ns or None}


def _notes(log: OfflineLog) -> list[str]:
    report = log.report
    missing = [] if log.catalogued.is_present else ["there is no metadata"]
    return [*missing, *map(str, report.torn), *map(str, report.withheld)]


# --- For people ---


def show(found: Inspected) -> None:
    log = found.log
    typer.echo(f"{log.directory}: format {log.format}, {_state(found)}")
    typer.echo(_summary(found))
    if any(segments for _, segments in found.journals):
        typer.echo()
        _segment_table(found).show()
    if found.topics:
        typer.echo()
        _topic_table(found.topics).show()
    if log.cursors():
        typer.echo()
        _cursor_table(log).show()
    for note in _notes(log):
        typer.echo(f"note: {printable(note)}")
    for damage in log.report.damage:
        typer.echo(f"damage: {printable(str(damage))}")


def _state(found: Inspected) -> str:
    if found.holder is not None:
        process = f"process {found.holder.pid}" if found.holder.pid else "another process"
        return f"open in {process}" if found.holder.is_certain else f"perhaps open in {process}"
    return "closed" if found.log.catalogued.was_closed else "not closed in good order"


def _summary(found: Inspected) -> str:
    segments = [segment for _, of in found.journals for segment in of]
    topics = found.log.catalogued.topics.values()
    parts = [
        counted(len(found.journals), "journal"),
        counted(len(segments), "segment"),
        counted(sum(segment.entries for segment in segments), "batch", "batches"),
        human_bytes(sum(segment.file_bytes + segment.index_bytes for segment in segments)),
        counted(sum(not topic.is_deleted for topic in topics), "topic"),
        counted(len(found.log.cursors()), "cursor"),
    ]
    return ", ".join(parts)


def _segment_table(found: Inspected) -> Table:
    return Table(
        ("journal", "shard", "segment", "size", "batches", "first received", "last received", ""),
        [
            (
                journal.name,
                str(segment.name.shard),
                f"{segment.name.number}-{segment.name.generation}",
                human_bytes(segment.used_bytes),
                f"{segment.entries:,}",
                _short_time(segment.first_time_ns),
                _short_time(segment.last_time_ns),
                "sealed" if segment.is_sealed else "growing",
            )
            for journal, segments in found.journals
            for segment in segments
        ],
        frozenset(("shard", "segment", "size", "batches")),
    )


def _topic_table(topics: list[TopicInfo]) -> Table:
    return Table(
        ("topic", "partition", "journal", "first", "next", "messages", "last received"),
        [
            (
                topic.name,
                str(partition.partition),
                topic.journal,
                str(partition.first_offset),
                str(partition.next_offset),
                f"{partition.messages:,}",
                _short_time(partition.last_time_ns),
            )
            for topic in topics
            for partition in topic.partitions
        ],
        frozenset(("partition", "first", "next", "messages")),
    )


def _cursor_table(log: OfflineLog) -> Table:
    return Table(
        ("cursor", "at", "updated"),
        [
            (cursor.name, _cursor_place(place), _short_time(cursor.updated_ns))
            for cursor in log.cursors()
            for place in cursor.positions
        ],
    )


def _cursor_place(place: CursorPosition) -> str:
    if place.topic is not None:
        return f"{place.topic}[{place.partition}]@{place.offset}"
    entry = 0 if place.position is None else place.position.entry
    return f"{place.shard} entry {entry} of {', '.join(place.patterns)}"


def _short_time(time_ns: int) -> str:
    """The time to the millisecond; a dash for none."""
    return f"{format_time(time_ns)[:23]}Z" if time_ns else "-"
