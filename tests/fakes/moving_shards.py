"""Moves the shards of an embedded cluster from node to node, in the background of a test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from runnel.testing.cluster import EmbeddedCluster


@asynccontextmanager
async def moving_shards(
    cluster: EmbeddedCluster, *, pause_s: float = 0.02
) -> AsyncIterator[Callable[[], int]]:
    """Move a random shard after every pause, until the end. Yields a function that says how many have moved."""
    dice = random.Random(1)
    moves = 0

    async def move() -> None:
        nonlocal moves
        while True:
            running = [node for node in cluster.nodes if node.is_running]
            served = sorted(shard for node in running for shard in node.shards())
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
