"""Plans batch reads of a data directory without its broker, by the index of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from runnel.errors import ClientFault, UnknownTopicError
from runnel.log.reading import OfflineLog, Selection, TopicInfo
from runnel.spark.options import BoundKind, ReadBound, ReadBounds, ReadOptions
from runnel.spark.read.plan import StoredOffsets, check_partitions, pack, resolve
from runnel.spark.read.pushdown import Narrowing
from runnel.spark.read.ranges import FileRange, report_loss


class _ReceiveTimes(NamedTuple):
    """The receive times between which a partition is read; None: no bound."""

    since_ns: int | None
    until_ns: int | None


def plan_files(path: str, options: ReadOptions, narrowing: Narrowing) -> list[Sequence[FileRange]]:
    """The tasks of a read, each with blocks of about `bytes_per_partition` bytes."""
    log = OfflineLog(_checked(path))
    tasks: list[Sequence[FileRange]] = []
    for selection in _selections(log, options, narrowing):
        sized = ((stretch, stretch.size) for stretch in log.plan(selection))
        tasks += [
            [
                FileRange(
                    path=log.directory,
                    stretches=tuple(stretches),
                    selection=selection,
                    rows=narrowing.rows(options.tags),
                    fails_on_data_loss=options.fails_on_data_loss,
                )
            ]
            for stretches in pack(sized, options.bytes_per_partition)
        ]
        report = log.report
        if report.damage:  # tasks read undamaged blocks, and would not notice the damage
            whole = FileRange(
                path=log.directory,
                stretches=(),
                selection=selection,
                fails_on_data_loss=options.fails_on_data_loss,
            )
            report_loss(
                whole, f"{report.damage_count} damaged places, the first {report.damage[0]}"
            )
    return tasks


def _checked(path: str) -> str:
    local = path.removeprefix("file://").removeprefix("file:")
    if Path(local).is_file():
        raise ClientFault(
            f"option path is {path!r}: that is a file; a data directory or a copy of one would be right "
            "(spark.read.parquet reads what `runnel log export` made)"
        )
    if not Path(local).is_dir():
        raise ClientFault(f"option path is {path!r}: there is no such directory on this machine")
    return local


def _selections(log: OfflineLog, options: ReadOptions, narrowing: Narrowing) -> Iterator[Selection]:
    """The messages to read: one selection for each distinct pair of receive times."""
    topics = log.topics(options.patterns)
    _check_topics(log, options, topics)
    by_times: dict[_ReceiveTimes, dict[tuple[str, int], tuple[int, int]]] = {}
    for topic in topics:
        if not narrowing.wants_topic(topic.name):
            continue
        for at in topic.partitions:
            key = (topic.name, at.partition)
            if not narrowing.wants_partition(at.partition):
                continue
            stored = StoredOffsets(at.first_offset, at.next_offset)
            begin, since_ns = _place(options, options.starting, key, stored, stored.first)
            end, until_ns = _place(options, options.ending, key, stored, stored.next)
            begin = max(begin, begin if narrowing.offset.low is None else narrowing.offset.low)
            end = min(end, end if narrowing.offset.high is None else narrowing.offset.high)
            if begin < end:
                by_times.setdefault(_ReceiveTimes(since_ns, until_ns), {})[key] = (begin, end)
    for times, ranges in by_times.items():
        received = narrowing.receive_ns
        yield Selection(
            topics=options.patterns,
            ranges=ranges,
            since_ns=_latest(times.since_ns, received.low),
            until_ns=_earliest(times.until_ns, received.high),
        )


def _check_topics(log: OfflineLog, options: ReadOptions, topics: Sequence[TopicInfo]) -> None:
    counts = {topic.name: len(topic.partitions) for topic in topics}
    for name in options.topics:
        if name not in counts:
            known = [topic.name for topic in log.topics(("*",))]
            shown = ", ".join(known[:5]) + (", …" if known[5:] else "")
            raise UnknownTopicError(
                f"there is no topic {name!r} in {log.directory}; there are {len(known)} topics: {shown}"
            )
    for places in (options.starting, options.ending):
        check_partitions(places, counts)


def _place(
    options: ReadOptions,
    places: ReadBounds,
    key: tuple[str, int],
    stored: StoredOffsets,
    otherwise: int,
) -> tuple[int, int | None]:
    """The offset and the receive time that bound a partition; only one of the two limits it."""
    place: ReadBound = places.of(*key)
    if place.kind is BoundKind.TIME:
        return otherwise, place.value
    offset = resolve(places, place, *key, stored, is_strict=options.fails_on_data_loss)
    return offset, None


def _latest(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _earliest(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
