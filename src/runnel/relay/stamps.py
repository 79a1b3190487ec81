"""Hashes over the shards that a node serves, so that two nodes can tell whether they believe the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

from runnel.cluster.state import ClusterView
from runnel.log.log import ShardId

_BITS: Final = 2**63 - 1  # what every msgpack library reads


def stamp_of(terms: Iterable[tuple[ShardId, int]]) -> int:
    """A hash over shards and the epochs of their terms, in any order. 0: no shards."""
    stamp = 0
    for shard, epoch in terms:
        stamp ^= xxh3_64_intdigest(f"{shard.journal}\0{shard.shard}\0{epoch}".encode())
    return stamp & _BITS


def expected_stamps(view: ClusterView) -> dict[str, int] | None:
    """What each living node serves, by its name, as a hash. None: some shard is served by no living node now."""
    terms: dict[str, list[tuple[ShardId, int]]] = {
        node.name: [] for node in view.nodes.values() if node.is_alive
    }
    for shard, row in view.owners.items():
        if not row.epoch:
            continue  # somebody only wishes for it: it was never served
        if not view.is_served(shard):
            return None
        terms[row.owner].append((shard, row.epoch))
    return {name: stamp_of(found) for name, found in terms.items()}


def served_stamp(view: ClusterView, served: Iterable[ShardId]) -> int:
    """What a node serves really, as a hash: with the epochs that are recorded for it."""
    owners = view.owners
    return stamp_of((shard, owners[shard].epoch if shard in owners else 0) for shard in served)
