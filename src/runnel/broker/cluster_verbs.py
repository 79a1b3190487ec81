"""The verbs about the cluster: who serves what, and wishes to change it. Any node carries them out for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from runnel.cluster import ClusterNode, Wish
from runnel.cluster.state import ClusterView, NodeLoad
from runnel.errors import ClientFault
from runnel.formats.cluster_heads import NodeReport, ShardReport, ShardWish
from runnel.log.log import ShardId

_ALONE: Final = (
    "this broker is one process, and no cluster: `runnel serve --processes N` runs several"
)


class ClusterVerbs:
    """What callers may ask of the cluster that this broker is part of."""

    def __init__(self, node: ClusterNode | None) -> None:
        """`node` is None for a broker that is alone."""
        self._joined = node

    @property
    def _node(self) -> ClusterNode:
        if self._joined is None:
            raise ClientFault(_ALONE)
        return self._joined

    async def report(
        self, *, after: ShardId | None = None, limit: int = 0
    ) -> tuple[int, Sequence[NodeReport], Sequence[ShardReport], bool]:
        """The version of the state, the nodes, and so many shards behind `after`; False: there are more."""
        state = self._node.state
        view = state.view()
        loads = {load.node: load for load in await state.loads()}
        shards = sorted(view.owners, key=_place)
        if after is not None:
            shards = [shard for shard in shards if _place(shard) > _place(after)]
        page = shards[:limit] if limit else shards
        return (
            view.version,
            _node_reports(view, loads),
            [_shard_report(view, shard, loads) for shard in page],
            len(page) == len(shards),
        )

    async def move(self, shard: ShardId, node: str) -> None:
        """Wish that a node serves a shard; "" takes the wish back. ClientFault if there is no such node or shard."""
        state = self._node.state
        row = state.view().owners.get(shard)
        if row is None:
            raise ClientFault(f"there is no shard {shard}; `runnel cluster status` lists all")
        if row.owner == node and state.view().is_served(shard):
            node = ""  # it is there already
        await self._node.wish([Wish(shard, node, "an operator wishes it")])

    async def drain(self, node: str, *, is_draining: bool) -> None:
        """Let a node give up its shards, or take some again. ClientFault if no such node lives."""
        await self._node.state.set_draining(node, is_draining=is_draining)

    async def balance(self) -> Sequence[ShardWish]:
        """Wish for the moves of one round, at once. Returns them."""
        wishes = await self._node.balance()
        return [
            ShardWish(wish.shard.journal, wish.shard.shard, wish.node, wish.reason)
            for wish in wishes
        ]


def _place(shard: ShardId) -> tuple[str, int]:
    return shard.journal, shard.shard


def _node_reports(view: ClusterView, loads: Mapping[str, NodeLoad]) -> list[NodeReport]:
    counts = dict.fromkeys(view.nodes, 0)
    for shard, row in view.owners.items():
        if view.is_served(shard):
            counts[row.owner] += 1
    reports = []
    for name, node in sorted(view.nodes.items()):
        load = loads.get(name, NodeLoad(name, 0.0, {}))
        reports.append(
            NodeReport(
                name,
                node.address,
                node.incarnation,
                node.is_alive,
                node.is_draining,
                load.pid,
                counts[name],
                sum(load.bytes_per_s.values()),
                load.loop_lag_ms,
            )
        )
    return reports


def _shard_report(view: ClusterView, shard: ShardId, loads: Mapping[str, NodeLoad]) -> ShardReport:
    row = view.owners[shard]
    owner = row.owner if view.is_served(shard) else ""
    load = 0.0 if owner not in loads else loads[owner].bytes_per_s.get(str(shard), 0.0)
    return ShardReport(
        shard.journal,
        shard.shard,
        row.epoch,
        owner,
        row.wanted,
        row.reason,
        row.moved_ns,
        load,
    )
