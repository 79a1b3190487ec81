"""The heads about a cluster: its nodes, who serves which shard, and wishes to change that.

    client                                                broker
    ["cluster", 4]                                    ──▶
                                                      ◀──  ["cluster_report", 4, 17, [["node-1", …]], …]
    ["shard_move", 5, "main", 0, "node-2"]            ──▶
                                                      ◀──  ["done", 5]

Any node answers for all. A wish is done as soon as it is recorded; the report shows when it is fulfilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from runnel.formats.heads import Head, Id, Natural


class NodeReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A node that lives, or did. What it measures is a few seconds old; 0: not known."""

    name: str
    address: str  # of its native listener; without a host: the host that the client has reached
    incarnation: int  # rises with each of its lives
    is_alive: bool
    is_draining: bool  # it gives up its shards
    pid: int
    shards: int  # that it serves
    bytes_per_s: float  # in and out
    loop_lag_ms: float


class ShardReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard, and the node that serves it; "": none does at the moment."""

    journal: str
    shard: Natural
    epoch: Natural
    node: str
    wanted: str = ""  # the node that should have it, if that is another one
    reason: str = ""  # of the last wish
    moved_ns: int = 0  # when its node changed last
    bytes_per_s: float = 0.0


class ShardName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard by its name."""

    journal: str
    shard: Natural


class ShardWish(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard should be at a node."""

    journal: str
    shard: Natural
    node: str
    reason: str


class ClusterHead(Head, tag="cluster", frozen=True, gc=False):
    """List nodes and shards. Shards come in order, those after `after`, at most `limit` of them; 0: all."""

    id: Id
    after: ShardName | None = None
    limit: Natural = 0


class MoveShard(Head, tag="shard_move", frozen=True, gc=False):
    """Wish that a node serves a shard; "": take the wish back."""

    id: Id
    journal: str
    shard: Natural
    node: str


class DrainNode(Head, tag="node_drain", frozen=True, gc=False):
    """Let a node give up all its shards and take none; or let it take shards again."""

    id: Id
    node: str
    is_draining: bool = True


class BalanceCluster(Head, tag="cluster_balance", frozen=True, gc=False):
    """Wish for the moves that make loads even, now, though shards were moved a moment ago."""

    id: Id


class ClusterReport(Head, tag="cluster_report", frozen=True, gc=False):
    """The answer to `cluster`."""

    id: Id
    version: int  # rises with every change of nodes and owners
    nodes: Sequence[NodeReport]
    shards: Sequence[ShardReport]
    is_complete: bool


class ClusterWishes(Head, tag="cluster_wishes", frozen=True, gc=False):
    """The answer to `cluster_balance`."""

    id: Id
    wishes: Sequence[ShardWish]


ClusterRequest: TypeAlias = ClusterHead | MoveShard | DrainNode | BalanceCluster
ClusterAnswer: TypeAlias = ClusterReport | ClusterWishes
