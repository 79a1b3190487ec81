"""The tables of `runnel cluster status`."""

from __future__ import annotations

from runnel.cli.render.cluster_tables import node_table, shard_table
from runnel.formats.cluster_heads import NodeReport, ShardReport

T0 = 1_700_000_000_123_456_789


def test_nodes_with_what_they_carry() -> None:
    nodes = [
        NodeReport("node-1", ":7471", 3, True, False, 4711, 12, 1_250_000.0, 0.25),
        NodeReport("node-2", ":7472", 1, True, True, 4712, 0, 0.0, 12.0),
        NodeReport("node-3", ":7473", 9, False, False, 0, 0, 0.0, 0.0),
    ]
    assert node_table(nodes).lines() == [
        "node    state   life   pid  address  shards       load  lag ms",
        "node-1  serves     3  4711  :7471        12  1.2 MiB/s     0.2",
        "node-2  drains     1  4712  :7472         0               12.0",
        "node-3  gone       9        :7473         0                0.0",
    ]


def test_shards_with_their_nodes_and_where_they_go() -> None:
    shards = [
        ShardReport("main", 3, 7, ""),
        ShardReport("main", 12, 2, "node-1", "node-2", "node-1 drains", T0, 2048.0),
    ]
    assert shard_table(shards).lines() == [
        "shard    node    epoch       load  since",
        "main/3   nobody      7",
        "main/12  node-1      2  2.0 KiB/s  2023-11-14T22:13:20.123Z  moves to node-2: node-1 drains",
    ]
