"""Names in order, so that those which share a beginning stand together; knows nothing of patterns.

The names lie in chunks of at most CHUNK_MAX, each a sorted list. Finding a place is a bisection of
the chunks' last names and one of a chunk; inserting moves the rest of one chunk. So adding n names
takes n times the time of a chunk, whatever their order, and not n times the time of all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

CHUNK_MAX: Final = 1024


class SortedNames:
    """A set of names in code point order. Whoever holds it knows which names are in it."""

    __slots__ = ("_chunk_max", "_chunks", "_lasts")

    def __init__(self, *, chunk_max: int = CHUNK_MAX) -> None:
        self._chunk_max = chunk_max
        # No chunk is empty, and _lasts[i] is _chunks[i][-1].
        self._chunks: list[list[str]] = []
        self._lasts: list[str] = []

    def add(self, name: str) -> None:
        """Put in a name that is not there."""
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
        """Take out a name that is there."""
        place = bisect_left(self._lasts, name)
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, name)]
        if chunk:
            self._lasts[place] = chunk[-1]
        else:
            del self._chunks[place]
            del self._lasts[place]

    def page(self, prefix: str, after: str, names_max: int) -> list[str]:
        """The next names that begin with `prefix` and follow `after`; none: there are no more.

        There may be fewer than `names_max` although more follow: a page never crosses chunks. The
        first page is the one after "".
        """
        # U+0000 is in no name, so nothing lies between a name and itself with U+0000 behind it.
        start = max(prefix, after + "\0" if after else "")
        place = bisect_left(self._lasts, start)
        if place == len(self._chunks):
            return []
        chunk = self._chunks[place]
        begin = bisect_left(chunk, start)
        names = chunk[begin : begin + names_max]
        if not names[-1].startswith(prefix):
            # Names with the prefix are neighbours, so the first without it ends them.
            del names[bisect_left(names, 1, key=lambda name: not name.startswith(prefix)) :]
        return names
