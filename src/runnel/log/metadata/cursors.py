"""Named cursors: positions that outlive their readers and hold messages. No files here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from runnel.errors import ClientFault, LimitExceededError
from runnel.log.log import Cursor, CursorPosition, Hold, ShardId
from runnel.log.retention.holds import holds_of_cursor
from runnel.topics.names import Label, TopicPartition, check_label


class CursorTable:
    """All cursors of a store. `shard_of` returns the shard of a topic-partition, None if it does not exist."""

    def __init__(
        self, cursors_max: int, shard_of: Callable[[TopicPartition], ShardId | None]
    ) -> None:
        self._cursors_max = cursors_max
        self._shard_of = shard_of
        self._cursors: dict[str, Cursor] = {}
        self._owned: Counter[str] = Counter()
        self.version = 0  # rises when a hold may have changed

    def make(
        self, name: str, positions: Sequence[CursorPosition], now_ns: int, owner: str = ""
    ) -> Cursor:
        """Check and make a cursor. The caller puts it into the table once it is recorded."""
        check_label(Label.CURSOR, name)
        for place in positions:
            if (place.topic is None) == (place.shard is None or place.position is None):
                raise ClientFault(
                    f"cursor {name!r}: a position names either a topic with partition and offset, or a "
                    "shard with a position in it and patterns"
                )
        if name not in self._cursors and len(self._cursors) >= self._cursors_max:
            raise LimitExceededError(
                f"cursor {name!r} would be one more than limits.cursors_max = {self._cursors_max}"
            )
        return Cursor(name, tuple(positions), now_ns, owner)

    def put(self, cursor: Cursor) -> None:
        self._count(cursor.name, -1)
        self._cursors[cursor.name] = cursor
        self._count(cursor.name, 1)
        self.version += 1

    def remove(self, name: str) -> None:
        self._count(name, -1)
        self._cursors.pop(name, None)
        self.version += 1

    def _count(self, name: str, change: int) -> None:
        known = self._cursors.get(name)
        if known is not None and known.owner:
            self._owned[known.owner] += change
            if not self._owned[known.owner]:
                del self._owned[known.owner]

    def find(self, name: str) -> Cursor | None:
        return self._cursors.get(name)

    def owned_by(self, owner: str) -> int:
        return self._owned[owner]

    def all(self) -> list[Cursor]:
        return list(self._cursors.values())

    def holds_on(self, shard: ShardId) -> list[Hold]:
        """The holds of all cursors on one shard."""
        return [
            hold
            for cursor in self._cursors.values()
            for hold in holds_of_cursor(cursor, shard, self._shard_of)
        ]
