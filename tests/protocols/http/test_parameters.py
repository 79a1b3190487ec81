"""Durations and times as clients write them."""

from __future__ import annotations

import pytest

from runnel.protocols.http.encoding.parameters import duration_ns, time_ns
from runnel.protocols.http.encoding.problems import FieldFault

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("0", 0),
        ("5", 5 * SECOND_NS),
        ("0.5", SECOND_NS // 2),
        ("1.000000001", SECOND_NS + 1),
        ("500ms", SECOND_NS // 2),
        ("1h30m", 5400 * SECOND_NS),
    ],
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, expected_ns: int) -> None:
    assert duration_ns("wait", text) == expected_ns


@pytest.mark.parametrize("text", ["", "-1", "soon", "5 parsecs", "1e9", "9" * 30, "nan", "٣"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(FieldFault, match="wait"):
        duration_ns("wait", text)


@pytest.mark.parametrize(
    ("given", "expected_ns"),
    [
        (7, 7),
        ("7", 7),
        ("-7", -7),
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00.000000001+01:00", 1),
        ("1969-12-31 23:59:59.5z", -SECOND_NS // 2),
        ("2016-12-31T23:59:60Z", 1_483_228_800 * SECOND_NS),
        ("2026-01-31T12:00:00.123456789Z", 1_769_860_800_123_456_789),
    ],
)
def test_a_time_is_rfc_3339_or_nanoseconds(given: str | int, expected_ns: int) -> None:
    assert time_ns("time", given) == expected_ns


@pytest.mark.parametrize(
    "given",
    [
        "",
        "noon",
        "2026-01-31",
        "2026-01-31T12:00:00",
        "2026-02-30T12:00:00Z",
        "2026-01-31T25:00:00Z",
        "9999-12-31T23:59:59Z",
        "0001-01-01T00:00:00+23:59",
        "2026-01-31T12:00:00+99:99",
        2**63,
        str(2**63),
        "9" * 30,
    ],
)
def test_what_is_no_time_is_refused(given: str | int) -> None:
    with pytest.raises(FieldFault, match="time"):
        time_ns("time", given)
