"""The stores that the contract is run against, each opened afresh for a scenario."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from runnel.config import Keep, LimitSettings, LogSettings, Settings, TopicRule
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.group_store import BatchGroup
from runnel.log.log import (
    Level,
    NullListener,
    OwnedShard,
    PartitionPage,
    Position,
    ShardId,
    ShardOwnership,
    SubscriptionHolds,
)
from runnel.log.log import Store as LogStore
from runnel.log.memory import MemoryLog
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.lossy_store import Fate, lossy
from tests.fakes.workers import SimulatedWorkers
from tests.log.fake_holds import Acknowledged, FakeHolds

# Small, so that fake disks stay small, and no room is kept free on the machine's own.
LOG = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0)


class Store(enum.Enum):
    MEMORY = "memory"
    DISK = "disk"
    FAKE_DISK = "fake disk"
    LOST_ANSWERS = (
        "lost answers"  # a fake disk, where each group is stored with an unknown outcome at first
    )


class OwnershipRecorder(NullListener):
    """Notes which shards came and went, with their epochs. `asked` is awaited before a planned release."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ShardId, int]] = []
        self.asked: Callable[[OwnedShard], Awaitable[None]] = super().before_release

    async def before_release(self, shard: OwnedShard) -> None:
        await self.asked(shard)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        self.heard.append(("acquired", shard.id, shard.epoch))

    def on_shard_released(self, shard: OwnedShard) -> None:
        self.heard.append(("released", shard.id, shard.epoch))


@dataclass
class At:
    """What a scenario has in its hands: an open log, by its interfaces alone, and the clock that it goes by."""

    log: LogStore
    clock: VirtualClock
    store: Store
    holds: FakeHolds
    """What the log was opened with, if the scenario has subscriptions."""

    listener: OwnershipRecorder

    @property
    def owner(self) -> ShardOwnership:
        """The log, as what begins and ends serving a shard."""
        assert isinstance(self.log, MemoryLog | DiskLog)
        return self.log

    @property
    def keeps_what_it_releases(self) -> bool:
        """A later term of a shard has what was stored in the terms before it."""
        return self.log.capabilities.keeps_positions

    def subscribed(self, **subscriptions: Acknowledged) -> FakeHolds:
        """Let there be these subscriptions from now on."""
        self.holds.subscriptions = subscriptions
        self.holds.version += 1
        return self.holds

    @property
    def best_level(self) -> Level:
        """The most that this store can promise."""
        return Level.STORED if self.log.capabilities.is_durable else Level.RECEIVED

    async def read_all(self, topic: str, offset: int, partition: int = 0) -> list[PartitionPage]:
        """Pages of one batch each from an offset to the end."""
        pages: list[PartitionPage] = []
        while (page := await self.log.read(topic, partition, offset, bytes_max=1)).found:
            pages.append(page)
            offset = page.next_offset
        assert page.next_offset == (await self.log.bounds(topic, partition)).next_offset
        return pages

    async def read_shard_all(self, shard: ShardId, position: Position) -> list[Message]:
        """Everything from a position to the end; a page may be empty and yet lead on."""
        messages: list[Message] = []
        while position.entry < self.log.shard(shard).entries().next_offset:
            page = await self.log.read_shard(shard, position)
            messages += [message for found in page.found for message in found.wanted()]
            assert page.next_position.entry > position.entry
            position = page.next_position
        assert not (await self.log.read_shard(shard, position)).found
        return messages


Scenario = Callable[[At], Awaitable[None]]
ScenarioTest = Callable[[Store, Path], None]


def scenario(
    *rules: TopicRule,
    log: LogSettings = LOG,
    limits: LimitSettings | None = None,
    knows_subscriptions: bool = False,
) -> Callable[[Scenario], ScenarioTest]:
    """Makes a test of a coroutine: it runs once for each store, with these rules and settings.

    All topics are `keep = "disk"` by their rules: the memory store is set to take those. The log is told what
    subscriptions are owed only with `knows_subscriptions`.
    """
    settings = Settings(log=log, limits=limits or LimitSettings())

    def decorate(run: Scenario) -> ScenarioTest:
        def test(store: Store, tmp_path: Path) -> None:
            directory = str(tmp_path / "data")
            asyncio.run(
                _run(
                    store, directory, settings, rules, run, knows_subscriptions=knows_subscriptions
                )
            )

        test.__name__ = run.__name__
        test.__doc__ = run.__doc__
        return test

    return decorate


def _lose_first_answer(group: BatchGroup, is_repeated: bool) -> Fate:
    """Of every second group before it is stored, of the others after it."""
    if is_repeated:
        return Fate.STORED
    return Fate.LOST_AFTER if group.first_entry % 2 else Fate.LOST_BEFORE


async def _run(
    store: Store,
    directory: str,
    settings: Settings,
    rules: Sequence[TopicRule],
    run: Scenario,
    *,
    knows_subscriptions: bool,
) -> None:
    holds, listener = FakeHolds(), OwnershipRecorder()
    told: SubscriptionHolds | None = holds if knows_subscriptions else None
    clock = VirtualClock()
    policies = Policies(rules)
    workers = ThreadWorkers(2) if store is Store.DISK else SimulatedWorkers(Random(run.__name__))
    try:
        log: LogStore
        if store is Store.MEMORY:
            log = MemoryLog(
                settings=settings,
                policies=policies,
                clock=clock,
                keep=Keep.DISK,
                listener=listener,
                holds=told,
            )
        else:
            losing = lossy(workers, _lose_first_answer) if store is Store.LOST_ANSWERS else None
            log = await DiskLog.open(
                directory,
                settings=settings,
                policies=policies,
                disk=RealDisk() if store is Store.DISK else FakeDisk(1),
                clock=clock,
                workers=workers,
                listener=listener,
                holds=told,
                make_group_store=losing,
            )
        try:
            await run(At(log, clock, store, holds, listener))
        finally:
            await log.close()
    finally:
        workers.close()
