"""Times on the command line: every way to write one, exact in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cli.render.times import format_time, parse_time
from runnel.errors import ClientFault

NOW_NS = 1_700_000_000 * 10**9


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("2023-11-14T22:13:20Z", NOW_NS),
        ("2023-11-14t22:13:20z", NOW_NS),
        ("2023-11-14 22:13:20", NOW_NS),
        ("2023-11-14T23:13:20+01:00", NOW_NS),
        ("2023-11-14T22:13:20.000000001Z", NOW_NS + 1),
        ("2023-11-14T22:13:20.5Z", NOW_NS + 500_000_000),
        ("2023-11-14T22:13Z", NOW_NS - 20 * 10**9),
        ("2023-11-14", NOW_NS - NOW_NS % (86_400 * 10**9)),
        ("1969-12-31T23:59:59.999999999Z", -1),
        ("2h", NOW_NS - 7200 * 10**9),
        ("1h30m", NOW_NS - 5400 * 10**9),
        ("1700000000000000001", NOW_NS + 1),
        ("-5", -5),
    ],
)
def test_time_is_read_as_people_write_it(text: str, time_ns: int) -> None:
    assert parse_time("--since", text, NOW_NS) == time_ns


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("yesterday", "is not a time; write"),
        ("2023-13-01", "is not a time: month must be in 1..12"),
        ("2023-11-14T25:00Z", "is not a time: hour must be in 0..23"),
        ("5 parsecs", "is not a time; write"),
        ("", "is not a time; write"),
        ("2300-01-01", "does not fit into 64 bits"),
        ("9999999999999999999", "does not fit into 64 bits"),
    ],
)
def test_what_is_no_time_is_refused_with_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ClientFault) as caught:
        parse_time("--since", text, NOW_NS)
    assert str(caught.value).startswith(f"--since: {text!r} ")
    assert problem in str(caught.value)


@given(st.integers(-(2**63), 2**63 - 1))
def test_written_time_reads_back_exactly(time_ns: int) -> None:
    assert parse_time("--since", format_time(time_ns), NOW_NS) == time_ns
