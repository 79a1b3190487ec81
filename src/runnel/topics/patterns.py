"""Glob patterns over topic names, and a matcher with bounded running time.

    *         any run of characters, including `/`, possibly empty
    ?         exactly one character
    [a-z_]    one character of the set: single characters and ranges by code point
    [!a-z]    one character outside the set
    the rest  itself; case matters

A pattern is matched against the whole name, character by character (not byte by byte). Inside a set, `*`, `?`, `[` and
a `!` that is not first stand for themselves, and so does a `-` that is first or last: `[*]` is a literal star. There is
no escape character. `]` outside a set stands for itself; inside a set it cannot be written. An empty set, a set without
its `]` and a range that runs backwards are errors, so that none of them silently matches something else than was meant.

Names that begin with `!` belong to the system. Only patterns that begin with a literal `!` match them: `*`, `?dead` and
`[!a]*` do not.

**Time.** The stars cut a pattern into segments of fixed length. The first is anchored at the beginning and the last at
the end; each segment between is taken where it first occurs after its predecessor. If a match exists, then a match
exists with every segment as far left as possible. So the matcher never goes back, and matching takes at most
(length of name) x (length of pattern) steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from runnel.errors import InvalidNameError
from runnel.topics.names import SYSTEM_MARK, check_text


class Wildcard(msgspec.Struct, frozen=True):
    """One character inside some ranges, or outside of them. `?` is negated and has no ranges."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def has(self, character: str) -> bool:
        is_named = any(low <= character <= high for low, high in self.ranges)
        return is_named is not self.negated

    def contains(self, other: Wildcard) -> bool:
        """Whether it surely has every character of the other. False if only several ranges together cover a range."""
        if not self.negated:
            return not other.negated and all(
                any(low <= first and last <= high for low, high in self.ranges)
                for first, last in other.ranges
            )
        if other.negated:  # the other must exclude everything that this one excludes
            return all(
                any(first <= low and high <= last for first, last in other.ranges)
                for low, high in self.ranges
            )
        return all(
            last < low or high < first for low, high in self.ranges for first, last in other.ranges
        )


_ANY_CHARACTER: Final = Wildcard(ranges=(), negated=True)

_Item = str | Wildcard  # a character that stands for itself, or a set


class _Segment:
    """The part of a pattern between two stars. It matches as many characters as it has items.

    Most segments are plain text, which `str` finds fastest. A segment with a set or `?` becomes a regular expression
    without repetition, so it cannot backtrack.
    """

    __slots__ = ("leading_text", "length", "regex", "text")

    def __init__(self, items: list[_Item]) -> None:
        self.length: Final = len(items)
        self.leading_text: Final = "".join(_leading_characters(items))
        self.regex: Final = None if len(self.leading_text) == len(items) else _regex(items)
        self.text: Final = self.leading_text if self.regex is None else ""

    def search_cost(self) -> int:
        """The cost of finding it, in units of the simplest comparison (about 0.3 microseconds).

        Measured with the hardest names: plain text costs one unit for 16 characters, a regular expression up to 5 for
        each item, because it starts again at every character.
        """
        return 1 + (self.length // 16 if self.regex is None else 5 * self.length)

    def end_within(self, name: str, start: int, stop: int) -> int:
        """The end of its first occurrence in name[start:stop], or -1."""
        if self.regex is None:
            found = name.find(self.text, start, stop)
            return -1 if found < 0 else found + self.length
        occurrence = self.regex.search(name, start, stop)
        return -1 if occurrence is None else occurrence.end()


def _leading_characters(items: list[_Item]) -> Iterator[str]:
    for item in items:
        if not isinstance(item, str):
            return
        yield item


def _regex(items: list[_Item]) -> re.Pattern[str]:
    return re.compile("".join(map(_regex_of_item, items)), re.DOTALL)


def _regex_of_item(item: _Item) -> str:
    if isinstance(item, str):
        return re.escape(item)
    if item is _ANY_CHARACTER:
        return "."
    ranges = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in item.ranges)
    return f"[^{ranges}]" if item.negated else f"[{ranges}]"


