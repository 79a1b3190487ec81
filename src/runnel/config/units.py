"""Parses and formats sizes, durations and times of day; exact in both directions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_SIZE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE_UNITS_FOLDED: Final = {unit.lower(): size for unit, size in _SIZE_UNITS.items()}
# Largest first, so that the shortest exact spelling is found first.
_SIZE_UNITS_TO_WRITE: Final = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB")

_DURATION_UNITS_NS: Final[dict[str, int]] = {
    "w": 7 * 86_400 * 10**9,
    "d": 86_400 * 10**9,
    "h": 3600 * 10**9,
    "m": 60 * 10**9,
    "s": 10**9,
    "ms": 10**6,
    "us": 10**3,
    "µs": 10**3,
    "ns": 1,
}
_DURATION_UNITS_TO_WRITE: Final = ("d", "h", "m", "s", "ms", "us", "ns")

_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_SIZE: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)")
_DURATION: Final = re.compile(rf"(?:{_NUMBER} ?[a-zµ]+ ?)+")
_DURATION_PART: Final = re.compile(rf"({_NUMBER}) ?([a-zµ]+)")
_TIME_OF_DAY: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_UTC_OFFSET: Final = re.compile(r"[+-][0-9]{1,2}:[0-9]{2}")

# Longer than any sensible value, and short enough that arithmetic on it costs nothing.
_TEXT_CHARS_MAX: Final = 64

SIZE_HINT: Final = 'write a number and a unit, such as "256MiB" or "10MB", or a number of bytes'
DURATION_HINT: Final = 'write numbers and units, such as "7d", "1h30m" or "500ms"'
TIME_OF_DAY_HINT: Final = 'write the UTC time of day as "HH:MM", such as "00:00" or "05:30"'


def parse_size(text: str) -> int:
    """The bytes of `256MiB`, `1.5GiB`, `10MB` or `4096`. ValueError says what is wrong."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _TEXT_CHARS_MAX else None
    if match is None:
        raise ValueError(f"not a size; {SIZE_HINT}")
    number, unit = match.groups()
    factor = _SIZE_UNITS_FOLDED.get(unit.lower())
    if factor is None:
        if unit.lower() in ("k", "m", "g", "t"):
            # Some people mean 1000 and some 1024, so ask rather than guess.
            prefix = "k" if unit in "kK" else unit.upper()
            raise ValueError(
                f'"{unit}" could be 1000 or 1024 based; '
                f'write "{number}{unit.upper()}iB" or "{number}{prefix}B"'
            )
        known = ", ".join(name for name in _SIZE_UNITS if name)
        raise ValueError(f'"{unit}" is not a unit of size; use one of {known}')
    return _whole(Fraction(number) * factor, "bytes")


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling, which `parse_size` reads back to the same number."""
    for unit in _SIZE_UNITS_TO_WRITE:
        whole, rest = divmod(size_bytes, _SIZE_UNITS[unit])
        if whole and not rest:
            return f"{whole}{unit}"
    return f"{size_bytes}B"


def parse_duration(text: str) -> int:
    """The nanoseconds of `7d`, `1h30m`, `1.5s` or `500ms`. ValueError says what is wrong."""
    stripped = text.strip()
    if len(text) > _TEXT_CHARS_MAX or not _DURATION.fullmatch(stripped):
        if re.fullmatch(_NUMBER, stripped):
            raise ValueError(f'a duration needs a unit; write "{stripped}s" if seconds are meant')
        raise ValueError(f"not a duration; {DURATION_HINT}")
    total = Fraction(0)
    smallest_ns: int | None = None
    for number, unit in _DURATION_PART.findall(stripped):
        unit_ns = _DURATION_UNITS_NS.get(unit)
        if unit_ns is None:
            known = ", ".join(_DURATION_UNITS_NS)
            raise ValueError(f'"{unit}" is not a unit of time; use one of {known}')
        # Requiring descending units catches the typo "1m30h", and a repeated unit.
        if smallest_ns is not None and unit_ns >= smallest_ns:
            raise ValueError('units must go from large to small, each once, as in "1h30m"')
        smallest_ns = unit_ns
        total += Fraction(number) * unit_ns
    return _whole(total, "nanoseconds")


def format_duration(duration_ns: int) -> str:
    """The shortest exact spelling, which `parse_duration` reads back to the same number."""
    parts = []
    rest_ns = duration_ns
    for unit in _DURATION_UNITS_TO_WRITE:
        whole, rest_ns = divmod(rest_ns, _DURATION_UNITS_NS[unit])
        if whole:
            parts.append(f"{whole}{unit}")
    return "".join(parts) or "0s"


def parse_time_of_day(text: str) -> int:
    """The nanoseconds after UTC midnight of `05:30`. ValueError says what is wrong."""
    match = _TIME_OF_DAY.fullmatch(text.strip())
    if match is None:
        if _UTC_OFFSET.fullmatch(text.strip()):
            # Some people read "-05:30" as a zone, others as "before midnight".
            raise ValueError(
                'not a time of day; a cut at midnight in UTC-05:30 is written "05:30", '
                'in UTC+05:30 "18:30"'
            )
        raise ValueError(f"not a time of day; {TIME_OF_DAY_HINT}")
    hours, minutes = (int(part) for part in match.groups())
    return hours * _DURATION_UNITS_NS["h"] + minutes * _DURATION_UNITS_NS["m"]


def format_time_of_day(time_ns: int) -> str:
    """`HH:MM` of a whole minute."""
    minutes = time_ns // _DURATION_UNITS_NS["m"]
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _whole(amount: Fraction, unit: str) -> int:
    if amount.denominator != 1:
        raise ValueError(f"not a whole number of {unit}; write it with a smaller unit")
    return amount.numerator
