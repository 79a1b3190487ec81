"""What readers claim of one shard: named cursors by their positions, subscriptions by what they owe. No files here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runnel.log.cursors import CursorTable
from runnel.log.log import ShardId
from runnel.log.retention import Claims, Holds
from runnel.topics.names import TopicPartition

# A segment may hold millions of messages of a partition; an answer about few is quick however scattered they are.
_OFFSETS_AT_ONCE: Final = 16_384


class ShardPins:
    """Both together, as they are at the moment of asking."""

    def __init__(
        self, shard: ShardId, cursors: CursorTable, claims: Callable[[], Claims | None]
    ) -> None:
        self._shard = shard
        self._cursors = cursors
        self._claims = claims  # None: nobody tells what subscriptions owe

    def holds(self) -> Holds:
        """What age and size may not take before its ceiling."""
        claims = self._claims()
        cursors = self._cursors.holds_on(self._shard)
        if claims is None or claims.is_empty:
            return Holds(cursors)
        return Holds(cursors, claims.holds_of)

    def cursors(self) -> Holds:
        """What acknowledgements alone do not let go."""
        return Holds(self._cursors.holds_on(self._shard))

    def version(self) -> tuple[int, int] | None:
        """Another one when more may go by acknowledgement; None if nothing may."""
        claims = self._claims()
        return None if claims is None else (claims.version, self._cursors.version)

    def owed(self, key: TopicPartition, begin: int, end: int) -> list[tuple[int, int]] | None:
        """What is owed of these offsets; None if no subscription covers them."""
        claims = self._claims()
        if claims is None:
            return None
        found: list[tuple[int, int]] = []
        for first in range(begin, end, _OFFSETS_AT_ONCE):
            owed = claims.owed(key, first, min(first + _OFFSETS_AT_ONCE, end))
            if owed is None:
                return None
            if owed and found and found[-1][1] == owed[0][0]:
                found[-1] = (found[-1][0], owed[0][1])
                owed = owed[1:]
            found += owed
        return found
