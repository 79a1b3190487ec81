"""Sizes, durations and times of day: what is read, what is refused, and exact round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.config import (
    format_duration,
    format_size,
    format_time_of_day,
    parse_duration,
    parse_size,
    parse_time_of_day,
)

INT64 = st.integers(min_value=0, max_value=2**63 - 1)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("256MiB", 256 * 2**20),
        ("256 MiB", 256 * 2**20),
        ("256mib", 256 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("10MB", 10_000_000),
        ("2kB", 2000),
        ("2KB", 2000),
        ("2TiB", 2**41),
        (" 1KiB ", 1024),
    ],
)
def test_size_is_read_as_people_write_it(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a size; write a number and a unit"),
        ("MiB", "not a size"),
        ("-1MiB", "not a size"),
        ("1e6", "not a size"),
        ("1_000", "not a size"),
        ("1,5GiB", "not a size"),
        ("٣MiB", "not a size"),
        ("1" * 65, "not a size"),
        ("256M", '"M" could be 1000 or 1024 based; write "256MiB" or "256MB"'),
        ("8k", '"k" could be 1000 or 1024 based; write "8KiB" or "8kB"'),
        ("5parsec", '"parsec" is not a unit of size; use one of B, kB, MB'),
        ("0.3KiB", "not a whole number of bytes"),
    ],
)
def test_wrong_size_is_refused_with_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_size(text)
    assert problem in str(refused.value)


@given(INT64)
def test_every_size_survives_writing_and_reading(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (1, "1B"), (1024, "1KiB"), (1536, "1536B"), (10**7, "10MB"), (2**28, "256MiB")],
)
def test_size_is_written_with_the_largest_exact_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("0s", 0),
        ("7d", 7 * 86_400 * 10**9),
        ("1w", 7 * 86_400 * 10**9),
        ("500ms", 500 * 10**6),
        ("1h30m", 5400 * 10**9),
        ("1h 30m", 5400 * 10**9),
        ("1.5h", 5400 * 10**9),
        ("10 s", 10 * 10**9),
        ("3us", 3000),
        ("3µs", 3000),
        ("42ns", 42),
    ],
)
def test_duration_is_read_as_people_write_it(text: str, duration_ns: int) -> None:
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a duration; write numbers and units"),
        ("soon", "not a duration"),
        ("-7d", "not a duration"),
        ("7D", "not a duration"),
        ("1s" * 40, "not a duration"),
        ("10", 'a duration needs a unit; write "10s" if seconds are meant'),
        ("3 fortnights", '"fortnights" is not a unit of time; use one of w, d, h, m, s'),
        ("1m30h", "units must go from large to small, each once"),
        ("1m1m", "units must go from large to small, each once"),
        ("0.5ns", "not a whole number of nanoseconds"),
    ],
)
def test_wrong_duration_is_refused_with_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_duration(text)
    assert problem in str(refused.value)


@given(INT64)
def test_every_duration_survives_writing_and_reading(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


def test_duration_is_written_in_falling_units() -> None:
    assert format_duration(7 * 86_400 * 10**9) == "7d"
    assert format_duration(5400 * 10**9) == "1h30m"
    assert format_duration(1_500_000_000) == "1s500ms"
    assert format_duration(0) == "0s"


@given(st.integers(min_value=0, max_value=24 * 60 - 1))
def test_every_minute_of_the_day_survives_writing_and_reading(minute: int) -> None:
    time_ns = minute * 60 * 10**9
    assert parse_time_of_day(format_time_of_day(time_ns)) == time_ns


@pytest.mark.parametrize("text", ["24:00", "12:60", "5:30", "noon", "", "00:00:00"])
def test_wrong_time_of_day_is_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match='write the UTC time of day as "HH:MM"'):
        parse_time_of_day(text)


@pytest.mark.parametrize("text", ["-05:30", "+5:30"])
def test_utc_offset_is_not_mistaken_for_a_time_of_day(text: str) -> None:
    with pytest.raises(ValueError, match='midnight in UTC-05:30 is written "05:30"'):
        parse_time_of_day(text)
