"""Opens the stores of a broker: the only module of the broker that knows which kinds of store there are."""

from __future__ import annotations

import msgspec

from runnel.broker.live_shards import LiveShards
from runnel.broker.stores import Stores
from runnel.cluster import JOURNAL_SHARDS, ClusterNode
from runnel.config import Keep, Settings
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import LogListener, Store, SubscriptionHolds
from runnel.log.memory import MemoryLog
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers
from runnel.topics.policies import Policies


async def open_stores(
    settings: Settings,
    *,
    directory: str | None,
    disk: Disk,
    clock: Clock,
    workers: Workers,
    listener: LogListener,
    holds: SubscriptionHolds,
    node: ClusterNode | None = None,
) -> Stores:
    """Open the stores. Without a directory, topics with `keep = "disk"` are kept in memory too.

    With a `node` this broker is one of several that serve the directory: it serves the shards that the node takes.
    """
    if node is not None and directory is None:
        raise ValueError("several brokers share a directory")
    if node is not None and settings.log.journal_shards < JOURNAL_SHARDS:
        log_settings = msgspec.structs.replace(settings.log, journal_shards=JOURNAL_SHARDS)
        settings = msgspec.structs.replace(settings, log=log_settings)
    policies = Policies(settings.topics, partitions_max=settings.limits.partitions_max)

    def in_memory(keep: Keep) -> Store:
        return MemoryLog(
            settings=settings,
            policies=policies,
            clock=clock,
            keep=keep,
            listener=listener,
            holds=holds,
            terms=node if keep is Keep.MEMORY else None,
        )

    main = (
        in_memory(Keep.DISK)
        if directory is None
        else await DiskLog.open(
            directory,
            settings=settings,
            policies=policies,
            disk=disk,
            clock=clock,
            workers=workers,
            listener=listener,
            holds=holds,
            shared=None if node is None else node.metadata,
            terms=node,
        )
    )
    live_shards = None if node is None else LiveShards(clock, node, JOURNAL_SHARDS)
    return Stores(policies, main, in_memory(Keep.MEMORY), live_shards, node)
