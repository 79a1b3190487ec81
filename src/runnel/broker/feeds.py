"""What a subscription reads before it is live: a shard from an entry on, partitions from offsets on, last values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from runnel.broker.live_subscription import Delivery, LiveSubscription
from runnel.broker.live_topics import LIVE_SHARD, LiveTopics
from runnel.errors import OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.wire import GapState
from runnel.log.disk_log import DiskLog
from runnel.log.index import Key
from runnel.log.log import Found, Gap, Passed, Position, ShardId
from runnel.log.memory_log import MemoryLog
from runnel.topics.pattern_index import Walk
from runnel.world.workers import Workers

KeptLog = DiskLog | MemoryLog

_PAGE_BYTES_MAX: Final = 2**20
_PAGE_BYTES_MIN: Final = 2**16


def page_bytes(credit_bytes: int) -> int:
    """How much to read at once for a reader with so much credit."""
    return max(_PAGE_BYTES_MIN, min(credit_bytes, _PAGE_BYTES_MAX))


class Topics(Protocol):
    """Where a feed looks up the topics that there are now."""

    def log_of(self, topic: str) -> KeptLog | None: ...


class ShardFeed:
    """All wanted messages of a shard from a position on, in the order in which they were stored."""

    __slots__ = ("_log", "_position", "_shard", "_tells_passed", "_workers")

    def __init__(
        self,
        log: KeptLog,
        shard: ShardId,
        position: Position,
        workers: Workers,
        *,
        tells_passed: bool = True,
    ) -> None:
        """`tells_passed`: messages that are no longer served are a gap for this reader from the first on.

        Not for one that begins with the earliest: what has expired by then was never its to read.
        """
        self._log = log
        self._shard = shard
        self._position = position
        self._workers = workers
        self._tells_passed = tells_passed

    def lag(self, subscription: LiveSubscription) -> int:  # noqa: ARG002 - its position is here
        return max(0, self._log.entries(self._shard).next_offset - self._position.entry)

    async def step(self, subscription: LiveSubscription) -> bool:
        try:
            page = await self._log.read_shard(
                self._shard, self._position, bytes_max=page_bytes(subscription.credit_bytes)
            )
        except OffsetGoneError as gone:
            subscription.tell_gap(
                GapState(
                    "retention" if gone.gap > 0 else "restart",
                    0,
                    text=f"shard {self._shard} begins at entry {gone.first_offset}; "
                    f"{gone.gap} entries from {gone.offset} on are gone",
                )
            )
            self._position = Position(0, gone.first_offset)
            return self._is_at_end()
        except OffsetAheadError as ahead:
            subscription.tell_gap(GapState("restart", 0, text=str(ahead)))
            self._position = Position(0, ahead.next_offset)
            return self._is_at_end()
        buffers: list[bytes | memoryview] = []
        messages = 0
        for found in page.found:
            block, count = await wanted_block(
                found, subscription.matches, self._position, self._workers
            )
            if count:
                buffers.append(block)
                messages += count
        if subscription.is_closed:
            return True
        for gap in page.gaps:
            subscription.tell_gap(damage_gap(gap))
        if self._tells_passed:
            for passed in passed_gaps(page.passed, subscription.matches, self._log):
                subscription.tell_gap(passed)
        self._position = page.next_position
        if buffers:
            self._tells_passed = True
            subscription.send(
                Delivery(
                    self._shard,
                    page.next_position.epoch,
                    page.next_position.entry,
                    buffers,
                    sum(map(len, buffers)),
                    messages,
                )
            )
        return self._is_at_end()

    def _is_at_end(self) -> bool:
        return self._position.entry >= self._log.entries(self._shard).next_offset


async def wanted_block(
    found: Found, matches: Callable[[str], bool], position: Position, workers: Workers
) -> tuple[bytes | memoryview, int]:
    """The matching part of a stored batch, packed, from a position on; 0 messages: nothing."""
    batch = found.batch
    head = batch.envelope
    runs = [
        run
        for run in (range(head.run_count) if found.runs is None else found.runs)
        if matches(head.topics[run])
    ]
    if not runs:
        return b"", 0
    is_begun = position.row > 0 and head.entry == position.entry
    if len(runs) == head.run_count and not is_begun:
        return found.block, head.message_count
    row = position.row if is_begun else 0

    def cut() -> Batch | None:
        return _behind_row(batch.cut(runs), row)

    wanted = cut() if head.codec == Codec.NONE else await workers.submit(cut)
    return (b"", 0) if wanted is None else (wanted.pack(), len(wanted))


def passed_gaps(
    passed: Sequence[Passed], matches: Callable[[str], bool], log: KeptLog
) -> list[GapState]:
    """Messages that a reader was too slow for: one gap for each partition."""
    gaps: dict[Key, list[int]] = {}
    for topic, number, first, end in passed:
        if matches(topic) and log.has_topic(topic):
            gap = gaps.setdefault((topic, number), [0, first, end])
            gap[0] += end - first
            gap[2] = end
    text = "they passed their age, or were purged, before they were read"
    return [
        GapState("retention", missed, topic, number, first, end, text)
        for (topic, number), (missed, first, end) in gaps.items()
    ]


class PartitionsFeed:
    """The partitions of a subscription's literal topics in one shard, each from its own offset on."""

    __slots__ = ("_log", "_shard", "_topics", "_turn", "_workers")

    def __init__(self, log: KeptLog, shard: ShardId, topics: Topics, workers: Workers) -> None:
        self._log = log
        self._shard = shard
        self._topics = topics
        self._workers = workers
        self._turn = 0

    async def step(self, subscription: LiveSubscription) -> bool:
        keys = self._keys(subscription)
        self._turn += 1
        for at in range(len(keys)):
            key = keys[(self._turn + at) % len(keys)]
            if await self._read(subscription, key):
                return subscription.is_closed
        return True  # nothing was read, so nothing was awaited

    def lag(self, subscription: LiveSubscription) -> int:
        assert subscription.places is not None
        return sum(
            max(0, self._log.next_offset(*key) - subscription.places.get(key, 1))
            for key in self._keys(subscription)
        )

    def _keys(self, subscription: LiveSubscription) -> list[Key]:
        """Looked up each time: a topic may have been made meanwhile, or deleted."""
        return [
            (info.name, number)
            for pattern in subscription.patterns
            if self._topics.log_of(pattern.prefix) is self._log
            for info in (self._log.topic(pattern.prefix),)
            for number, shard in enumerate(info.shards)
            if shard == self._shard
        ]

    async def _read(self, subscription: LiveSubscription, key: Key) -> bool:
        """Deliver the partition's next page; False, without waiting, if there is none."""
        places = subscription.places
        assert places is not None
        offset = places.get(key)
        if offset is not None and offset >= self._log.next_offset(*key):
            return False
        try:
            if offset is None:
                offset = (await self._log.bounds(*key)).first_offset  # made since
                places[key] = offset
                return True
            page = await self._log.read(
                *key, offset, bytes_max=page_bytes(subscription.credit_bytes)
            )
        except OffsetGoneError as gone:
            subscription.tell_gap(
                GapState("retention", gone.gap, *key, gone.offset, gone.first_offset, str(gone))
            )
            places[key] = gone.first_offset
            return True
        except UnknownTopicError:
            places.pop(key, None)  # deleted meanwhile
            return True
        batches = [await wanted_from(found, offset, self._workers) for found in page.found]
        if subscription.is_closed:
            return True
        for gap in page.gaps:
            subscription.tell_gap(damage_gap(gap, key))
        places[key] = page.next_offset
        send_batches(subscription, self._shard, self._log.epoch, batches)
        return True


