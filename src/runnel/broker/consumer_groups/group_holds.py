"""The holds of acknowledged subscriptions: retention keeps what a subscription is owed, and may remove the rest early.

An acknowledgement counts once its write has begun. A crash may undo it when retention has removed the message already.
A consumer has acknowledged that message; after the restart the group finds it missing and passes over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.subscriptions import WorkSubscription, WorkSubscriptions
from runnel.errors import MovedError, UnknownTopicError
from runnel.group_rules.ack_set import AckSet
from runnel.log.log import Hold
from runnel.topics.names import TopicPartition

HOLDER_PREFIX: Final = "subscription "
_NOT_READ_YET: Final = "subscriptions that are not read yet"
_FROM_THE_FIRST: Final = AckSet(1)


class GroupHolds:
    """The holds of all subscriptions. The logs ask for them whenever they apply retention.

    The logs are opened with it, before the subscriptions can be read from them. Until `follow` everything is owed.
    """

    def __init__(self) -> None:
        self._known: tuple[AckJournals, WorkSubscriptions] | None = None

    def follow(self, state: AckJournals, subscriptions: WorkSubscriptions) -> None:
        """From now on, answer by these subscriptions."""
        self._known = state, subscriptions

    @property
    def version(self) -> int:
        """All answers stay valid while this number stays the same."""
        return -1 if self._known is None else self._known[1].changes

    @property
    def is_empty(self) -> bool:
        return self._known is not None and not self._known[1]

    def holds_of(self, key: TopicPartition) -> Sequence[Hold]:
        """The holds on a partition: from the first offset on that each member is owed."""
        if self._known is None:
            return [Hold(_NOT_READ_YET, key, 0, 0, ())]
        state, subscriptions = self._known
        return [
            Hold(HOLDER_PREFIX + subscription.definition.name, key, acked.floor, 0, ())
            for subscription in subscriptions.covering(key[0])
            for acked in _acked(state, subscription, key)
        ]

    def owed(self, key: TopicPartition, begin: int, end: int) -> Sequence[tuple[int, int]] | None:
        """Of these offsets, those that any subscription is still owed; None: no subscription covers them."""
        if self._known is None:
            return [(begin, end)]
        state, subscriptions = self._known
        covering = subscriptions.covering(key[0])
        if not covering:
            return None
        owed = 0
        everything = (1 << (end - begin)) - 1
        for subscription in covering:
            for acked in _acked(state, subscription, key):
                owed |= everything & ~acked.mask(begin, end)
                if owed == everything:
                    return [(begin, end)]
        return _ranges(owed, begin)


def _acked(
    state: AckJournals, subscription: WorkSubscription, key: TopicPartition
) -> Iterator[AckSet]:
    """The offsets of a partition that each member has acknowledged."""
    for member in subscription.members:
        try:
            stored = state.find(subscription.definition.id, member, key)
        except UnknownTopicError:
            return  # deleted: segments may still have messages, but none is owed
        except MovedError:
            stored = None  # its next owner knows: until then everything is owed
        yield _FROM_THE_FIRST if stored is None else stored.acked
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
