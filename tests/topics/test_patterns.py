"""Globs: what each sign means, what is refused, and that no pattern takes long."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runnel.errors import InvalidNameError
from runnel.topics.patterns import Pattern, any_of
from tests.topics.naive import naive_matches

CHARACTERS = "ab/!-é*?["
PIECES = ["a", "b", "/", "!", "-", "é", "]", "*", "*", "?", "[ab]", "[!a]", "[a-b]", "[*]", "[?]"]
PIECES += ["[[]", "[-a]", "[!-]", "[!!]", "[a!]", "[!a-é]"]

names = st.text(CHARACTERS + "]", min_size=1, max_size=12)
patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a/b", ["a/b"], ["a/bc", "xa/b", "A/B", "a"]),
        ("a/*", ["a/", "a/b", "a/b/c"], ["a", "b/a/", "A/b"]),
        ("*", ["a", "/", "a/b/c", "a!b"], ["!a"]),
        ("*/temp", ["/temp", "a/temp", "a/b/temp"], ["temp", "a/temps"]),
        ("a*b", ["ab", "a/b", "aab", "abb"], ["a", "b", "aba"]),
        ("a*a", ["aa", "aba"], ["a"]),
        ("*a*a*", ["aa", "xaxax"], ["a", "xax"]),
        ("?", ["a", "é", "温", "🌡", "/"], ["ab", "!"]),
        ("a?c", ["abc", "a/c"], ["ac", "abbc"]),
        ("[a-c]x", ["ax", "bx", "cx"], ["dx", "Ax", "x", "aax"]),
        ("[!a-c]x", ["dx", "/x", "Ax"], ["ax", "x", "!x"]),
        ("x[a-cé-ü_]", ["xb", "xö", "x_"], ["xd", "x-"]),
        ("x[-a]", ["x-", "xa"], ["xb"]),
        ("x[a-]", ["x-", "xa"], ["xb"]),
        ("x[!-]", ["xa"], ["x-"]),
        ("x[^a]", ["x^", "xa"], ["xb"]),
        ("x[a!]", ["x!", "xa"], ["xb"]),
        ("[*]", ["*"], ["a", "[*]"]),
        ("a[?][[]*", ["a?[", "a?[b"], ["ab[", "a?"]),
        ("a]b", ["a]b"], ["ab"]),
        ("a\\*", ["a\\", "a\\b"], ["a*"]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_each_sign_means_what_the_documentation_says(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    compiled = Pattern(pattern)
    assert [name for name in matching + others if compiled.matches(name)] == matching


@pytest.mark.parametrize(
    "pattern", ["*", "?dead/a", "[!a]dead/a", "[a!]dead/a", "*dead*", "[!-~]*"]
)
def test_a_pattern_that_begins_with_a_wildcard_never_sees_system_topics(pattern: str) -> None:
    assert not Pattern(pattern).matches("!dead/a")


@pytest.mark.parametrize("pattern", ["!*", "!dead/*", "!?ead/[a-z]", "!dead/a"])
def test_a_pattern_that_begins_with_a_literal_mark_sees_system_topics(pattern: str) -> None:
    assert Pattern(pattern).matches("!dead/a")
    assert not Pattern(pattern).matches("dead/a")


@pytest.mark.parametrize(
    ("pattern", "problem", "place"),
    [
        ("a/[bc", "not closed", 3),
        ("[", "not closed", 1),
        ("[!", "not closed", 1),
        ("a[]", "empty set", 2),
        ("[]a]", "empty set", 1),
        ("a[!]b", "empty set", 2),
        ("a[z-b]", "b-z would be right", 3),
        ("[a-c-e]", "a `-`", 5),
        ("[ab-]x[a-", "not closed", 7),
    ],
)
def test_a_malformed_set_is_refused_with_its_place(pattern: str, problem: str, place: int) -> None:
    with pytest.raises(InvalidNameError) as caught:
        Pattern(pattern)
    assert problem in str(caught.value)
    assert f"at character {place} " in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "a\nb*", "*\x00", "x" * 256, "é" * 128, "[\ud800]"])
def test_a_pattern_has_the_length_and_characters_of_a_name(pattern: str) -> None:
    with pytest.raises(InvalidNameError, match="pattern"):
        Pattern(pattern)
    assert Pattern("*" * 255).matches("a")


@pytest.mark.parametrize(
    ("pattern", "prefix", "is_literal"),
    [
        ("a/b", "a/b", True),
        ("a/*", "a/", False),
        ("a/?b*", "a/", False),
        ("a/[bc]", "a/", False),
        ("[*]a[?]", "*a?", True),
        ("[x]y*", "xy", False),
        ("*a", "", False),
        ("[!a]b", "", False),
        ("!dead/*", "!dead/", False),
    ],
)
def test_the_literal_beginning_is_known(pattern: str, prefix: str, is_literal: bool) -> None:
    compiled = Pattern(pattern)
    assert (compiled.prefix, compiled.is_literal) == (prefix, is_literal)


@given(patterns, names)
@example("*a*?*b", "aab")
@example("[!a]?*", "!ab")
def test_agrees_with_the_naive_matcher(pattern: str, name: str) -> None:
    compiled = Pattern(pattern)
    assert compiled.matches(name) == naive_matches(pattern, name)
    if compiled.matches(name):
        assert name.startswith(compiled.prefix)


@given(st.lists(patterns, max_size=4), names)
def test_any_of_several_patterns_is_as_if_each_were_asked(several: list[str], name: str) -> None:
    matches = any_of(map(Pattern, several))
    assert matches(name) == any(naive_matches(pattern, name) for pattern in several)


@given(names)
def test_every_name_can_be_written_as_a_literal_pattern(name: str) -> None:
    compiled = Pattern("".join(f"[{c}]" if c in "*?[" else c for c in name))
    assert compiled.is_literal
    assert compiled.matches(name)
    assert not compiled.matches(name + "a")


@given(st.text("ab[]!-*?\\^&~|#\n\ud800é", max_size=20))
def test_any_text_is_a_pattern_or_a_clear_error(text: str) -> None:
    try:
        compiled = Pattern(text)
    except InvalidNameError:
        return
    for name in ("a", "a-b", "!a", "[a]", "&&", "\\"):
        assert compiled.matches(name) == naive_matches(text, name)


def test_equal_texts_are_equal_patterns() -> None:
    assert Pattern("a*") == Pattern("a*")
    assert len({Pattern("a*"), Pattern("a*"), Pattern("b*")}) == 2
    assert Pattern("a*") != "a*"


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 100 + "*b", "*a?" * 80 + "*b*", "*[!b]" * 50 + "b*", "*" * 254 + "b", "*?" * 120 + "b"],
)
def test_patterns_that_defeat_backtracking_matchers_are_harmless(pattern: str) -> None:
    # A backtracking matcher would not come back from any of these.
    compiled = Pattern(pattern)
    assert not any(compiled.matches("a" * length) for length in range(1, 256))


def test_cost_is_one_for_a_beginning_and_an_end_and_grows_with_what_must_be_searched() -> None:
    assert Pattern("a/*").cost == Pattern("*/temp").cost == Pattern("a/*/b").cost == 1
    assert 1 < Pattern("*/a/*").cost < Pattern("*/a/*/b/*").cost < Pattern("*[!b]?[!b]*").cost
