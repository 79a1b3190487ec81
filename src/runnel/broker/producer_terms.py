"""Assigns terms to named producers, and refuses producers with an older term."""

from __future__ import annotations

from typing import Final

from runnel.errors import ProducerFencedError
from runnel.platform.clock import Clock
from runnel.topics.names import Label, check_label

_TERMS_MAX: Final = 100_000


class ProducerTerms:
    """The newest term that this broker assigned to each producer. The logs know the terms of stored batches."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[str, int] = {}  # oldest first

    def take(self, producer: str, stored_term: int) -> int:
        """A term higher than all before it; `stored_term` is the highest that a log has seen.

        It is at least the wall clock's milliseconds, because terms without a stored batch are forgotten when the broker
        stops.
        """
        check_label(Label.PRODUCER, producer)
        newest = max(self._newest.pop(producer, 0), stored_term)
        term = max(newest + 1, self._clock.time_ns() // 1_000_000)
        self._newest[producer] = term
        if len(self._newest) > _TERMS_MAX:
            del self._newest[next(iter(self._newest))]
        return term

    def check(self, producer: str, term: int) -> None:
        """Refuse a producer whose term is not the newest."""
        newest = self._newest.get(producer)
        if newest is not None and term < newest:
            raise ProducerFencedError(
                f"producer {producer!r} was opened anew with term {newest}; term {term} may not publish"
            )
