"""A sorted set of names, in which names with a common prefix are neighbours.

The names lie in sorted chunks of at most CHUNK_MAX names. Finding a name takes one bisection over the last names of the
chunks and one within a chunk; inserting moves the rest of one chunk. So the time of an insertion depends on the size of
a chunk, and not on the number of names, whatever their order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

CHUNK_MAX: Final = 1024


class SortedNames:
    """A set of names in code point order. Its owner keeps track of which names it contains."""

    __slots__ = ("_chunk_max", "_chunks", "_lasts")

    def __init__(self, *, chunk_max: int = CHUNK_MAX) -> None:
        self._chunk_max = chunk_max
        # No chunk is empty, and _lasts[i] is _chunks[i][-1].
        self._chunks: list[list[str]] = []
        self._lasts: list[str] = []

    def add(self, name: str) -> None:
        """Add a name that the set does not contain."""
        if not self._chunks:
            self._chunks.append([name])
            self._lasts.append(name)
            return
        place = min(bisect_left(self._lasts, name), len(self._chunks) - 1)
        chunk = self._chunks[place]
        insort(chunk, name)
        if len(chunk) > self._chunk_max:
            half = len(chunk) // 2
            self._chunks.insert(place + 1, chunk[half:])
            self._lasts.insert(place + 1, chunk[-1])
            del chunk[half:]
        self._lasts[place] = chunk[-1]

    def remove(self, name: str) -> None:
        """Remove a name that the set contains."""
        place = bisect_left(self._lasts, name)
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, name)]
        if chunk:
            self._lasts[place] = chunk[-1]
        else:
            del self._chunks[place]
            del self._lasts[place]

    def page(self, prefix: str, after: str, names_max: int) -> list[str]:
        """The next names that begin with `prefix` and follow `after`. An empty page is the end.

        A page may have fewer than `names_max` names although more follow, because it never crosses chunks. The first
        page follows "".
        """
        # U+0000 is in no name, so no name lies between a name and that name followed by U+0000.
        start = max(prefix, after + "\0" if after else "")
        place = bisect_left(self._lasts, start)
        if place == len(self._chunks):
            return []
        chunk = self._chunks[place]
        begin = bisect_left(chunk, start)
        names = chunk[begin : begin + names_max]
        if not names[-1].startswith(prefix):
            # Names with the prefix are neighbours, so the first name without it is behind all of them.
            del names[bisect_left(names, 1, key=lambda name: not name.startswith(prefix)) :]
        return names
