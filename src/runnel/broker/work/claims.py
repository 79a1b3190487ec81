"""What acknowledged subscriptions claim of the logs: nothing that is owed goes, and what nobody is owed may go early.

An acknowledgement counts once it is on its way to the disk. A crash may undo it when the message is gone already: then
a consumer has had it and said so, and after the restart it is found missing and passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from runnel.broker.stores import Stores
from runnel.broker.work.state import WorkState
from runnel.broker.work.subscriptions import WorkSubscription, WorkSubscriptions
from runnel.log.index import Key
from runnel.log.log import ShardId
from runnel.log.retention import Hold
from runnel.subscriptions.ack_set import AckSet
from runnel.world.clock import Clock

HOLDER_PREFIX: Final = "subscription "
_FROM_THE_FIRST: Final = AckSet(1)
_HOLDS_LAST_NS: Final = 1_000_000_000


class _Holds(NamedTuple):
    holds: Sequence[Hold]
    changes: int
    until_ns: int


class WorkClaims:
    """Asked by the logs whenever they apply retention."""

    def __init__(
        self, stores: Stores, state: WorkState, subscriptions: WorkSubscriptions, clock: Clock
    ) -> None:
        self._clock = clock
        self._holds: dict[ShardId, _Holds] = {}
        self._stores = stores
        self._state = state
        self._subscriptions = subscriptions

    @property
    def version(self) -> int:
        """While it stands, so do all answers."""
        return self._subscriptions.changes

    def holds(self, shard: ShardId) -> Sequence[Hold]:
        """The first offset that each subscription is owed of each partition in a shard, as of a moment ago.

        Looked up anew for new definitions and every second: what was owed then is held, and that is no less than now.
        """
        known = self._holds.get(shard)
        now_ns = self._clock.monotonic_ns()
        changes = self._subscriptions.definition_changes
        if known is None or known.changes != changes or now_ns >= known.until_ns:
            until_ns = now_ns + _HOLDS_LAST_NS
            known = self._holds[shard] = _Holds(self._find_holds(shard), changes, until_ns)
        return known.holds

    def _find_holds(self, shard: ShardId) -> Sequence[Hold]:
        log = self._stores.log_of_shard(shard)
        if log is None or not self._subscriptions.all():
            return ()
        return [
            Hold(HOLDER_PREFIX + subscription.definition.name, key, acked.floor, 0, ())
            for info in log.topics()
            for subscription in self._subscriptions.covering(info.name)
            for partition, home in enumerate(info.shards)
            if home == shard
            for key in ((info.name, partition),)
            for acked in self._acked(subscription, key)
        ]

    def owed(self, key: Key, begin: int, end: int) -> Sequence[tuple[int, int]] | None:
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

    def _acked(self, subscription: WorkSubscription, key: Key) -> Iterator[AckSet]:
        """What each member has acknowledged of a partition."""
        for member in subscription.members:
            state = self._state.find(subscription.definition.id, member, key)
            yield _FROM_THE_FIRST if state is None else state.acked
        for crew in subscription.crews.values():
            if not crew.is_durable:
                acked = crew.acked(key)
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
