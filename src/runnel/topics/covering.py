"""Decides whether one pattern covers another: whether it matches every name that the other can match.

Rights are patterns, and a request may name a pattern too: a right to `sensors/*` covers `sensors/a/*` and not `*`. The
answer is never wrongly yes. It is sometimes wrongly no: `[a-m]` and `[n-z]` together have all of `[a-z]`, but neither
has alone; `?*` and `*?` match the same names, but `*?` is not found to cover `?*`. The client then has to ask for less
at a time.

The wide pattern is matched against the narrow one as if the narrow one were a name whose letters are wildcards: only a
star takes a star, and only a set that contains a set takes it.

**Time.** The places of the wide pattern that the narrow one's beginning may have reached are the bits of one number. So
each item of the narrow pattern takes a few operations, however many stars there are. Only wildcards are compared with
wildcards one by one, and the wide pattern's wildcards come from a granted right, not from the request.
"""

from __future__ import annotations

from typing import Final

from runnel.topics.names import SYSTEM_MARK
from runnel.topics.patterns import Pattern, Wildcard, items_of


class Cover:
    """A wide pattern, prepared for comparing narrow patterns with it."""

    __slots__ = ("_characters", "_end", "_stars", "_wildcards", "pattern")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern: Final = pattern
        self._characters: dict[str, int] = {}  # the places of each character, as bits
        self._wildcards: list[tuple[Wildcard, int]] = []
        self._stars = 0
        place = 1
        for item in items_of(pattern):
            if item is None:
                if self._stars & place >> 1:
                    continue  # adjacent stars count as one, so that one step goes past them
                self._stars |= place
            elif isinstance(item, str):
                self._characters[item] = self._characters.get(item, 0) | place
            else:
                self._wildcards.append((item, place))
            place <<= 1
        self._end = place

    def covers(self, narrow: Pattern) -> bool:
        """Whether this pattern matches every name that `narrow` can match. Never wrongly True."""
        pattern = self.pattern
        if narrow.is_literal:
            return pattern.matches(narrow.prefix)
        # The literal beginning first, because most patterns that are not covered differ there. Only a pattern with a
        # literal `!` matches the system's names, so a pattern without one covers none of them.
        if not narrow.prefix.startswith(pattern.prefix):
            return False
        if narrow.prefix.startswith(SYSTEM_MARK) and not pattern.prefix.startswith(SYSTEM_MARK):
            return False
        stars = self._stars
        places = 1 | (stars & 1) << 1  # a star may also match nothing
        taking: dict[str | Wildcard, int] = {}
        for item in items_of(narrow):
            after = places & stars  # a star takes any item, and its place stays
            if item is not None:
                taken = taking.get(item)
                if taken is None:
                    taken = taking[item] = self._taking(item)
                after |= (places & taken) << 1
            if not after:
                return False
            places = after | (after & stars) << 1
        return bool(places & self._end)

    def _taking(self, item: str | Wildcard) -> int:
        """The places, as bits, that take every character the item stands for."""
        if isinstance(item, str):
            found = self._characters.get(item, 0)
            for wildcard, place in self._wildcards:
                if wildcard.has(item):
                    found |= place
            return found
        found = 0
        for wildcard, place in self._wildcards:
            if wildcard.contains(item):
                found |= place
        return found


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether `wide` matches every name that `narrow` can match; see `Cover`."""
    return Cover(wide).covers(narrow)
