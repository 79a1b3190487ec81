"""Runnel inside a program or a test: for now the log, on the machine's own disk and clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import PathLike

import structlog

from runnel.config import Settings
from runnel.errors import Unavailable
from runnel.log.disk_log import DiskLog
from runnel.topics.policies import Policies
from runnel.world.clock import Clock, SystemClock
from runnel.world.disk import RealDisk
from runnel.world.workers import ThreadWorkers

logger = structlog.get_logger("runnel")


@asynccontextmanager
async def open_log(
    directory: str | PathLike[str], settings: Settings | None = None
) -> AsyncIterator[DiskLog]:
    """The log of a data directory, made if there is none, closed at the end of the `async with`.

    Retention is applied every `log.retention_interval` as long as it is open. It takes topics that are kept
    on disk; those with `keep = "memory"` or `"none"` need a broker.
    """
    settings = settings or Settings()
    clock = SystemClock()
    workers = ThreadWorkers(settings.log.writers)
    try:
        log = await DiskLog.open(
            directory,
            settings=settings,
            policies=Policies(settings.topics, partitions_max=settings.limits.partitions_max),
            disk=RealDisk(),
            clock=clock,
            workers=workers,
        )
        keeper = asyncio.get_running_loop().create_task(keep_house(log, settings, clock))
        try:
            yield log
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await log.close()
    finally:
        workers.close()


async def keep_house(log: DiskLog, settings: Settings, clock: Clock) -> None:
    """Apply retention again and again. A round that fails is told of, and the next one tries again."""
    while True:
        await clock.sleep(settings.log.retention_interval_ns / 1e9)
        try:
            trimmed = await log.trim()
        except (OSError, Unavailable) as error:
            logger.warning("retention failed", error=str(error))
        else:
            for cursor in trimmed.pins_passed:
                logger.warning("a cursor's ceiling was reached: it will meet a gap", cursor=cursor)