class Pattern:
    """A valid glob pattern. Patterns with equal texts are equal.

    `prefix` is everything before the first wildcard; every matching name begins with it. `cost` bounds the work of one
    comparison, in comparisons of the simplest kind.
    """

    __slots__ = (
        "_head",
        "_length_min",
        "_middle",
        "_sees_system",
        "_suffix",
        "_tail",
        "cost",
        "is_literal",
        "prefix",
        "text",
    )

    def __init__(self, text: str) -> None:
        check_text("pattern", text)
        head, *rest = (_Segment(items) for items in _parse(text))
        self.text: Final = text
        self.prefix: Final = head.leading_text
        self.is_literal: Final = not rest and head.regex is None
        self._sees_system = self.prefix.startswith(SYSTEM_MARK)
        self._head = head
        self._middle = tuple(segment for segment in rest[:-1] if segment.length)
        # Without a star there is no tail: the head reaches to the end.
        self._tail = rest[-1] if rest else None
        self._suffix = rest[-1].text if rest and rest[-1].regex is None else ""
        self._length_min = head.length + sum(segment.length for segment in rest)
        self.cost: Final = 1 + sum(segment.search_cost() for segment in self._middle)

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`."""
        # The cheap checks first: when many patterns are tried one by one, most of them fail here.
        if not (name.startswith(self.prefix) and name.endswith(self._suffix)):
            return False
        if self.is_literal:
            return len(name) == self._length_min
        if name.startswith(SYSTEM_MARK) and not self._sees_system:
            return False
        length = len(name)
        if length < self._length_min:
            return False
        head, tail = self._head, self._tail
        if head.regex is not None and head.regex.match(name) is None:
            return False
        if tail is None:
            return length == self._length_min
        stop = length - tail.length
        if tail.regex is not None and tail.regex.match(name, stop) is None:
            return False
        place = head.length
        for segment in self._middle:
            place = segment.end_within(name, place, stop)
            if place < 0:
                return False
        return True

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Pattern) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def _parse(text: str) -> list[list[_Item]]:
    """The segments between the stars. The first and the last may be empty."""
    segments: list[list[_Item]] = [[]]
    place = 0
    while place < len(text):
        character = text[place]
        place += 1
        if character == "*":
            segments.append([])
        elif character == "?":
            segments[-1].append(_ANY_CHARACTER)
        elif character == "[":
            closing = text.find("]", place)
            if closing < 0:
                raise _invalid(text, place, "a set that is not closed: `]` is missing")
            segments[-1].append(_parse_set(text, place, closing))
            place = closing + 1
        else:
            segments[-1].append(character)
    return segments


def _parse_set(text: str, start: int, closing: int) -> _Item:
    """The item for text[start:closing], the inside of a pair of brackets."""
    negated = text.startswith("!", start)
    first = place = start + 1 if negated else start
    if place == closing:
        raise _invalid(
            text, start, "an empty set: `]` cannot be in a set, and stands for itself outside"
        )
    ranges: list[tuple[str, str]] = []
    while place < closing:
        low = text[place]
        if low == "-" and first < place < closing - 1:
            raise _invalid(
                text,
                place + 1,
                "a `-` that is neither between two characters of a set nor first or last in it",
            )
        if place + 2 < closing and text[place + 1] == "-":
            high = text[place + 2]
            if low > high:
                raise _invalid(
                    text,
                    place + 1,
                    f"the range {low}-{high}, which runs backwards; {high}-{low} would be right",
                )
            place += 3
        else:
            high = low
            place += 1
        ranges.append((low, high))
    # A set of one character is that character: `[*]` counts as literal text.
    if not negated and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return ranges[0][0]
    return Wildcard(ranges=tuple(ranges), negated=negated)


def _invalid(text: str, place: int, problem: str) -> InvalidNameError:
    """`place` counts characters from 1."""
    return InvalidNameError(f"pattern {text!r} has at character {place} {problem}")


def items_of(pattern: Pattern) -> list[str | Wildcard | None]:
    """The items of a pattern in order: characters, wildcards for one character, and None for a star."""
    items: list[str | Wildcard | None] = []
    for number, segment in enumerate(_parse(pattern.text)):
        if number:
            items.append(None)
        items += segment
    return items


def any_of(patterns: Iterable[Pattern]) -> Callable[[str], bool]:
    """A function that says whether any pattern matches a name. All patterns without wildcards take one look-up."""
    patterns = list(patterns)
    names = frozenset(pattern.prefix for pattern in patterns if pattern.is_literal)
    globs = [pattern for pattern in patterns if not pattern.is_literal]
    return lambda name: name in names or any(pattern.matches(name) for pattern in globs)