def send_batches(
    subscription: LiveSubscription, shard: ShardId, epoch: int, batches: Sequence[Batch]
) -> None:
    """Deliver batches that say nothing about the shard's order."""
    buffers = [batch.pack() for batch in batches]
    if buffers:
        messages = sum(map(len, batches))
        size = sum(map(len, buffers))
        subscription.send(Delivery(shard, epoch, 0, buffers, size, messages))


async def wanted_from(found: Found, offset: int, workers: Workers) -> Batch:
    """The runs asked for, from an offset on: a stored batch may begin before it."""

    def cut() -> Batch:
        batch = found.wanted()
        first = batch.runs()[0]
        before = offset - first.base_offset
        return batch.slice(before) if 0 < before < len(batch) else batch

    if found.batch.envelope.codec == Codec.NONE:
        return cut()
    return await workers.submit(cut)


class LastValuesFeed:
    """The last message of every matching partition, as they were when the subscription began.

    Messages that came since are noted in the subscription's `first_new`, and follow from the log.
    """

    __slots__ = ("_live", "_topics", "_walks")

    def __init__(self, topics: Topics, live: LiveTopics, walks: Sequence[Walk]) -> None:
        self._topics = topics
        self._live = live
        self._walks = walks  # over the topics that there were when it began

    async def step(self, subscription: LiveSubscription) -> bool:
        seen: set[str] = set()  # several patterns may match it
        for walk in self._walks:
            while not walk.done:
                for topic in walk.step():
                    if topic not in seen:
                        seen.add(topic)
                        await self._send(subscription, topic)
                await asyncio.sleep(0)
                if subscription.is_closed:
                    return True
        return True

    def lag(self, subscription: LiveSubscription) -> int:  # noqa: ARG002 - nobody counts topics
        return 0

    async def _send(self, subscription: LiveSubscription, topic: str) -> None:
        await subscription.wait_room()
        if subscription.is_closed:
            return
        log = self._topics.log_of(topic)
        if log is not None:
            await self._send_kept(subscription, log, topic)
        else:
            await self._send_live(subscription, topic)

    async def _send_kept(self, subscription: LiveSubscription, log: KeptLog, topic: str) -> None:
        try:
            shards = log.topic(topic).shards
            for number, shard in enumerate(shards):
                batch = await self._last_before(subscription, log, (topic, number))
                if batch is not None:
                    await self._deliver(subscription, shard, log.epoch, batch)
        except UnknownTopicError:
            return  # deleted meanwhile

    async def _last_before(
        self, subscription: LiveSubscription, log: KeptLog, key: Key
    ) -> Batch | None:
        assert subscription.first_new is not None
        batch = await log.last(*key)
        end = subscription.first_new.get(key)
        if end is None or (batch is not None and batch.runs()[0].base_offset < end):
            return batch
        if end <= 1:
            return None
        # Something came since the subscription began: look for what was last before it.
        try:
            page = await log.read(*key, end - 1, bytes_max=1)
        except (OffsetGoneError, OffsetAheadError):
            return None
        for found in page.found:
            wanted = found.wanted()
            first = wanted.runs()[0].base_offset
            if first <= end - 1 < first + len(wanted):
                return wanted.slice(end - 1 - first, end - first)
        return None

    async def _send_live(self, subscription: LiveSubscription, name: str) -> None:
        topic = self._live.find(name)
        if topic is None:
            return
        assert subscription.first_new is not None
        for number in range(topic.policy.partitions):
            batch = topic.last_message(number)
            # If something has come since, the newest waits in the queue.
            if batch is not None and (name, number) not in subscription.first_new:
                await self._deliver(subscription, LIVE_SHARD, topic.epoch, batch)

    async def _deliver(
        self, subscription: LiveSubscription, shard: ShardId, epoch: int, batch: Batch
    ) -> None:
        await subscription.wait_room()
        if not subscription.is_closed:
            send_batches(subscription, shard, epoch, [batch])


def _behind_row(batch: Batch, row: int) -> Batch | None:
    """Without the rows that lie before this one in the entry as it was first stored."""
    if not row:
        return batch
    wanted: list[int] = []
    begin = 0
    for run in batch.runs():
        wanted += range(begin + max(0, min(run.count, row - run.row)), begin + run.count)
        begin += run.count
    return batch.take(wanted) if wanted else None


def damage_gap(gap: Gap, key: Key | None = None) -> GapState:
    text = f"{gap.path}:{gap.position}: {gap.problem}"
    if key is None:
        return GapState("damage", 0, text=text)
    missed = gap.next_offset - gap.first_offset
    return GapState("damage", missed, *key, gap.first_offset, gap.next_offset, text)
