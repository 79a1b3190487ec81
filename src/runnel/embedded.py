"""Runnel inside a program or a test: for now the log, on the machine's own disk and clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runnel.config import Settings
from runnel.log.disk_log import DiskLog
from runnel.topics.policies import Policies
from runnel.world.clock import SystemClock
from runnel.world.disk import RealDisk
from runnel.world.workers import ThreadWorkers


@asynccontextmanager
async def open_log(directory: str, settings: Settings | None = None) -> AsyncIterator[DiskLog]:
    """The log of a data directory, made if there is none, closed at the end of the `async with`."""
    settings = settings or Settings()
    workers = ThreadWorkers(settings.log.writers)
    try:
        log = await DiskLog.open(
            directory,
            settings=settings,
            policies=Policies(settings.topics, partitions_max=settings.limits.partitions_max),
            disk=RealDisk(),
            clock=SystemClock(),
            workers=workers,
        )
        try:
            yield log
        finally:
            await log.close()
    finally:
        workers.close()
