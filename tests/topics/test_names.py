"""What topics, cursors, producers, subscriptions and journals may be called."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import InvalidNameError
from runnel.topics.names import (
    Label,
    check_label,
    check_topic,
    dead_letter_topic,
    is_dead_letter,
    is_system,
)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "sensors/a",
        "/",
        " ",
        "..",
        "a\\b",
        "*",
        "[x]",
        "grüße/温度/🌡",
        "!system/top",
        "\xa0",
        "e\u0301",
    ],
)
def test_any_printable_text_can_be_a_topic(name: str) -> None:
    check_topic(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InvalidNameError, match="topic name is empty"):
        check_topic("")


def test_length_is_counted_in_bytes_of_utf_8() -> None:
    check_topic("x" * 255)
    check_topic("é" * 127 + "x")
    for name in ("x" * 256, "é" * 128, "🌡" * 64, "x" * 1_000_000):
        with pytest.raises(InvalidNameError, match="longer than 255 bytes") as caught:
            check_topic(name)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "what", "where"),
    [
        ("\x00", "control character U+0000", 1),
        ("ab\ncd", "control character U+000A", 3),
        ("ab\x7f", "control character U+007F", 3),
        ("\x85", "control character U+0085", 1),
        ("a\u2028b", "line separator U+2028", 2),
        ("a\u2029b", "line separator U+2029", 2),
        ("a\ud800b", "lone surrogate U+D800", 2),
        ("a\udfff", "lone surrogate U+DFFF", 2),
    ],
)
def test_a_forbidden_character_is_named_with_its_place(name: str, what: str, where: int) -> None:
    with pytest.raises(InvalidNameError) as caught:
        check_topic(name)
    text = str(caught.value)
    assert what in text
    assert f"at character {where}" in text
    assert text.isprintable()


@given(st.text(min_size=1, max_size=60))
def test_exactly_controls_and_line_separators_are_refused(name: str) -> None:
    allowed = all(unicodedata.category(c) not in {"Cc", "Zl", "Zp"} for c in name)
    try:
        check_topic(name)
    except InvalidNameError:
        assert not allowed
    else:
        assert allowed


def test_system_names_begin_with_an_exclamation_mark() -> None:
    assert is_system("!system/top")
    assert not is_system("system!")
    assert is_dead_letter("!dead/billing")
    assert not is_dead_letter("!dead")


@pytest.mark.parametrize("kind", list(Label))
def test_labels_follow_the_rules_of_topics(kind: Label) -> None:
    check_label(kind, "Spark/checkpoint 7 ü")
    for name in ("", "a\nb", "x" * 256):
        with pytest.raises(InvalidNameError, match=f"{kind} name"):
            check_label(kind, name)


def test_a_subscription_leaves_room_for_its_dead_letter_topic() -> None:
    check_label(Label.SUBSCRIPTION, "s" * 249)
    check_topic(dead_letter_topic("s" * 249))
    with pytest.raises(InvalidNameError, match="longer than 249 bytes"):
        check_label(Label.SUBSCRIPTION, "s" * 250)


def test_no_journal_is_called_live() -> None:
    check_label(Label.CURSOR, "live")
    with pytest.raises(InvalidNameError, match="reserved"):
        check_label(Label.JOURNAL, "live")
