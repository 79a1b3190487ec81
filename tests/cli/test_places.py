"""Start positions and cursor positions as people write them."""

from __future__ import annotations

import pytest

from runnel.cli.places import (
    STARTS,
    Place,
    Start,
    Time,
    parse_cursor_place,
    parse_place,
    parse_start,
)
from runnel.errors import ClientFault

NOW_NS = 1_700_000_000 * 10**9


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("latest", "latest"),
        ("last", "last"),
        ("earliest", "earliest"),
        ("17", 17),
        (" 17 ", 17),
        ("1700000000000000000", 1_700_000_000_000_000_000),
        ("2h", Time(NOW_NS - 7200 * 10**9)),
        ("2023-11-14T22:13:20.000000001Z", Time(NOW_NS + 1)),
    ],
)
def test_place_is_a_word_an_offset_or_a_time(text: str, place: Place) -> None:
    assert parse_place("--from", text, NOW_NS) == place


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0", "--from: 0 is no offset; messages are numbered from 1 on"),
        ("-1", "--from: -1 is no offset; messages are numbered from 1 on"),
        ("99999999999999999999", "is no offset"),
        ("begining", "is no place to begin; write latest, last, earliest, an offset such as 17"),
        ("", "is no place to begin"),
        ("2023-13-01", "is not a time: month must be in 1..12"),
    ],
)
def test_what_is_no_place_is_refused_with_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ClientFault) as caught:
        parse_place("--from", text, NOW_NS)
    assert problem in str(caught.value)


def test_only_the_words_of_the_command_are_places() -> None:
    with pytest.raises(ClientFault, match="write earliest, an offset"):
        parse_place("--from", "last", NOW_NS, ("earliest",))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a=5", (("a", 0), 5)),
        ("a:3=5", (("a", 3), 5)),
        ("a:b=5", (("a:b", 0), 5)),
        ("a=b:1=5", (("a=b", 1), 5)),
        (":1=5", ((":1", 0), 5)),
    ],
)
def test_cursor_place_names_topic_partition_and_offset(
    text: str, place: tuple[tuple[str, int], int]
) -> None:
    assert parse_cursor_place(text) == place


@pytest.mark.parametrize("text", ["a", "=5", "a=", "a=x", "a:1", "a=-1"])
def test_what_is_no_cursor_place_is_refused(text: str) -> None:
    with pytest.raises(ClientFault, match="write TOPIC=OFFSET or TOPIC:PARTITION=OFFSET"):
        parse_cursor_place(text)


@pytest.mark.parametrize(
    ("text", "patterns", "start"),
    [
        ("latest", (), "latest"),
        ("17", ("a",), 17),
        ("2h", ("a*", "b"), ("time", NOW_NS - 7200 * 10**9)),
    ],
)
def test_start_is_what_the_client_takes(text: str, patterns: tuple[str, ...], start: Start) -> None:
    assert parse_start("--start", text, patterns, NOW_NS, STARTS) == start


@pytest.mark.parametrize(
    ("patterns", "named"), [((), "none"), (("a*",), r"a\*"), (("a", "b"), "a b")]
)
def test_offset_needs_one_topic(patterns: tuple[str, ...], named: str) -> None:
    with pytest.raises(ClientFault, match=f"--start 17 is an offset, .* not {named};"):
        parse_start("--start", "17", patterns, NOW_NS, STARTS)
