"""Which node serves which shard, where several nodes share one set of topics. Read `node.py` first.

state      what the nodes know together: nodes, owners, terms     memory     the same within one process, for tests
ownership  which shards a node takes and gives up (pure)          planning   which shards should move (pure)
node       one broker among them: does what the two decide
"""

from runnel.cluster import memory, planning, state
from runnel.cluster.node import JOURNAL_SHARDS, ClusterNode, NodeObserver, Place, ShardHost
from runnel.cluster.planning import Wish

__all__ = [
    "JOURNAL_SHARDS",
    "ClusterNode",
    "NodeObserver",
    "Place",
    "ShardHost",
    "Wish",
    "memory",
    "planning",
    "sqlite",
    "state",
]
