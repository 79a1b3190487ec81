"""Who should have which shard. Pure: nodes, owners and loads go in, moves come out."""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from runnel.log.log import ShardId


def rendezvous(shard: ShardId, nodes: Iterable[str]) -> str:
    """The node that takes a shard which nobody owns: the one whose hash with it is the highest; "" without nodes.

    When a node goes, only its own shards get another one.
    """
    return max(nodes, key=lambda name: (_weight(shard, name), name), default="")


def _weight(shard: ShardId, name: str) -> int:
    return xxh3_64_intdigest(b"%b\0%b\0%d" % (name.encode(), shard.journal.encode(), shard.shard))
