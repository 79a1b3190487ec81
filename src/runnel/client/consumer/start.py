"""Turns the `start` that a user gives into the start that the wire names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from runnel.client.arguments import check_natural, check_time
from runnel.errors import ClientFault
from runnel.formats import wire
from runnel.topics.hints import start_meant
from runnel.topics.names import check_topic
from runnel.topics.patterns import Pattern

OffsetMap: TypeAlias = Mapping[str | tuple[str, int], int]
StartAt: TypeAlias = str | int | datetime | tuple[str, int] | OffsetMap

_WORDS: Final = ("latest", "last", "earliest")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def start_of(start: StartAt, patterns: Sequence[str]) -> wire.Start:
    """The wire's form of a user's `start`. A ClientFault says which starts are valid."""
    if isinstance(start, str):
        if start in _WORDS:
            return wire.Start(start)
    elif isinstance(start, datetime):
        time_ns = time_ns_of(start)
        check_time("start", time_ns)
        return wire.Start("time", time_ns=time_ns)
    elif isinstance(start, Mapping):
        return wire.Start("offsets", tuple(partition_places(start)))
    elif isinstance(start, tuple):
        if len(start) == 2 and start[0] == "time" and type(start[1]) is int:
            check_time("start", start[1])
            return wire.Start("time", time_ns=start[1])
    elif type(start) is int:
        if len(patterns) != 1 or not Pattern(patterns[0]).is_literal:
            raise ClientFault(
                f"start={start} is an offset, which needs one topic, not {' '.join(patterns)}: "
                "give a map of topics, or (topic, partition) pairs, to offsets"
            )
        return wire.Start("offsets", tuple(partition_places({patterns[0]: start})))
    meant = start_meant(start)
    raise ClientFault(
        f"start={start!r} is none of 'latest', 'last', 'earliest', an offset, a datetime with a "
        "time zone, ('time', nanoseconds), or a map of topics or (topic, partition) to offsets"
        + ("" if meant is None else f"; did you mean {meant!r}?")
    )


def time_ns_of(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise ClientFault(f"{moment!r} has no time zone: which moment it is cannot be known")
    return (moment - _EPOCH) // _MICROSECOND * 1000


def partition_places(offsets: OffsetMap) -> Iterable[wire.PartitionPlace]:
    """The positions of topics or (topic, partition) pairs. A topic alone means its partition 0."""
    for place, offset in offsets.items():
        match place:
            case str():
                topic, partition = place, 0
            case (str() as topic, int() as partition) if partition >= 0:
                pass
            case _:
                raise ClientFault(f"{place!r} is neither a topic nor a (topic, partition) pair")
        if type(offset) is not int or offset < 0:
            raise ClientFault(f"{offset!r} of {place!r} is not an offset: 1, 2, 3 …")
        check_topic(topic)
        check_natural(f"the partition of {place!r}", partition)
        check_natural(f"the offset of {place!r}", offset)
        yield wire.PartitionPlace(topic, partition, offset)
