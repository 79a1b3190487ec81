"""Moves the shards of an embedded cluster from node to node, in the background of a test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from runnel.config import Keep
from runnel.log.log import ShardId
from runnel.testing.cluster import EmbeddedCluster
from runnel.topics.names import LIVE_JOURNAL
from runnel.topics.policies import Policies


@asynccontextmanager
async def moving_shards(
    cluster: EmbeddedCluster, *, pause_s: float = 0.02, is_disk_only: bool = False
) -> AsyncIterator[Callable[[], int]]:
    """Move a random shard after every pause, until the end. Yields a function that says how many have moved.

    `is_disk_only`: leave alone what a move loses, which is not on disk.
    """
    dice = random.Random(1)
    moves = 0
    rules = cluster.settings
    policies = Policies(rules.topics, partitions_max=rules.limits.partitions_max)

    def is_moved(shard: ShardId) -> bool:
        is_on_disk = shard.journal != LIVE_JOURNAL and (
            policies.keep_of_journal(shard.journal) is Keep.DISK
        )
        return is_on_disk or not is_disk_only

    async def move() -> None:
        nonlocal moves
        while True:
            running = [node for node in cluster.nodes if node.is_running]
            served = sorted(filter(is_moved, (s for node in running for s in node.shards())))
            if served and len(running) > 1:
                await cluster.move(dice.choice(served), dice.choice(running).name)
                moves += 1
            await asyncio.sleep(pause_s)

    task = asyncio.ensure_future(move())
    try:
        yield lambda: moves
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
