"""`ShardView`: what the owner of a shard knows of it, for as long as its term of ownership lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from runnel.errors import MovedError, UnknownTopicError
from runnel.log.log import OffsetBounds, ShardId, StateStore
from runnel.log.metadata.topic_table import Partition, TopicTable


class ViewedShard(Protocol):
    """A shard of any store."""

    id: ShardId

    @property
    def hide_count(self) -> int:
        """Rises whenever messages are hidden."""
        ...

    def entries(self) -> OffsetBounds: ...


class ShardView:
    """The `OwnedShard` of every store. Its log makes one for each term of ownership, and ends it."""

    def __init__(
        self,
        shard: ViewedShard,
        epoch: int,
        topics: TopicTable,
        state: Callable[[ShardId], StateStore],
    ) -> None:
        self.id: Final = shard.id
        self.epoch: Final = epoch
        self._shard = shard
        self._topics = topics
        self._state = state
        self._is_over = False

    def __repr__(self) -> str:
        return f"<{self.id}, epoch {self.epoch}{', over' if self._is_over else ''}>"

    def end(self) -> None:
        """The term is over: from now on every method raises MovedError."""
        self._is_over = True

    @property
    def state(self) -> StateStore:
        self._check()
        return self._state(self.id)

    def entries(self) -> OffsetBounds:
        self._check()
        return self._shard.entries()

    def next_offset(self, topic: str, partition: int) -> int:
        return self._partition(topic, partition).visible_next

    def floor(self, topic: str, partition: int) -> int:
        return self._partition(topic, partition).floor

    def count_stamp(self) -> tuple[int, int]:
        self._check()
        return self._shard.entries().next_offset, self._shard.hide_count

    def _partition(self, topic: str, partition: int) -> Partition:
        self._check()
        found = self._topics.partition(topic, partition)
        if found.shard != self.id:
            raise UnknownTopicError(
                f"{topic}[{partition}] lies in shard {found.shard}, not in {self.id}"
            )
        return found

    def _check(self) -> None:
        if self._is_over:
            raise moved(self.id)


def moved(shard: ShardId) -> MovedError:
    """The error of a request for a shard that this log does not serve."""
    return MovedError(f"shard {shard} is not served here any more")
