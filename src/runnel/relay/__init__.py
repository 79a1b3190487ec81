"""Relays of a cluster's node: callers that know nothing of nodes get answers for all of them. Read `access.py` first.

access          the verbs: done here, relayed to the owner of a shard, or done by every node and merged
relays          what all accesses share: finding owners, asking every node for its part
monitoring      metrics and statistics of all nodes
live            live subscriptions over all nodes
work            consumers over all nodes; work_parts: their parts, named_parts: what requests name of deliveries
node_links      the links of one live subscription or consumer
peers, dialling links to other nodes, one for each caller's token
publish_lines   publishes that are relayed, in their order
merging, stamps    parts of answers become one; whether they add up (pure)
"""

from runnel.relay.access import access_maker
from runnel.relay.dialling import dialler
from runnel.relay.relays import Relays

__all__ = ["Relays", "access_maker", "dialler"]
