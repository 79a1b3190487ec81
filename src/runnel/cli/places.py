"""Parses places in topics as users write them: where reading begins, and where a cursor stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from runnel.cli.render.times import TIME_FORMS, parse_time
from runnel.errors import ClientFault
from runnel.topics.hints import start_meant
from runnel.topics.patterns import Pattern

WORDS: Final = ("latest", "last", "earliest")
STARTS: Final = ("earliest", "latest")  # of a new subscription
_OFFSET_MAX: Final = 2**63 - 1


class Time(msgspec.Struct, frozen=True):
    """The messages received at this time or later."""

    time_ns: int


Place: TypeAlias = str | int | Time
Start: TypeAlias = str | int | tuple[str, int]
"""A place as the client's methods take it."""


def parse_place(option: str, text: str, now_ns: int, words: tuple[str, ...] = WORDS) -> Place:
    """Parse one of `words`, an offset, or a time. A bare number is an offset: users do not type nanoseconds."""
    stripped = text.strip()
    if stripped in words:
        return stripped
    if re.fullmatch(r"-?\d+", stripped):
        return _offset(option, stripped)
    try:
        return Time(parse_time(option, stripped, now_ns))
    except ClientFault as error:
        if "is not a time;" not in str(error):
            raise  # the text looks like a time, and the error says what is wrong with it
    meant = start_meant(text)
    hint = f"; did you mean {meant}?" if meant in words else ""
    raise ClientFault(
        f"{option}: {text!r} is no place to begin; write {', '.join(words)}, an offset such as 17, "
        f"or a time: {TIME_FORMS}{hint}"
    )


def parse_start(
    option: str, text: str, patterns: Sequence[str], now_ns: int, words: tuple[str, ...] = WORDS
) -> Start:
    """Parse where reading of these topics begins. An offset needs exactly one topic."""
    place = parse_place(option, text, now_ns, words)
    if isinstance(place, int) and (len(patterns) != 1 or not Pattern(patterns[0]).is_literal):
        raise ClientFault(
            f"{option} {place} is an offset, which needs one topic, not "
            f"{' '.join(patterns) or 'none'}; a time or an age such as 2h goes with several"
        )
    return ("time", place.time_ns) if isinstance(place, Time) else place


def parse_cursor_place(text: str) -> tuple[tuple[str, int], int]:
    """Parse `TOPIC=OFFSET` or `TOPIC:PARTITION=OFFSET`. The name of a topic may contain `=` and `:`."""
    place, equals, offset = text.rpartition("=")
    if not equals or not place or not re.fullmatch(r"\d+", offset):
        raise ClientFault(
            f"{text!r}: write TOPIC=OFFSET or TOPIC:PARTITION=OFFSET, such as sensors/a:0=17"
        )
    topic, colon, partition = place.rpartition(":")
    if colon and topic and re.fullmatch(r"\d+", partition):
        return (topic, int(partition)), _offset(text, offset)
    return (place, 0), _offset(text, offset)


def _offset(option: str, digits: str) -> int:
    offset = int(digits)
    if not 1 <= offset <= _OFFSET_MAX:
        raise ClientFault(f"{option}: {digits} is no offset; messages are numbered from 1 on")
    return offset
