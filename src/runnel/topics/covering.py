"""Whether one pattern covers another: every name that the second can match, the first matches too.

Rights are patterns, and what is asked for may be one as well: a right to `sensors/*` covers `sensors/a/*` and not
`*`. The answer is never wrongly yes. It can be no where a person would see a yes (`[a-m]` and `[n-z]` together have
all of `[a-z]`, but neither has; `?*` and `*?` are the same names, and `*?` is not found to cover `?*`); whoever asks
then asks for less at a time.

The covering pattern is matched against the other as if that were a name whose letters are wildcards: a star of the
other is taken by a star alone, a set by a set that contains it.

**Time.** All places of the covering pattern that the other's beginning may have reached are bits of one number, so
that one item of the other is a few operations however many stars there are. Only wildcards are compared one by one
with wildcards, and those of the covering pattern are the ones that somebody gave a right with.
"""

from __future__ import annotations

from typing import Final

from runnel.topics.names import SYSTEM_MARK
from runnel.topics.patterns import Pattern, Wildcard, items_of


class Cover:
    """A pattern that others are compared with."""

    __slots__ = ("_characters", "_end", "_stars", "_wildcards", "pattern")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern: Final = pattern
        self._characters: dict[str, int] = {}  # where each one is, as bits
        self._wildcards: list[tuple[Wildcard, int]] = []
        self._stars = 0
        place = 1
        for item in items_of(pattern):
            if item is None:
                if self._stars & place >> 1:
                    continue  # several stars are one: a step past them is always one step
                self._stars |= place
            elif isinstance(item, str):
                self._characters[item] = self._characters.get(item, 0) | place
            else:
                self._wildcards.append((item, place))
            place <<= 1
        self._end = place

    def covers(self, narrow: Pattern) -> bool:
        """See the module's first line."""
        pattern = self.pattern
        if narrow.is_literal:
            return pattern.matches(narrow.prefix)
        # The beginning first: most of what is not covered is seen here. And only a literal `!` sees the system's
        # names, so that a pattern without one covers none of them.
        if not narrow.prefix.startswith(pattern.prefix):
            return False
        if narrow.prefix.startswith(SYSTEM_MARK) and not pattern.prefix.startswith(SYSTEM_MARK):
            return False
        stars = self._stars
        places = 1 | (stars & 1) << 1  # a star may also take nothing
        taking: dict[str | Wildcard, int] = {}
        for item in items_of(narrow):
            after = places & stars  # a star takes anything, and stays
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
        """The places, as bits, that take whatever the item stands for."""
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
    """Whether every name that `narrow` can match is one that `wide` matches; see `Cover`."""
    return Cover(wide).covers(narrow)
