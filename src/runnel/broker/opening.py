"""Opens the stores of a broker: the only module of the broker that knows which kinds of store there are."""

from __future__ import annotations

from runnel.broker.stores import Locate, Stores
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
    locate: Locate | None = None,
) -> Stores:
    """Open the stores. Without a directory, topics with `keep = "disk"` are kept in memory too.

    `locate` tells where a shard is that is not served here.
    """
    policies = Policies(settings.topics, partitions_max=settings.limits.partitions_max)

    def in_memory(keep: Keep) -> Store:
        return MemoryLog(
            settings=settings,
            policies=policies,
            clock=clock,
            keep=keep,
            listener=listener,
            holds=holds,
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
        )
    )
    return Stores(policies, main, in_memory(Keep.MEMORY), locate)
