"""The newest term of each named publisher. No files here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_TERMS_MAX: Final = 100_000


class TermTable:
    """The terms that were given out last, oldest first, bounded in number.

    A term is at least the wall clock's milliseconds (`LogMetadata.take_term`), so one that is forgotten is not given
    out again.
    """

    def __init__(self) -> None:
        self._terms: dict[str, int] = {}

    def newest(self, producer: str) -> int:
        """The producer's newest term; -1 if it has none."""
        return self._terms.get(producer, -1)

    def put(self, producer: str, term: int) -> None:
        """Note a term, unless a higher one is known."""
        self._terms[producer] = max(self._terms.pop(producer, -1), term)
        if len(self._terms) > _TERMS_MAX:
            del self._terms[next(iter(self._terms))]

    def items(self) -> Iterator[tuple[str, int]]:
        """A copy, made in one step."""
        return iter(list(self._terms.items()))
