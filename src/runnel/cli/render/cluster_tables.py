"""Tables of the nodes of a cluster and their shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runnel.cli.render.tables import Table, human_bytes
from runnel.cli.render.times import format_time
from runnel.formats.cluster_heads import NodeReport, ShardReport


def node_table(nodes: Sequence[NodeReport]) -> Table:
    """The nodes with what they carry."""
    rows = [
        (
            node.name,
            _state(node),
            str(node.incarnation),
            str(node.pid) if node.pid else "",
            node.address,
            f"{node.shards:,}",
            _rate(node.bytes_per_s),
            f"{node.loop_lag_ms:.1f}",
        )
        for node in nodes
    ]
    columns = ("node", "state", "life", "pid", "address", "shards", "load", "lag ms")
    return Table(columns, rows, frozenset(("life", "pid", "shards", "load", "lag ms")))


def shard_table(shards: Sequence[ShardReport]) -> Table:
    """Who serves which shard."""
    rows = [
        (
            f"{shard.journal}/{shard.shard}",
            shard.node or "nobody",
            str(shard.epoch),
            _rate(shard.bytes_per_s),
            _to_the_millisecond(shard.moved_ns) if shard.moved_ns else "",
            f"moves to {shard.wanted}: {shard.reason}" if shard.wanted else shard.reason,
        )
        for shard in shards
    ]
    columns = ("shard", "node", "epoch", "load", "since", "")
    return Table(columns, rows, frozenset(("epoch", "load")))


def _state(node: NodeReport) -> str:
    if not node.is_alive:
        return "gone"
    return "drains" if node.is_draining else "serves"


def _to_the_millisecond(time_ns: int) -> str:
    return f"{format_time(time_ns)[:-7]}Z"


def _rate(bytes_per_s: float) -> str:
    return "" if bytes_per_s < 1 else f"{human_bytes(bytes_per_s)}/s"
