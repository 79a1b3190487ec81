"""Options of reads: what is understood, and errors that say what would be right."""

from __future__ import annotations

import pytest

from runnel.errors import ClientFault
from runnel.spark.options import (
    BYTES_PER_PARTITION,
    EARLIEST,
    LATEST,
    BoundKind,
    ReadBound,
    ReadOptions,
    batch_options,
    literal,
    parse_time_ns,
    stream_options,
)
from runnel.topics.patterns import Pattern

URL = "runnel://127.0.0.1:7470"
NOON_NS = 1_738_324_800 * 10**9


def batch(**options: str) -> ReadOptions:
    return batch_options({"topics": "a", **options}, url=URL)


def stream(**options: str) -> ReadOptions:
    return stream_options({"topics": "a", **options}, url=URL)


def test_defaults_read_everything_there_is() -> None:
    options = batch()
    assert (options.url, options.path, options.topics) == (URL, None, ("a",))
    assert (options.starting.default, options.ending.default) == (EARLIEST, LATEST)
    assert options.bytes_per_partition == BYTES_PER_PARTITION
    assert options.fails_on_data_loss


def test_a_stream_begins_with_what_comes_unless_told_otherwise() -> None:
    assert stream().starting.default == LATEST
    assert stream(startingOffsets="earliest").starting.default == EARLIEST
    assert stream(startingTime=str(NOON_NS)).starting.default == ReadBound(BoundKind.TIME, NOON_NS)


def test_names_of_options_have_no_case() -> None:
    options = batch_options(
        {"TOPICS": "a, b", "FailOnDataLoss": "FALSE", "bytesperpartition": "64k"}, url=URL
    )
    assert options.topics == ("a", "b")
    assert not options.fails_on_data_loss
    assert options.bytes_per_partition == 65_536


def test_places_are_chosen_by_partition_then_topic_then_for_all() -> None:
    places = batch(topics="a,b", startingOffsets='{"a": {"1": 17, "0": "latest"}, "b": 5}').starting
    assert places.of("a", 1) == ReadBound(BoundKind.OFFSET, 17)
    assert places.of("a", 0) == LATEST
    assert places.of("a", 2) == EARLIEST
    assert places.of("b", 3) == ReadBound(BoundKind.OFFSET, 5)


def test_times_are_chosen_by_topic() -> None:
    places = batch(endingTime=f'{{"a": "2025-01-31T12:00:00Z", "b": {NOON_NS + 1}}}', topics="a,b")
    assert places.ending.of("a", 0) == ReadBound(BoundKind.TIME, NOON_NS)
    assert places.ending.of("b", 0) == ReadBound(BoundKind.TIME, NOON_NS + 1)


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("2025-01-31T12:00:00Z", NOON_NS),
        ("2025-01-31 12:00", NOON_NS),
        ("2025-01-31T13:00:00.000000001+01:00", NOON_NS + 1),
        ("1969-12-31T23:59:59.5Z", -500_000_000),
        (str(NOON_NS), NOON_NS),
        ("noon", None),
        ("17", None),
    ],
)
def test_times_are_read_to_the_nanosecond(text: str, time_ns: int | None) -> None:
    assert parse_time_ns(text) == time_ns


def test_tags_come_one_by_one_or_as_json_that_keeps_their_case() -> None:
    options = batch_options({"topics": "a", "tag.unit": "C", "tags": '{"Site": "N"}'}, url=URL)
    assert options.tags == {"unit": "C", "Site": "N"}


@pytest.mark.parametrize("name", ["plain", "a*b?c", "[x]", "!dead/*"])
def test_a_name_as_a_pattern_matches_only_itself(name: str) -> None:
    pattern = Pattern(literal(name))
    assert pattern.matches(name)
    assert not pattern.matches(name.replace("*", "star") + "x")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "a", "startingOfsets": "earliest"}, "did you mean startingOffsets"),
        ({}, "which topics"),
        ({"topics": "a", "pattern": "*"}, "not both"),
        ({"topics": "a,,b"}, "option topics is 'a,,b'"),
        ({"pattern": "[a"}, "option pattern is '\\[a'"),
        ({"topics": "a", "path": "/data", "url": URL}, "without a broker"),
        ({"topics": "a", "startingOffsets": "17"}, "earliest, latest, or JSON"),
        ({"topics": "a", "startingOffsets": '{"a": 0}'}, "offsets begin at 1"),
        ({"topics": "a", "startingOffsets": '{"a": {"x": 1}}'}, "'a': it must be"),
        ({"topics": "a", "startingOffsets": '{"a"'}, "option startingOffsets"),
        (
            {"topics": "a", "startingOffsets": "first"},
            "earliest, latest, or JSON.*did you mean earliest",
        ),
        ({"topics": "a", "endingOffsets": '{"b": 1}'}, "'b' is not among the topics a"),
        ({"topics": "a", "startingTime": "noon"}, "2025-01-31T12:00:00Z"),
        (
            {"topics": "a", "startingTime": "2025-01-31", "startingOffsets": "latest"},
            "not both",
        ),
        ({"topics": "a", "bytesPerPartition": "0"}, "from 1 on"),
        ({"topics": "a", "failOnDataLoss": "perhaps"}, "true or false"),
        ({"topics": "a", "tags": "unit=C"}, "must be JSON"),
        ({"topics": "a", "cursor": "mine"}, "'cursor' is not one of spark.read"),
    ],
)
def test_errors_name_the_option_and_what_would_be_right(options: dict[str, str], text: str) -> None:
    with pytest.raises(ClientFault, match=text):
        batch_options(options, url=URL)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": "/data"}, "read from a broker"),
        ({"endingOffsets": "latest"}, "no end"),
        ({"startingOffsets": '{"a": 1}'}, "earliest, latest or one startingTime"),
        ({"maxRowsPerTrigger": "-1"}, "from 1 on"),
        ({"cursor": "a\nb"}, "option cursor"),
    ],
)
def test_what_a_stream_cannot_do_is_said(options: dict[str, str], text: str) -> None:
    with pytest.raises(ClientFault, match=text):
        stream_options({"topics": "a", **options}, url=URL)
