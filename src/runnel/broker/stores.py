"""Finds where a topic is kept: in the log on disk, in the log in memory, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from runnel.config import Keep, Settings
from runnel.errors import ClientFault, LimitExceededError, UnknownTopicError
from runnel.formats.wire import Owner, Route
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import LogListener, ShardId
from runnel.log.memory import MemoryLog
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers
from runnel.topics.names import LIVE_JOURNAL, check_topic
from runnel.topics.policies import Difference, Policies

KeptLog = DiskLog | MemoryLog

# The shard in routes of ephemeral topics, which have no journal.
LIVE_SHARD: Final = ShardId(LIVE_JOURNAL)

# The most names in one request for routes: they are looked up on the loop, one after the other.
ROUTES_MAX: Final = 10_000


class EphemeralNames(Protocol):
    """The part of `EphemeralTopics` that routes and rules need."""

    @property
    def epoch(self) -> int: ...

    def knows(self, topic: str) -> bool: ...

    def find(self, topic: str) -> object | None: ...

    def follow_rules(self) -> Iterator[None]: ...


class Stores:
    """The logs of a broker. A topic's `keep` decides which log has it."""

    def __init__(self, policies: Policies, disk: KeptLog, memory: MemoryLog) -> None:
        self.policies = policies
        self.disk = disk
        self.memory = memory
        self.ephemeral: EphemeralNames  # the broker sets it before anything is published

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        directory: str | None,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        listener: LogListener,
    ) -> Stores:
        """Open the logs. Without a directory, topics with `keep = "disk"` are kept in memory too."""
        policies = Policies(settings.topics, partitions_max=settings.limits.partitions_max)
        memory = MemoryLog(settings=settings, policies=policies, clock=clock, listener=listener)
        if directory is None:
            stand_in = MemoryLog(
                settings=settings,
                policies=policies,
                clock=clock,
                keep=Keep.DISK,
                listener=listener,
            )
            return cls(policies, stand_in, memory)
        log = await DiskLog.open(
            directory,
            settings=settings,
            policies=policies,
            disk=disk,
            clock=clock,
            workers=workers,
            listener=listener,
        )
        return cls(policies, log, memory)

    @property
    def kept(self) -> tuple[KeptLog, ...]:
        return (self.disk, self.memory)

    async def follow_rules(self, policies: Policies) -> Sequence[Difference]:
        """Apply other topic rules from now on. Returns where existing topics differ from them and stay as they are."""
        self.policies.follow(policies)
        for _ in self.ephemeral.follow_rules():
            await asyncio.sleep(0)
        return [each for log in self.kept for each in await log.follow_rules()]

    def log_of(self, topic: str) -> KeptLog | None:
        """The log that has this topic; None if no log has it."""
        if self.disk.has_topic(topic):
            return self.disk
        return self.memory if self.memory.has_topic(topic) else None

    def log_for(self, topic: str) -> KeptLog | None:
        """The log that this topic's messages go to; None: they are not kept."""
        log = self.log_of(topic)
        if log is not None or self.ephemeral.knows(topic):
            return log
        match self.policies.for_topic(topic).keep:
            case Keep.DISK:
                return self.disk
            case Keep.MEMORY:
                return self.memory
        return None

    def existing(self, topic: str) -> KeptLog:
        """The log that has this topic; otherwise an error says why no log has it."""
        log = self.log_of(topic)
        if log is not None:
            return log
        check_topic(topic)
        if self.policies.for_topic(topic).keep is Keep.NONE:
            raise ClientFault(
                f"topic {topic!r} is not kept, so there is nothing to fetch: subscribe to it"
            )
        raise UnknownTopicError(f"topic {topic!r} does not exist")

    def shards(self) -> Iterator[tuple[KeptLog, ShardId]]:
        for log in self.kept:
            for shard in log.shards():
                yield log, shard

    def log_of_shard(self, shard: ShardId) -> KeptLog | None:
        """The log that has this shard, also if nothing is stored there yet."""
        return next((log for log in self.kept if log.has_shard(shard)), None)

    def routes(self, topics: Sequence[str]) -> list[Route]:
        if len(topics) > ROUTES_MAX:
            raise LimitExceededError(
                f"routes of {len(topics)} topics at once; at most {ROUTES_MAX} can be asked for"
            )
        return [self._route(topic) for topic in topics]

    def _route(self, topic: str) -> Route:
        log = self.log_of(topic)
        if log is not None:
            info = log.topic(topic)
            owners = [Owner(shard.journal, shard.shard, log.epoch) for shard in info.shards]
            return Route(topic, info.policy.keep, owners)
        check_topic(topic)
        policy = self.policies.for_topic(topic)
        if policy.keep is Keep.NONE:
            epoch, shards = self.ephemeral.epoch, [LIVE_SHARD] * policy.partitions
        else:
            log = self.disk if policy.keep is Keep.DISK else self.memory
            epoch, shards = log.epoch, log.shards_of_new(topic, policy)
        owners = [Owner(shard.journal, shard.shard, epoch) for shard in shards]
        exists = self.ephemeral.find(topic) is not None
        return Route(topic, policy.keep, owners, exists)

    async def close(self) -> None:
        try:
            await self.disk.close()
        finally:
            await self.memory.close()
