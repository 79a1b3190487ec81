"""Checks the options of `spark.read` and `spark.readStream` with format `runnel`, and makes frozen structs of them.

Spark passes the names of options in lower case, and all values as text. An error names the option, its value and what
would be right. Nothing here contacts a broker.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from runnel.errors import ClientFault, RunnelError
from runnel.topics.hints import start_meant
from runnel.topics.names import Label, check_label, check_topic
from runnel.topics.patterns import Pattern

TAG_PREFIX: Final = "tag."
BYTES_PER_PARTITION: Final = 32 * 2**20

_SOURCE: Final = ("url", "token", "path", "topics", "pattern")
_BOUNDS: Final = ("startingOffsets", "startingTime", "endingOffsets", "endingTime")
_WORK: Final = ("tags", "bytesPerPartition", "failOnDataLoss")
_BATCH: Final = (*_SOURCE, *_BOUNDS, *_WORK)
_STREAM: Final = (*_BATCH, "maxRowsPerTrigger", "maxBytesPerTrigger", "cursor")

_NS_PER_SECOND: Final = 10**9
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FRACTION: Final = re.compile(r"(?<=\d)\.(\d+)")
_WORDS: Final = {"true": True, "false": False}
_SIZE: Final = re.compile(r"(\d+)\s*(k|m|g|kib|mib|gib)?b?", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class BoundKind(enum.Enum):
    """How a bound is given."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"


class ReadBound(msgspec.Struct, frozen=True):
    """Where reading a partition begins or ends; `value` is the offset, or the receive time in nanoseconds."""

    kind: BoundKind
    value: int = 0


EARLIEST: Final = ReadBound(BoundKind.EARLIEST)
LATEST: Final = ReadBound(BoundKind.LATEST)


class ReadBounds(msgspec.Struct, frozen=True):
    """Where reading begins or ends, for each partition; `option` names the option that says so."""

    option: str
    default: ReadBound
    # By topic and partition; partition None: all partitions of the topic.
    chosen: Mapping[tuple[str, int | None], ReadBound] = {}

    def of(self, topic: str, partition: int) -> ReadBound:
        chosen = self.chosen.get((topic, partition)) or self.chosen.get((topic, None))
        return self.default if chosen is None else chosen


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to read and how. Either `url` or `path` is set, and either `topics` or `pattern`."""

    url: str | None
    token: str | None
    path: str | None
    topics: tuple[str, ...]
    pattern: str | None
    starting: ReadBounds
    ending: ReadBounds
    tags: Mapping[str, str]
    bytes_per_partition: int
    fails_on_data_loss: bool
    rows_per_trigger_max: int | None = None
    bytes_per_trigger_max: int | None = None
    cursor: str | None = None  # None: named after the query; "": no cursor

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns that match exactly these topics."""
        return (self.pattern,) if self.pattern is not None else tuple(map(literal, self.topics))


def literal(topic: str) -> str:
    """The pattern that matches only this name."""
    return re.sub(r"[*?[]", r"[\g<0>]", topic)


def batch_options(options: Mapping[str, str], *, url: str) -> ReadOptions:
    """The options of a batch read; `url` is the default."""
    return _read_options(_GivenOptions(options, _BATCH, "spark.read"), url)


def stream_options(options: Mapping[str, str], *, url: str) -> ReadOptions:
    """The options of a stream. A stream has no end, and begins at a position that every topic has."""
    given = _GivenOptions(options, _STREAM, "spark.readStream")
    for name in ("path", "endingOffsets", "endingTime"):
        if given.text(name) is not None:
            why = (
                "a stream is read from a broker: give `url`, or read the files with spark.read"
                if name == "path"
                else "a stream has no end: use spark.read, or the trigger availableNow"
            )
            raise given.fault(name, why)
    read = _read_options(given, url)
    if read.starting.chosen or read.starting.default.kind is BoundKind.OFFSET:
        raise given.fault(
            read.starting.option, "a stream begins at earliest, latest or one startingTime"
        )
    if given.text("startingOffsets") is None and given.text("startingTime") is None:
        # As elsewhere in Spark, a stream reads new messages unless an option says otherwise.
        read = msgspec.structs.replace(read, starting=ReadBounds("startingOffsets", LATEST))
    cursor = given.text("cursor")
    if cursor:
        given.checked("cursor", lambda text: check_label(Label.CURSOR, text))
    return msgspec.structs.replace(
        read,
        rows_per_trigger_max=given.size("maxRowsPerTrigger"),
        bytes_per_trigger_max=given.size("maxBytesPerTrigger"),
        cursor=cursor,
    )


def _read_options(given: _GivenOptions, url: str) -> ReadOptions:
    topics, pattern = _topics_or_pattern(given)
    starting = _bounds(given, "starting", EARLIEST, topics)
    ending = _bounds(given, "ending", LATEST, topics)
    path = given.text("path")
    if path is not None and (given.text("url") or given.text("token")):
        raise given.fault("path", "it is read without a broker: give `path` or `url`, not both")
    return ReadOptions(
        url=None if path is not None else given.text("url") or url,
        token=given.text("token"),
        path=path,
        topics=topics,
        pattern=pattern,
        starting=starting,
        ending=ending,
        tags=_tags(given),
        bytes_per_partition=given.size("bytesPerPartition") or BYTES_PER_PARTITION,
        fails_on_data_loss=given.flag("failOnDataLoss", default=True),
    )


