"""What a replay may be asked, and where its topics go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from runnel.cli.main import run
from runnel.errors import ClientFault, InvalidNameError
from runnel.spark.pipelines.replay.options import OffsetRange, check_options, differences
from runnel.spark.pipelines.replay.rename_rules import RenameRules


@pytest.mark.parametrize(
    ("rules", "topic", "renamed"),
    [
        ({}, "sensors/a", "sensors/a"),
        ({"sensors/a": "copy"}, "sensors/a", "copy"),
        ({"sensors/a": "copy"}, "sensors/ab", "sensors/ab"),
        (["sensors/*=replayed/sensors/*"], "sensors/a/b", "replayed/sensors/a/b"),
        (["sensors/*=replayed/*"], "sensors/", "replayed/"),
        (["*/raw=*/again"], "a/b/raw", "a/b/again"),
        (["aa*aa=x*"], "aaa", "aaa"),  # the two ends may not share a character
        (["a*=all"], "abc", "all"),
        (["a=1", "a=2", "*=other/*"], "a", "1"),
        (["a=1", "a=2", "*=other/*"], "b", "other/b"),
        (["*=copy/*"], "!dead/billing", "!dead/billing"),
        (["!dead/*=again/*"], "!dead/billing", "again/billing"),
        ({"a?[b]": "c"}, "a?[b]", "c"),  # only a star means something else than itself
        ({"a=b": "c=d"}, "a=b", "c=d"),
    ],
)
def test_the_first_rule_about_a_topic_renames_it(
    rules: Mapping[str, str] | Iterable[str], topic: str, renamed: str
) -> None:
    assert RenameRules.make(rules).of(topic) == renamed


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("sensors", "write FROM=TO"),
        ("a=b=c", "from Python alone"),
        ("=b", "topic name is empty"),
        ("a=", "new name is empty"),
        ("a=b*", "has a \\* for which 'a' has nothing"),
        ("a*=*b*", "more than one \\*"),
        ("a\n=b", "control character"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_right(rule: str, problem: str) -> None:
    with pytest.raises(ClientFault, match=problem):
        RenameRules.make([rule])


def test_a_name_that_becomes_too_long_is_reported() -> None:
    with pytest.raises(ClientFault, match=r"rename \*=long/\*: .* longer than 255 bytes"):
        RenameRules.make(["*=long/*"]).of("x" * 254)


def test_times_and_offsets_are_understood() -> None:
    options = check_options(
        since="2025-01-31T12:00:00.000000007Z",
        until=datetime(2025, 2, 1, tzinfo=UTC),
        offsets={("b", 1): range(17, 41), ("a", 0): range(1, 2**63)},
    )
    assert options.since_ns == 1_738_324_800_000_000_007
    assert options.until_ns == 1_738_368_000_000_000_000
    assert options.offsets == (OffsetRange("a", 0), OffsetRange("b", 1, 17, 41))
    assert options.pattern == "*"
    assert options.url == options.into_url


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"speed": 1, "rate": 10}, "not both"),
        ({"speed": 0}, "speed is 0: it must be a number above 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"gap_max_s": 5}, "it goes with speed"),
        ({"gap_max_s": 0, "speed": 1}, "at least 0.001 s"),
        ({"since": "yesterday"}, "since is 'yesterday': it must be a time as 2025"),
        ({"since": "2025-02-01", "until": "2025-01-01"}, "is not after"),
        ({"archive": "a", "path": "b"}, "archive or path, not both"),
        ({"topics": "a", "pattern": "b"}, "topics or pattern, not both"),
        ({"topics": ["a,b"]}, "has a comma"),
        ({"offsets": {("a", 0): range(9, 3)}}, r"offsets of a\[0\] are range\(9, 3\)"),
        ({"url": "http://x"}, "is not a Runnel URL"),
        ({"into_url": "http://x"}, "is not a Runnel URL"),
    ],
)
def test_wrong_options_are_refused_with_what_is_right(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ClientFault, match=problem):
        check_options(**wrong)


def test_a_wrong_pattern_is_refused() -> None:
    with pytest.raises(InvalidNameError):
        check_options(pattern="[")


def test_what_differs_between_two_replays_is_named() -> None:
    one = check_options(topics="a", speed=2, rename=["*=b/*"])
    other = check_options(topics="a", speed=3)
    assert differences(one, one) == []
    assert differences(one, other) == [
        "rename was ['*=b/*'], and is not given",
        "speed was 2.0, and is 3.0",
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--offsets", "a=1"], "write TOPIC:PARTITION=FIRST..LAST"),
        (["--offsets", "a:0=9..3"], "such as sensors/a:0=17..40"),
        (["--speed", "1", "--rate", "5"], "not both"),
        (["--gap-max", "soon", "--speed", "1"], "--gap-max 'soon'"),
        (["--tag", "unit"], "write it as NAME=VALUE"),
        (["--rename", "a"], "write FROM=TO"),
    ],
)
def test_the_command_refuses_wrong_flags_before_spark_starts(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pipeline", "replay", *arguments]) == 2
    assert problem in capsys.readouterr().err
