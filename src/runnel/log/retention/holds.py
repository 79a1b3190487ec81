"""Holds: what keeps retention from removing messages that a reader has not passed yet. Pure, no files.

Two kinds of readers hold messages: named cursors, from their position on, and acknowledged subscriptions, from the
first message on that they are owed. The setting `pin` is the ceiling of all holds: beyond it retention removes held
messages too, and the reader meets a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from runnel.log.log import Cursor, Hold, ShardId, SubscriptionHolds
from runnel.topics.names import TopicPartition

# A segment may hold millions of messages of a partition. `owed` is quick for this many, however scattered they are.
_OFFSETS_AT_ONCE: Final = 16_384


class Holds:
    """The holds on one shard. A look-up takes the same time however many topic-partitions are held.

    `holds_of`, if given, adds the holds of a topic-partition. It is called once for each topic-partition looked up.
    """

    def __init__(
        self,
        holds: Iterable[Hold],
        holds_of: Callable[[TopicPartition], Sequence[Hold]] | None = None,
    ) -> None:
        self._holds_of = holds_of
        self._added: dict[TopicPartition, Sequence[Hold]] = {}
        self._by_key: dict[TopicPartition, list[Hold]] = {}
        self._by_pattern: list[Hold] = []
        for hold in holds:
            if hold.key is None:
                self._by_pattern.append(hold)
            else:
                self._by_key.setdefault(hold.key, []).append(hold)

    def __bool__(self) -> bool:
        return bool(self._by_key or self._by_pattern or self._holds_of)

    def holders(self, key: TopicPartition, next_offset: int, last_entry: int) -> set[str]:
        """The readers that hold messages of this topic-partition that end before `next_offset`, in `last_entry`."""
        return {hold.holder for hold in self._holding(key, next_offset, last_entry)}

    def is_held(self, key: TopicPartition, next_offset: int, last_entry: int) -> bool:
        return next(self._holding(key, next_offset, last_entry), None) is not None

    def _holding(self, key: TopicPartition, next_offset: int, last_entry: int) -> Iterator[Hold]:
        for holds in (self._by_key.get(key, ()), self._by_pattern, self._added_for(key)):
            for hold in holds:
                if hold.holds(key, next_offset, last_entry):
                    yield hold

    def _added_for(self, key: TopicPartition) -> Sequence[Hold]:
        if self._holds_of is None:
            return ()
        known = self._added.get(key)
        if known is None:
            known = self._added[key] = self._holds_of(key)
        return known

    def lowest_offset(self, key: TopicPartition) -> int | None:
        """The offset from which on a topic-partition is held by offset."""
        return min((hold.offset for hold in self._by_key.get(key, ())), default=None)

    def lowest_entry(self, key: TopicPartition) -> int | None:
        """The entry from which on a topic-partition is held by pattern."""
        endless = 2**63
        entries = (hold.entry for hold in self._by_pattern if hold.holds(key, 0, endless))
        return min(entries, default=None)


def holds_of_cursor(
    cursor: Cursor, shard: ShardId, shard_of: Callable[[TopicPartition], ShardId | None]
) -> list[Hold]:
    """The holds of one cursor on one shard."""
    holds = []
    for place in cursor.positions:
        if place.topic is not None:
            key = (place.topic, place.partition)
            if shard_of(key) == shard:
                holds.append(Hold(cursor.name, key, place.offset, 0, ()))
        elif place.shard == shard and place.position is not None:
            holds.append(Hold(cursor.name, None, 0, place.position.entry, place.patterns))
    return holds


class CursorHolds(Protocol):
    """The holds of all named cursors of a log."""

    version: int  # rises when a cursor's position may have changed

    def holds_on(self, shard: ShardId) -> Sequence[Hold]: ...


class ShardHolds:
    """The holds of all readers on one shard, as they are when a method is called.

    `subscriptions` is None if the log was not given the holds of subscriptions.
    """

    def __init__(
        self,
        shard: ShardId,
        cursors: CursorHolds,
        subscriptions: SubscriptionHolds | None,
    ) -> None:
        self._shard = shard
        self._cursors = cursors
        self._subscriptions = subscriptions

    def of_all_readers(self) -> Holds:
        """What `age` and `bytes` may not remove before the ceiling."""
        subscriptions = self._subscriptions
        cursors = self._cursors.holds_on(self._shard)
        if subscriptions is None or subscriptions.is_empty:
            return Holds(cursors)
        return Holds(cursors, subscriptions.holds_of)

    def of_cursors(self) -> Holds:
        """What `until = "acked"` may not remove even if every subscription has acknowledged it."""
        return Holds(self._cursors.holds_on(self._shard))

    def version(self) -> tuple[int, int] | None:
        """Changes when acknowledgements may have made more messages removable; None: they make none removable."""
        subscriptions = self._subscriptions
        return None if subscriptions is None else (subscriptions.version, self._cursors.version)

    def owed(self, key: TopicPartition, begin: int, end: int) -> list[tuple[int, int]] | None:
        """Of these offsets, the ranges that a subscription is owed; None if no subscription covers them."""
        subscriptions = self._subscriptions
        if subscriptions is None:
            return None
        found: list[tuple[int, int]] = []
        for first in range(begin, end, _OFFSETS_AT_ONCE):
            owed = subscriptions.owed(key, first, min(first + _OFFSETS_AT_ONCE, end))
            if owed is None:
                return None
            if owed and found and found[-1][1] == owed[0][0]:
                found[-1] = (found[-1][0], owed[0][1])
                owed = owed[1:]
            found += owed
        return found
