"""One pattern covers another: never wrongly, in the usual cases rightly, and soon."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runnel.topics.covering import Cover, covers
from runnel.topics.patterns import Pattern
from tests.topics.naive import naive_matches

PIECES = ["a", "b", "/", "!", "-", "*", "*", "?", "[ab]", "[!a]", "[a-b]", "[*]", "[!-]", "[!!]"]
patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
names = st.text("ab/!-*", min_size=1, max_size=6)

SECONDS_MAX = 0.5


@given(wide=patterns, narrow=patterns, tried=st.lists(names, min_size=1, max_size=30))
@example(wide="*", narrow="!*", tried=["!a"])
@example(wide="?*", narrow="*", tried=["!", "a"])
@example(wide="[!a]*", narrow="!*", tried=["!a"])
@example(wide="a*a", narrow="a*", tried=["a"])
@example(wide="*?*", narrow="**", tried=["a"])
def test_what_is_covered_matches_nothing_that_the_other_does_not(
    wide: str, narrow: str, tried: list[str]
) -> None:
    if covers(Pattern(wide), Pattern(narrow)):
        for name in tried:
            assert not naive_matches(narrow, name) or naive_matches(wide, name)


@given(patterns)
def test_every_pattern_covers_itself(text: str) -> None:
    assert covers(Pattern(text), Pattern(text))


@given(wide=patterns, name=names.filter(lambda text: not set(text) & set("*?[")))
def test_a_name_is_covered_if_it_is_matched(wide: str, name: str) -> None:
    assert covers(Pattern(wide), Pattern(name)) is Pattern(wide).matches(name)


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("*", "*"),
        ("*", "**"),
        ("**", "*"),
        ("*", "sensors/*"),
        ("*", "[a-z]?/*"),
        ("sensors/*", "sensors/a"),
        ("sensors/*", "sensors/a/*"),
        ("sensors/*", "sensors/*/temperature"),
        ("sensors/*", "sensors/?"),
        ("*/temperature", "sensors/*/temperature"),
        ("*a*b*", "xa*yb"),
        ("?", "[a-z]"),
        ("[a-z]", "[b-d]"),
        ("[!x]*", "[a-c]*"),
        ("[!x]", "[!w-y]"),
        ("!system/*", "!system/metrics/*"),
        ("!*", "!dead/*"),
        ("a[*]", "a[*]"),
    ],
)
def test_usual_cases_are_covered(wide: str, narrow: str) -> None:
    assert covers(Pattern(wide), Pattern(narrow))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("sensors/*", "*"),
        ("sensors/*", "sensors*"),
        ("sensors/*", "[s]ensor?/*"),
        ("sensors/*", "?ensors/*"),
        ("sensors/a", "sensors/[a-b]"),
        ("sensors/?", "sensors/*"),
        ("sensors/?", "sensors/??"),
        ("*", "!dead/a"),
        ("*", "!*"),
        ("?dead/*", "!dead/*"),
        ("[!a]*", "!dead/*"),
        ("!dead/*", "!*"),
        ("!*", "*"),
        ("[a-c]", "[a-d]"),
        ("[!x]", "?"),
        ("[!x]", "[!y]"),
        ("a*b", "a*"),
        ("a*b", "a*b*"),
    ],
)
def test_pattern_tricks_are_not(wide: str, narrow: str) -> None:
    assert not covers(Pattern(wide), Pattern(narrow))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("*a" * 127, "*a" * 127),
        ("*a" * 127, "*a" * 126 + "*b"),
        ("*" * 255, "*" * 255),
        ("*?" * 127, "?*" * 127),
        ("*[a-c]" * 42, "[a-b]*" * 42),
        ("*", "[" + "ab" * 120 + "]*"),
        ("*" + "[!" + "xy" * 60 + "]*" * 2, "[" + "ab" * 120 + "]*"),
    ],
)
def test_no_pattern_takes_long(wide: str, narrow: str) -> None:
    cover, compared = Cover(Pattern(wide)), Pattern(narrow)
    begin = time.perf_counter()
    for _ in range(20):
        cover.covers(compared)
    assert time.perf_counter() - begin < SECONDS_MAX
