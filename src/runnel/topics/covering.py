"""Whether one pattern covers another: every name that the second can match, the first matches too.

Rights are patterns, and what is asked for may be one as well: a right to `sensors/*` covers `sensors/a/*` and not
`*`. The answer is never wrongly yes. It can be no where a person would see a yes (`?[a-b]*` and `*` of names that
all have two letters, a set cut in two); whoever asks then asks for less at a time.

The covering pattern is matched against the other as if that were a name whose letters are wildcards: a star of the
other is taken by a star alone, a set by a set that contains it. Time and memory: the product of their lengths.
"""

from __future__ import annotations

from runnel.topics.names import SYSTEM_MARK
from runnel.topics.patterns import Pattern, Wildcard, items_of


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """See the module's first line."""
    if narrow.is_literal:
        return wide.matches(narrow.prefix)
    # Only a literal ! sees the system's names: a wide pattern without one covers none of them.
    if narrow.prefix.startswith(SYSTEM_MARK) and not wide.prefix.startswith(SYSTEM_MARK):
        return False
    places = {0}  # how much of `wide` may be used up by what has been read of `narrow`
    items = items_of(wide)
    places = _past_stars(items, places)
    for read in items_of(narrow):
        after = set()
        for place in places:
            if place == len(items):
                continue
            item = items[place]
            if item is None:  # a star takes anything, and stays
                after.add(place)
            elif read is not None and _contains(item, read):
                after.add(place + 1)
        places = _past_stars(items, after)
        if not places:
            return False
    return len(items) in places


def _past_stars(items: list[str | Wildcard | None], places: set[int]) -> set[int]:
    """A star may also take nothing."""
    reached = set(places)
    for place in places:
        while place < len(items) and items[place] is None:
            place += 1
            reached.add(place)
    return reached


def _contains(item: str | Wildcard, read: str | Wildcard) -> bool:
    if isinstance(item, str):
        return item == read
    if isinstance(read, str):
        return item.has(read)
    return item.contains(read)
