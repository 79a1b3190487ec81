"""The load of each shard, for balancing: derived from the traffic by topic, so it costs nothing per message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import Final

from runnel.broker.monitoring.topic_traffic import Flow, TopicFlow
from runnel.errors import RunnelError
from runnel.log.log import ShardId

_SMOOTHED_OVER_NS: Final = 10_000_000_000
_BYTES_PER_S_MIN: Final = 1.0  # what is less is forgotten


class ShardLoads:
    """Bytes/s in and out of each shard, averaged over about ten seconds.

    What a topic had is divided by those of its partitions whose shards are here. What is counted by journal only, of
    topics that are not among the first ten thousand of an interval, belongs to no shard.
    """

    def __init__(
        self,
        shards_of: Callable[[str], Sequence[ShardId]],
        is_here: Callable[[ShardId], bool],
        loop_lag_ms: Callable[[], float],
    ) -> None:
        self._shards_of = shards_of
        self._is_here = is_here
        self.loop_lag_ms = loop_lag_ms
        self._by_shard: dict[ShardId, float] = {}

    @property
    def by_shard(self) -> Mapping[ShardId, float]:
        return {shard: load for shard, load in self._by_shard.items() if self._is_here(shard)}

    def take(
        self,
        topics: Sequence[TopicFlow],
        rest: Mapping[str, Flow],  # noqa: ARG002 - of no known shard
        interval_ns: int,
    ) -> None:
        """An interval has ended."""
        now: dict[ShardId, float] = {}
        for row in topics:
            try:
                shards = [shard for shard in self._shards_of(row.topic) if self._is_here(shard)]
            except RunnelError:  # it was deleted, and the rules do not allow its name any more
                continue
            size = row.flow.bytes_in + row.flow.bytes_out
            for shard in shards:
                now[shard] = now.get(shard, 0.0) + size * 1e9 / interval_ns / len(shards)
        kept = exp(-interval_ns / _SMOOTHED_OVER_NS)
        self._by_shard = {
            shard: load
            for shard in self._by_shard.keys() | now.keys()
            if (load := kept * self._by_shard.get(shard, 0.0) + (1 - kept) * now.get(shard, 0.0))
            >= _BYTES_PER_S_MIN
        }
