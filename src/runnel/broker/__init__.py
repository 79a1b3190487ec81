"""The broker's verbs, and what joins the logs to their readers. Read `broker.py` first.

access, access_rules          the verbs as one authenticated client may use them: rights and quotas checked
broker                        publish, fetch, subscribe, topics, cursors: what every listener calls
stores                        which log keeps a topic: disk, memory or none
message_batcher, validation   single messages become batches; what a batch must be
fetcher, shard_fetcher        replay by offset and time; whole shards for Spark
topics, topic_creator, cursors, producer_terms, connections, pages    what can be created and listed
limits/, metered_sinks        quotas and rates of each token, and fairness among connections
cluster_nodes, live_shards, node_reports    what a broker knows where there are several
live/                         subscriptions by pattern, and ephemeral topics
consumer_groups/              acknowledged work
monitoring/                   metrics, events, audit trail
log_maintenance               periodic retention and checks of the logs
"""

__all__ = [
    "access",
    "broker",
    "cluster_nodes",
    "connections",
    "consumer_groups",
    "cursors",
    "fetcher",
    "limits",
    "live",
    "log_maintenance",
    "monitoring",
    "pages",
    "shard_fetcher",
]
