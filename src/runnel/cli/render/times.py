"""Parses times as users write them, and formats times as RFC 3339 with nine decimals."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from runnel.config.units import parse_duration
from runnel.errors import ClientFault

NS_PER_SECOND: Final = 10**9
TIME_FORMS: Final = (
    '"2026-05-01T12:30:00Z", "2026-05-01" (its midnight in UTC), or an age such as "2h" or "7d"'
)
TIME_HINT: Final = f"write {TIME_FORMS}, or nanoseconds since 1970"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATE_TIME: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:[Tt ](\d{2}:\d{2}(?::\d{2})?)(?:\.(\d{1,9}))?(Z|z|[+-]\d{2}:\d{2})?)?"
)


def parse_time(option: str, text: str, now_ns: int) -> int:
    """Parse a time to nanoseconds since 1970. The ClientFault names the option and the valid forms."""
    stripped = text.strip()
    if re.fullmatch(r"-?\d{1,20}", stripped):
        time_ns = int(stripped)
    elif match := _DATE_TIME.fullmatch(stripped):
        time_ns = _date_time_ns(option, text, *match.groups())
    else:
        try:
            time_ns = now_ns - parse_duration(stripped)
        except ValueError:
            raise ClientFault(f"{option}: {text!r} is not a time; {TIME_HINT}") from None
    if not -(2**63) <= time_ns < 2**63:
        raise ClientFault(f"{option}: {text!r} does not fit into 64 bits of nanoseconds")
    return time_ns


def _date_time_ns(
    option: str, text: str, day: str, time: str | None, fraction: str | None, zone: str | None
) -> int:
    """A time without a zone is UTC: a result must not depend on where the command runs."""
    offset = "+00:00" if zone in (None, "Z", "z") else zone
    try:
        moment = datetime.fromisoformat(f"{day}T{time or '00:00'}{offset}")
    except ValueError as error:
        raise ClientFault(f"{option}: {text!r} is not a time: {error}") from None
    since = moment - _EPOCH
    seconds = since.days * 86_400 + since.seconds
    return seconds * NS_PER_SECOND + int((fraction or "").ljust(9, "0"))


def format_time(time_ns: int) -> str:
    """Format a time as RFC 3339 in UTC, exactly."""
    seconds, fraction = divmod(time_ns, NS_PER_SECOND)
    return f"{_second_text(seconds)}.{fraction:09d}Z"


@lru_cache(maxsize=4096)
def _second_text(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
