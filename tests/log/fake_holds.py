"""Subscriptions as a log knows them: which partitions each covers, and what it has acknowledged. Naive on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from runnel.log.log import Hold
from runnel.topics.names import TopicPartition

_ENDLESS = 2**62


class Acknowledged:
    """One subscription: everything of its partitions is owed that it has not acknowledged."""

    def __init__(self, *keys: TopicPartition) -> None:
        self.acked: dict[TopicPartition, set[int]] = {key: set() for key in keys}

    def owes(self, key: TopicPartition, offset: int) -> bool:
        return key in self.acked and offset not in self.acked[key]

    def first_owed(self, key: TopicPartition) -> int:
        return next(offset for offset in range(1, _ENDLESS) if self.owes(key, offset))


class FakeHolds:
    """What some subscriptions owe. All partitions are taken to live in the shard that is asked about."""

    def __init__(self, **subscriptions: Acknowledged) -> None:
        self.subscriptions = subscriptions
        self.version = 0
        self.questions = 0

    def ack(self, name: str, key: TopicPartition, offsets: Iterable[int]) -> None:
        self.subscriptions[name].acked[key].update(offsets)
        self.version += 1

    @property
    def is_empty(self) -> bool:
        return not self.subscriptions

    def holds_of(self, key: TopicPartition) -> list[Hold]:
        return [
            Hold(f"subscription {name}", key, subscription.first_owed(key), 0, ())
            for name, subscription in self.subscriptions.items()
            if key in subscription.acked
        ]

    def owed(self, key: TopicPartition, begin: int, end: int) -> list[tuple[int, int]] | None:
        self.questions += 1
        covering = [each for each in self.subscriptions.values() if key in each.acked]
        if not covering:
            return None
        return [
            (offset, offset + 1)
            for offset in range(begin, end)
            if any(subscription.owes(key, offset) for subscription in covering)
        ]
