"""The options of a replay, checked before anything is read. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import msgspec

from runnel.client.connection import parse_url
from runnel.errors import ClientFault
from runnel.spark.connections import default_url
from runnel.spark.options import parse_time_ns
from runnel.spark.pipelines.replay.rename_rules import RenameRules
from runnel.topics.names import check_topic
from runnel.topics.patterns import Pattern

Time: TypeAlias = str | int | datetime

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET_MAX: Final = 2**63 - 1
_GAP_MAX_S_MIN: Final = 0.001


class OffsetRange(msgspec.Struct, frozen=True):
    """The offsets of one topic-partition from `begin` on and below `end`; None: no bound."""

    topic: str
    partition: int
    begin: int | None = None
    end: int | None = None


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, where to, and how fast. All options together identify the replay."""

    archive: str | None = None
    path: str | None = None
    url: str | None = None  # the broker to read from; None if the source is not a broker
    into_url: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    offsets: tuple[OffsetRange, ...] = ()
    tags: dict[str, str] = {}
    where: str | None = None
    rename: RenameRules = RenameRules()
    speed: float | None = None
    rate: float | None = None
    gap_max_s: float | None = None

    @property
    def is_paced(self) -> bool:
        return self.speed is not None or self.rate is not None

    @property
    def source(self) -> str:
        """The source in words, for messages."""
        if self.archive is not None:
            return f"archive {self.archive}"
        return f"files in {self.path}" if self.path is not None else f"broker {self.url}"


def differences(one: ReplayOptions, other: ReplayOptions) -> list[str]:
    """The options that differ between two replays, as `speed was 2.0, and is 4.0`."""
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return [
        f"{name} was {_describe(was)}, and is {_describe(now)}"
        for name, was, now in pairs
        if was != now
    ]


def _describe(value: object) -> str:
    if isinstance(value, RenameRules):
        value = [str(rule) for rule in value.rules]
    return "not given" if value in (None, (), [], {}) else str(msgspec.to_builtins(value))


def check_options(
    *,
    archive: str | None = None,
    path: str | None = None,
    url: str | None = None,
    into_url: str | None = None,
    topics: str | Iterable[str] | None = None,
    pattern: str | None = None,
    since: Time | None = None,
    until: Time | None = None,
    offsets: Mapping[tuple[str, int], range] | None = None,
    tags: Mapping[str, str] | None = None,
    where: str | None = None,
    rename: Mapping[str, str] | Iterable[str] = (),
    speed: float | None = None,
    rate: float | None = None,
    gap_max_s: float | None = None,
) -> ReplayOptions:
    """Check the options. ClientFault says which is wrong, and what would be right."""
    if archive is not None and path is not None:
        raise ClientFault("give archive or path, not both: one source is replayed at a time")
    home_url = url or default_url()
    for text in (home_url, into_url or home_url):
        parse_url(text)
    chosen = _topics(topics)
    if chosen and pattern is not None:
        raise ClientFault("give topics or pattern, not both")
    if not chosen:
        pattern = "*" if pattern is None else pattern
        Pattern(pattern)
    since_ns, until_ns = _time_ns("since", since), _time_ns("until", until)
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise ClientFault(f"until {until} is not after since {since}: nothing lies between them")
    _check_pace(speed, rate, gap_max_s)
    return ReplayOptions(
        archive=archive,
        path=path,
        url=home_url if archive is None and path is None else None,
        into_url=into_url or home_url,
        topics=chosen,
        pattern=pattern,
        since_ns=since_ns,
        until_ns=until_ns,
        offsets=tuple(_bounds(*each) for each in sorted((offsets or {}).items(), key=_first)),
        tags=dict(tags or {}),
        where=where,
        rename=RenameRules.make(rename),
        speed=None if speed is None else float(speed),
        rate=None if rate is None else float(rate),
        gap_max_s=None if gap_max_s is None else float(gap_max_s),
    )


def _first(item: tuple[tuple[str, int], range]) -> tuple[str, int]:
    return item[0]


def _topics(topics: str | Iterable[str] | None) -> tuple[str, ...]:
    if topics is None:
        return ()
    chosen = tuple(dict.fromkeys((topics,) if isinstance(topics, str) else topics))
    for topic in chosen:
        check_topic(topic)
        if "," in topic:
            raise ClientFault(
                f"topic {topic!r} has a comma, by which a list of topics is split: name it with pattern"
            )
    return chosen


def _time_ns(name: str, time: Time | None) -> int | None:
    if time is None or isinstance(time, int):
        return time
    if isinstance(time, datetime):
        moment = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    parsed = parse_time_ns(time)
    if parsed is None:
        raise ClientFault(
            f"{name} is {time!r}: it must be a time as 2025-01-31T12:00:00Z (without a zone UTC is meant), "
            "or nanoseconds since 1970"
        )
    return parsed


def _bounds(where: tuple[str, int], offsets: range) -> OffsetRange:
    topic, partition = where
    check_topic(topic)
    if offsets.step != 1 or offsets.start < 0 or not offsets or partition < 0:
        raise ClientFault(
            f"offsets of {topic}[{partition}] are {offsets}: range(17, 41) would be those from 17 to 40"
        )
    return OffsetRange(
        topic,
        partition,
        offsets.start if offsets.start > 1 else None,
        offsets.stop if offsets.stop <= _OFFSET_MAX else None,
    )


def _check_pace(speed: float | None, rate: float | None, gap_max_s: float | None) -> None:
    if speed is not None and rate is not None:
        raise ClientFault(
            "give speed (a factor of event time) or rate (messages a second), not both"
        )
    for name, value in (("speed", speed), ("rate", rate)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ClientFault(f"{name} is {value}: it must be a number above 0")
    if gap_max_s is not None:
        if speed is None:
            raise ClientFault("gap_max_s shortens waiting by event time: it goes with speed")
        if not (gap_max_s >= _GAP_MAX_S_MIN and math.isfinite(gap_max_s)):
            raise ClientFault(f"gap_max_s is {gap_max_s}: at least {_GAP_MAX_S_MIN} s")
