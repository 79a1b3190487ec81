"""The bus's verbs for a cluster: who serves what, and wishes to change it."""

from __future__ import annotations

from collections.abc import Sequence

from runnel.client.requests import PER_PAGE, BusRequests
from runnel.client.results import ClusterStatus
from runnel.errors import ClientFault
from runnel.formats import cluster_heads as heads


class ClusterRequests(BusRequests):
    """The part of `Bus` that is about the nodes of a cluster. All of it needs the right `admin` for everything."""

    async def cluster(self) -> ClusterStatus:
        """The nodes, and which of them serves which shard."""
        found: list[heads.ShardReport] = []
        while True:
            after = heads.ShardName(found[-1].journal, found[-1].shard) if found else None
            answer, _ = await self._ask(
                heads.ClusterReport,
                lambda number, after=after: heads.ClusterHead(  # type: ignore[misc]
                    number, after, PER_PAGE
                ),
                "asking for the cluster",
            )
            found += answer.shards
            if answer.is_complete or not answer.shards:
                return ClusterStatus(answer.version, answer.nodes, found)

    async def move_shard(self, shard: str, node: str) -> None:
        """Wish that a node serves a shard, such as "main/3". It moves a moment later: `cluster` shows it."""
        journal, slash, number = shard.rpartition("/")
        if not slash or not number.isdecimal():
            raise ClientFault(f'{shard!r} is no shard: write its journal and number, as "main/3"')
        await self._do(
            lambda id_: heads.MoveShard(id_, journal, int(number), node), f"moving {shard}"
        )

    async def drain_node(self, node: str, *, is_draining: bool = True) -> None:
        """Let a node give up all its shards and take none; or, with False, let it take shards again."""
        await self._do(
            lambda number: heads.DrainNode(number, node, is_draining), f"draining {node}"
        )

    async def balance_cluster(self) -> Sequence[heads.ShardWish]:
        """Wish for the moves that make loads even now. Returns them; an empty list: nothing would be better."""
        answer, _ = await self._ask(
            heads.ClusterWishes, heads.BalanceCluster, "balancing", is_repeatable=False
        )
        return answer.wishes