def _topics_or_pattern(given: _GivenOptions) -> tuple[tuple[str, ...], str | None]:
    listed, pattern = given.text("topics"), given.text("pattern")
    if listed is not None and pattern is not None:
        raise given.fault("pattern", "give `topics` or `pattern`, not both")
    if pattern is not None:
        given.checked("pattern", Pattern)
        return (), pattern
    if listed is None:
        raise ClientFault(
            'which topics? option("topics", "one,another") or option("pattern", "sensors/*")'
        )
    topics = tuple(dict.fromkeys(name.strip() for name in listed.split(",")))

    def check(_: str) -> None:
        for name in topics:
            check_topic(name)

    given.checked("topics", check)
    return topics, None


def _tags(given: _GivenOptions) -> dict[str, str]:
    tags = given.under(TAG_PREFIX)
    text = given.text("tags")
    if text is None:
        return tags
    try:
        return tags | msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        raise given.fault("tags", 'it must be JSON, as {"unit": "C"}') from None


# --- Bounds ---


def _bounds(
    given: _GivenOptions, side: str, default: ReadBound, topics: Collection[str]
) -> ReadBounds:
    by_offset, by_time = f"{side}Offsets", f"{side}Time"
    offsets, times = given.text(by_offset), given.text(by_time)
    if offsets is not None and times is not None:
        raise given.fault(by_time, f"give `{by_offset}` or `{by_time}`, not both")
    if offsets is not None:
        name, read, text = by_offset, _parse_offset_bound, offsets
    elif times is not None:
        name, read, text = by_time, _parse_time_bound, times
    else:
        return ReadBounds(by_offset, default)
    if not text.lstrip().startswith("{"):
        place = read(text)
        if place is None or place.kind is BoundKind.OFFSET:
            meant = start_meant(text) if read is _parse_offset_bound else None
            hint = f"; did you mean {meant}?" if meant in ("earliest", "latest") else ""
            raise given.fault(name, _EXPECTED[read] + hint)
        return ReadBounds(name, place)
    chosen = _chosen_bounds(given, name, text, read)
    for topic, _ in chosen:
        if topics and topic not in topics:
            raise given.fault(name, f"{topic!r} is not among the topics {', '.join(topics)}")
    return ReadBounds(name, default, chosen)


def _chosen_bounds(
    given: _GivenOptions, name: str, text: str, read: Callable[[object], ReadBound | None]
) -> dict[tuple[str, int | None], ReadBound]:
    try:
        decoded = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise given.fault(name, f"{_EXPECTED[read]} ({error})") from None
    chosen: dict[tuple[str, int | None], ReadBound] = {}
    for topic, given_bound in decoded.items():
        by_partition = given_bound if isinstance(given_bound, dict) else {None: given_bound}
        for partition, value in by_partition.items():
            place = read(value)
            if place is None or not (partition is None or partition.isdecimal()):
                raise given.fault(name, f"{topic!r}: {_EXPECTED[read]}")
            chosen[topic, None if partition is None else int(partition)] = place
    return chosen


def _parse_offset_bound(value: object) -> ReadBound | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return ReadBound(BoundKind.OFFSET, value) if value >= 1 else None
    return {"earliest": EARLIEST, "latest": LATEST}.get(value) if isinstance(value, str) else None


def _parse_time_bound(value: object) -> ReadBound | None:
    time_ns = parse_time_ns(str(value))
    return None if time_ns is None else ReadBound(BoundKind.TIME, time_ns)


_EXPECTED: Final[Mapping[Callable[[object], ReadBound | None], str]] = {
    _parse_offset_bound: 'it must be earliest, latest, or JSON: {"topic": 17} or {"topic": {"0": 17, "1": '
    '"earliest"}}; offsets begin at 1',
    _parse_time_bound: 'it must be a time as 2025-01-31T12:00:00Z, nanoseconds since 1970, or JSON: {"topic": time}',
}


def parse_time_ns(text: str) -> int | None:
    """Parse ISO 8601 (UTC if it has no zone) or nanoseconds since 1970; None if the text is neither."""
    text = text.strip()
    if re.fullmatch(r"-?\d{9,}", text):
        return int(text)
    fraction = _FRACTION.search(text)
    try:
        moment = datetime.fromisoformat(_FRACTION.sub("", text))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - _EPOCH
    digits = "" if fraction is None else fraction[1]
    # A datetime has no nanoseconds, so the fraction is parsed separately.
    return (since.days * 86_400 + since.seconds) * _NS_PER_SECOND + int(f"{digits:0<9.9}")


# --- One option ---


class _GivenOptions:
    """The options as the user gave them. Case does not matter, and unknown options are refused."""

    def __init__(self, options: Mapping[str, str], known: Collection[str], verb: str) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known}
        for name in self._options:
            if name not in names and not name.startswith(TAG_PREFIX):
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {names[near[0]]}? " if near else ""
                raise ClientFault(
                    f"option {name!r} is not one of {verb}: {hint}There are {', '.join(known)} and tag.<name>"
                )

    def text(self, name: str) -> str | None:
        return self._options.get(name.lower())

    def under(self, prefix: str) -> dict[str, str]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._options.items()
            if name.startswith(prefix)
        }

    def fault(self, name: str, right: str) -> ClientFault:
        return ClientFault(f"option {name} is {self.text(name)!r}: {right}")

    def checked(self, name: str, check: Callable[[str], object]) -> None:
        try:
            check(self.text(name) or "")
        except RunnelError as error:
            raise self.fault(name, str(error)) from None

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in _WORDS:
            raise self.fault(name, "it must be true or false")
        return _WORDS[text.lower()]

    def size(self, name: str) -> int | None:
        """A number of at least 1, also as 64k, 32m or 1g."""
        text = self.text(name)
        if text is None:
            return None
        found = _SIZE.fullmatch(text.strip())
        size = int(found[1]) * _UNITS[(found[2] or "").lower()[:1]] if found else 0
        if size < 1:
            raise self.fault(name, "it must be a number from 1 on, also as 64k, 32m or 1g")
        return size
