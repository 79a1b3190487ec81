"""Refuses named producers with an older term than the newest that this broker has given out."""

from __future__ import annotations

from typing import Final

from runnel.errors import ProducerFencedError

_TERMS_MAX: Final = 100_000


class ProducerTerms:
    """The newest term that this broker has given to each producer. The stores know all terms, and give out new ones."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}  # oldest first

    def taken(self, producer: str, term: int) -> None:
        """Remember a term that was given out. Of several, the highest counts: they may be answered in any order."""
        self._newest[producer] = max(self._newest.pop(producer, 0), term)
        if len(self._newest) > _TERMS_MAX:
            del self._newest[next(iter(self._newest))]

    def check(self, producer: str, term: int) -> None:
        """Refuse a producer whose term is not the newest."""
        newest = self._newest.get(producer)
        if newest is not None and term < newest:
            raise ProducerFencedError(
                f"producer {producer!r} was opened anew with term {newest}; term {term} may not publish"
            )
