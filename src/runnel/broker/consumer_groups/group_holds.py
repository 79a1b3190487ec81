"""The holds of acknowledged subscriptions: retention keeps what a subscription is owed, and may remove the rest early.

An acknowledgement counts once its write has begun. A crash may undo it when retention has removed the message already.
A consumer has acknowledged that message; after the restart the group finds it missing and passes over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.subscriptions import WorkSubscription, WorkSubscriptions
from runnel.errors import UnknownTopicError
from runnel.group_rules.ack_set import AckSet
from runnel.log.log import Hold
from runnel.topics.names import TopicPartition

HOLDER_PREFIX: Final = "subscription "
_FROM_THE_FIRST: Final = AckSet(1)


class GroupHolds:
    """The holds of all subscriptions. The logs ask for them whenever they apply retention."""

    def __init__(self, state: AckJournals, subscriptions: WorkSubscriptions) -> None:
        self._state = state
        self._subscriptions = subscriptions

    @property
    def version(self) -> int:
        """All answers stay valid while this number stays the same."""
        return self._subscriptions.changes

    @property
    def is_empty(self) -> bool:
        return not self._subscriptions

    def holds_of(self, key: TopicPartition) -> Sequence[Hold]:
        """The holds on a partition: from the first offset on that each member is owed."""
        return [
            Hold(HOLDER_PREFIX + subscription.definition.name, key, acked.floor, 0, ())
            for subscription in self._subscriptions.covering(key[0])
            for acked in self._acked(subscription, key)
        ]

    def owed(self, key: TopicPartition, begin: int, end: int) -> Sequence[tuple[int, int]] | None:
        """Of these offsets, those that any subscription is still owed; None: no subscription covers them."""
        covering = self._subscriptions.covering(key[0])
        if not covering:
            return None
        owed = 0
        everything = (1 << (end - begin)) - 1
        for subscription in covering:
            for acked in self._acked(subscription, key):
                owed |= everything & ~acked.mask(begin, end)
                if owed == everything:
                    return [(begin, end)]
        return _ranges(owed, begin)

    def _acked(self, subscription: WorkSubscription, key: TopicPartition) -> Iterator[AckSet]:
        """The offsets of a partition that each member has acknowledged."""
        for member in subscription.members:
            try:
                state = self._state.find(subscription.definition.id, member, key)
            except UnknownTopicError:
                return  # deleted: segments may still have messages, but none is owed
            yield _FROM_THE_FIRST if state is None else state.acked
        for consumer_group in subscription.consumer_groups.values():
            if not consumer_group.is_durable:
                acked = consumer_group.acked(key)
                if acked is not None:
                    yield acked


def _ranges(mask: int, begin: int) -> list[tuple[int, int]]:
    """The stretches of set bits, as offsets."""
    ranges = []
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        begin += skipped
        width = (~mask & (mask + 1)).bit_length() - 1
        ranges.append((begin, begin + width))
        mask >>= width
        begin += width
    return ranges
