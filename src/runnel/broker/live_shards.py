"""The shards of ephemeral topics, which have no journal: who numbers and spreads their messages.

A single broker has one, `LIVE_SHARD`, for all of them. Where several brokers share their topics, each ephemeral topic
lies in one of several shards by its hash, with all of its partitions, for a topic has one epoch. The shards have owners
and terms as others do. They hold nothing, so the record of a term decides who owns one, and a term begins with new
offsets in a higher epoch: that is how readers notice that messages may be missing.

Reports of the broker itself (`!system/metrics/…`, `!system/events`) belong to no shard: each node publishes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from runnel.errors import MovedError
from runnel.log.log import ShardId, TermRecords
from runnel.platform.clock import Clock
from runnel.topics.names import LIVE_JOURNAL
from runnel.topics.partitions import shard_of_partition

LIVE_SHARD: Final = ShardId(LIVE_JOURNAL)
# Within a term, each topic that vanishes raises the epoch of later ones. The next term begins above all of them.
_EPOCHS_OF_A_TERM: Final = 2**32


class LiveTerm(NamedTuple):
    """A term of such a shard."""

    epoch: int


class LiveShards:
    """The shards of ephemeral topics that this node owns. See `ShardOwnership`."""

    def __init__(self, clock: Clock, terms: TermRecords, count: int) -> None:
        self._clock = clock
        self._terms = terms
        self._shards: Final = tuple(ShardId(LIVE_JOURNAL, number) for number in range(count))
        self._owned: dict[ShardId, int] = {}  # with the epoch of the term
        self.on_ended: Callable[[ShardId], object] = lambda _: None
        """Called when a term has ended."""

    def shard_of(self, topic: str) -> ShardId:
        return self._shards[shard_of_partition(topic, 0, len(self._shards))]

    def has(self, shard: ShardId) -> bool:
        """Whether this node owns the shard. Hot: once for each run of an ephemeral batch."""
        return shard in self._owned

    def epoch(self, shard: ShardId) -> int:
        """The first epoch of the term; 0: this node does not own the shard."""
        return self._owned.get(shard, 0)

    async def acquire(self, shard: ShardId, above: int = 0) -> LiveTerm:
        """Begin a term, unless one is under way. MovedError if another node has the shard."""
        if shard not in self._owned:
            epoch = max(self._clock.time_ns(), above + _EPOCHS_OF_A_TERM)
            await self._terms.begin(shard, epoch, 1, has_lock=False)
            self._owned[shard] = epoch
        return LiveTerm(self._owned[shard])

    async def release(self, shard: ShardId) -> None:
        """End the term, if there is one. Its topics vanish."""
        epoch = self._owned.get(shard)
        if epoch is not None:
            await self.drop(shard)
            await self._terms.end(shard, epoch, 1)

    async def drop(self, shard: ShardId) -> None:
        """End the term, if there is one, without a record of it."""
        if self._owned.pop(shard, None) is not None:
            self.on_ended(shard)


def live_shard_is_elsewhere(shard: ShardId) -> MovedError:
    return MovedError(f"ephemeral topics of shard {shard} are another node's")
