"""Parses and formats values of queries and headers: durations, times, offsets."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Final, Literal, TypeAlias

from litestar.params import QueryParameter
from msgspec import UNSET, Meta, UnsetType

from runnel.config import parse_duration
from runnel.protocols.http.encoding.problems import FieldFault

_NS_PER_SECOND: Final = 1_000_000_000
INT64_MAX: Final = 2**63 - 1
_SECONDS: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
_NANOSECONDS: Final = re.compile(r"-?[0-9]{1,19}")
_OFFSET: Final = re.compile(r"[0-9]{1,19}")
_RFC_3339: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?([Zz]|[+-]\d{2}:\d{2})",
    re.ASCII,
)
# Parameters of lists in order of names.
After: TypeAlias = Annotated[str, QueryParameter(description="Only names after this one.")]
PageLimit: TypeAlias = Annotated[
    int,
    QueryParameter(
        ge=0,
        le=10_000,
        description="Maximum number per page; a page has 1,000 or fewer. 0: all, or an error if they are too many "
        "for one answer.",
    ),
]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Duration: TypeAlias = Annotated[str, Meta(examples=["5", "0.5", "500ms", "1h30m"])]
Time: TypeAlias = Annotated[str, Meta(examples=["2026-01-31T12:00:00.25Z", "1769860800000000000"])]

Offset: TypeAlias = Annotated[str, Meta(examples=["17", "last"])]
LAST: Final = "last"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@lru_cache(maxsize=64)  # clients that poll send the same durations
def duration_ns(field: str, text: str | None, default_ns: int = 0) -> int:
    """Nanoseconds of `5`, `0.5` (seconds), `500ms` or `1h30m`."""
    if text is None:
        return default_ns
    try:
        if _SECONDS.fullmatch(text):
            whole, _, fraction = text.partition(".")
            duration = int(whole) * _NS_PER_SECOND + int(fraction.ljust(9, "0"))
        else:
            duration = parse_duration(text)
    except ValueError as error:
        raise FieldFault(field, f"{text[:64]!r} is {error}; or a number of seconds") from None
    if duration > INT64_MAX:
        raise FieldFault(field, f"{text[:64]!r} is longer than any time that can be kept")
    return duration


def time_ns(field: str, given: str | int) -> int:
    """Nanoseconds since 1970, given as `2026-01-31T12:00:00.25Z` or as nanoseconds."""
    if isinstance(given, int):
        return _in_64_bits(field, given)
    if _NANOSECONDS.fullmatch(given):
        return _in_64_bits(field, int(given))
    parts = _RFC_3339.fullmatch(given)
    if parts is None:
        raise FieldFault(
            field,
            f"{given[:64]!r} is no time; write RFC 3339 with a zone, as 2026-01-31T12:00:00.25Z, or nanoseconds "
            "since 1970",
        )
    day, clock, fraction, zone = parts.groups()
    zone = "+00:00" if zone in "Zz" else zone
    try:
        # A leap second counts as the first second of the next minute, as in clocks without leap seconds.
        is_leap = clock.endswith(":60")
        moment = datetime.fromisoformat(f"{day}T{clock[:-2] + '59' if is_leap else clock}{zone}")
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise FieldFault(field, f"{given!r} is no time: {error}") from None
    seconds = since.days * 86_400 + since.seconds + is_leap
    return _in_64_bits(
        field, seconds * _NS_PER_SECOND + (0 if is_leap else int((fraction or "").ljust(9, "0")))
    )


def offset_of(field: str, text: str | None) -> int | Literal["last"] | None:
    """An offset as a number, or `last`; None if it is not given."""
    if text is None or text == LAST:
        return text  # type: ignore[return-value]
    if not _OFFSET.fullmatch(text) or int(text) > INT64_MAX:
        raise FieldFault(
            field,
            f"{text[:64]!r} is no offset; write a number that is >= 0, such as 17, or last for the last message, or "
            "leave it out for the first message there is; time= begins at a time",
        )
    return int(text)


def time_text(time_ns: int) -> str:
    """RFC 3339 in UTC with nanoseconds. Hot: up to three times per message, mostly in the same second."""
    seconds, rest_ns = divmod(time_ns, _NS_PER_SECOND)
    return f"{_second_text(seconds)}.{rest_ns:09}Z"


def time_text_if_set(time_ns: int) -> str | UnsetType:
    """The same, but UNSET for 0, which means that the time was not given."""
    return time_text(time_ns) if time_ns else UNSET


@lru_cache(maxsize=1024)
def _second_text(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).isoformat()[:19]


def _in_64_bits(field: str, time: int) -> int:
    if not -INT64_MAX <= time <= INT64_MAX:
        raise FieldFault(field, f"{time} ns since 1970 is beyond 64 bits")
    return time
