"""What people write by habit, and what it means here."""

from __future__ import annotations

import pytest

from runnel.topics.hints import glob_hint, glob_meant, level_meant, start_meant


@pytest.mark.parametrize(
    ("pattern", "glob"),
    [
        ("sensors/#", "sensors/*"),
        ("#", "*"),
        ("sensors/+/celsius", "sensors/*/celsius"),
        ("+/+", "*/*"),
        ("orders.>", "orders.*"),
        (">", "*"),
        ("a/*/#", "a/*/*"),
        ("sensors/*", None),
        ("sensors/a", None),
        ("issue/#17", None),
        ("c++", None),
        ("a/b>c", None),
    ],
)
def test_wildcard_of_another_broker_has_a_glob(pattern: str, glob: str | None) -> None:
    assert glob_meant(pattern) == glob


def test_hint_says_what_stands_for_itself_and_what_was_meant() -> None:
    assert glob_hint("a/+/#", "a/*/*") == (
        "no topic has this name, and # and + stand for themselves in a pattern; did you mean 'a/*/*'?"
    )


def test_words_of_other_brokers_are_known() -> None:
    assert [level_meant(word) for word in ("fsync", "FSYNC", "0", "often", 7)] == [
        "stored", "stored", "none", None, None,
    ]  # fmt: skip
    assert [start_meant(word) for word in ("beginning", "newest", "retained", "x", None)] == [
        "earliest", "latest", "last", None, None,
    ]  # fmt: skip
