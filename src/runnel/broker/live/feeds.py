"""Feeds, which read the log for a subscription: a shard from an entry on, partitions from offsets on, last values."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple, Protocol

from runnel.broker.live.ephemeral_topics import EphemeralTopics
from runnel.broker.live.subscription import LAST_SENT, Feed, LiveDelivery, LiveSubscription
from runnel.broker.live_shards import LIVE_SHARD
from runnel.errors import OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.wire import GapState
from runnel.log.log import (
    Chosen,
    DamageGap,
    EntryPage,
    FoundBatch,
    OwnedShard,
    Position,
    ShardId,
    Store,
    TopicView,
)
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.pattern_index import Walk

_PAGE_BYTES_MAX: Final = 2**20
_PAGE_BYTES_MIN: Final = 2**16
# Topics whose last values are looked up together: a batch that many of them share is then read less often.
_TOPICS_AT_ONCE: Final = 2000
_EPHEMERAL_AT_ONCE: Final = 100
# Cutting goes through all runs of the batch, wanted or not.
_RUNS_CUT_ON_LOOP_MAX: Final = 4096


def page_bytes(credit_bytes: int) -> int:
    """How much to read at once for a reader with this much credit."""
    return max(_PAGE_BYTES_MIN, min(credit_bytes, _PAGE_BYTES_MAX))


class TopicLogs(Protocol):
    """Finds the logs of the topics that exist now."""

    def log_of(self, topic: str) -> Store | None: ...


class ShardFeed:
    """Reads the matching messages of a shard from a position on, in the order in which they were stored."""

    __slots__ = ("_log", "_position", "_reports_passed", "_shard", "_workers")

    def __init__(
        self,
        log: Store,
        shard: OwnedShard,
        position: Position,
        workers: Workers,
        *,
        reports_passed: bool = True,
    ) -> None:
        """`reports_passed`: messages that are no longer served are a gap for this reader from the first on.

        It is False for a reader that begins with the earliest message: expired messages were never due to it.
        """
        self._log = log
        self._shard = shard
        self._position = position
        self._workers = workers
        self._reports_passed = reports_passed

    def lag(self, subscription: LiveSubscription) -> int:  # noqa: ARG002 - its position is here
        return max(0, self._shard.entries().next_offset - self._position.entry)

    def has_passed(self, entry: int) -> bool:
        """Whether the feed has read past an entry."""
        return self._position.epoch in (0, self._shard.epoch) and entry < self._position.entry

    async def step(self, subscription: LiveSubscription) -> bool:
        try:
            page = await self._log.read_shard(
                self._shard.id, self._position, bytes_max=page_bytes(subscription.credit_bytes)
            )
        except OffsetGoneError as gone:
            text = (
                f"shard {self._shard.id} begins at entry {gone.first_offset}; "
                f"{gone.gap} entries from {gone.offset} on are gone"
            )
            gap = GapState("retention" if gone.gap > 0 else "restart", 0, text=text)
            return self._jump(subscription, gone.first_offset, gap)
        except OffsetAheadError as ahead:
            gap = GapState("restart", 0, text=str(ahead))
            return self._jump(subscription, ahead.next_offset, gap)
        buffers: list[bytes | memoryview] = []
        messages = 0
        for found in page.found:
            block, count = await wanted_block(
                found, subscription.matches, self._position, self._workers
            )
            if count:
                buffers.append(block)
                messages += count
        if not subscription.is_read_by(self._shard.id, self):
            return True
        gaps = damage_gaps(page, subscription.matches)
        if self._reports_passed:
            gaps += passed_gaps(page, subscription.matches, self._log.metadata.topics)
        for gap in gaps:
            subscription.report_gap(gap, self._shard.id)
        self._position = page.next_position
        if buffers:
            self._reports_passed = True
        if buffers or gaps:
            self._send(subscription, page.next_position, buffers, messages)
        return self._is_at_end()

    def _jump(self, subscription: LiveSubscription, entry: int, gap: GapState) -> bool:
        if not subscription.is_read_by(self._shard.id, self):
            return True
        subscription.report_gap(gap, self._shard.id)
        self._position = Position(0, entry)
        self._send(subscription, Position(self._shard.epoch, entry), (), 0)
        return self._is_at_end()

    def _send(
        self,
        subscription: LiveSubscription,
        position: Position,
        buffers: Sequence[bytes | memoryview],
        messages: int,
    ) -> None:
        """Send blocks. Without blocks, send the read position, so that no gap is reported again after a reconnect."""
        size = sum(map(len, buffers))
        subscription.send(
            LiveDelivery(self._shard.id, position.epoch, position.entry, buffers, size, messages)
        )

    def _is_at_end(self) -> bool:
        return self._position.entry >= self._shard.entries().next_offset


async def wanted_block(
    found: FoundBatch, matches: Callable[[str], bool], position: Position, workers: Workers
) -> tuple[bytes | memoryview, int]:
    """The matching messages of a stored batch from a position on, packed, and their number."""
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
    page: EntryPage, matches: Callable[[str], bool], topics: TopicView
) -> list[GapState]:
    """Gaps of messages that expired before they were read: one for each stretch of a partition that is not served.

    Messages of a stretch that are no longer in the log count too.
    """
    if not page.passed:
        return []
    served = _base_offsets(page.found, matches)
    stretches: dict[TopicPartition, list[tuple[int, int]]] = {}
    for topic, number, first, end in page.passed:
        if not matches(topic) or not topics.has(topic):
            continue
        known = stretches.setdefault((topic, number), [])
        if known:
            begin, former_end = known[-1]
            bases = served.get((topic, number), ())
            later = bisect_left(bases, former_end)
            if later == len(bases) or bases[later] > first:
                known[-1] = (begin, end)
                continue
        known.append((first, end))
    text = "they passed their age, or were purged, before they were read"
    return [
        GapState("retention", end - first, *key, first, end, text)
        for key, known in stretches.items()
        for first, end in known
    ]


def _base_offsets(
    page: Sequence[FoundBatch], matches: Callable[[str], bool]
) -> dict[TopicPartition, list[int]]:
    """The base offsets of the served runs in order, by partition."""
    bases: dict[TopicPartition, list[int]] = {}
    for found in page:
        head = found.batch.envelope
        partitions, offsets = head.column32(head.partitions), head.column64(head.base_offsets)
        for run in range(head.run_count) if found.runs is None else found.runs:
            if matches(head.topics[run]):
                bases.setdefault((head.topics[run], partitions[run]), []).append(offsets[run])
    return bases


class PartitionsFeed:
    """Reads the partitions of a subscription's literal topics in one shard, each from its own offset on."""

    __slots__ = ("_log", "_shard", "_topics", "_turn", "_workers")

    def __init__(self, log: Store, shard: OwnedShard, topics: TopicLogs, workers: Workers) -> None:
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
                return not subscription.is_read_by(self._shard.id, self)
        return True  # nothing was read, so nothing was awaited

    def lag(self, subscription: LiveSubscription) -> int:
        assert subscription.places is not None
        return sum(
            max(0, self._shard.next_offset(*key) - subscription.places.get(key, 1))
            for key in self._keys(subscription)
        )

    def _keys(self, subscription: LiveSubscription) -> list[TopicPartition]:
        """Its topic-partitions, looked up each time: a topic may have been created or deleted meanwhile."""
        return [
            (info.name, number)
            for pattern in subscription.patterns
            if self._topics.log_of(pattern.prefix) is self._log
            for info in (self._log.metadata.topics.get(pattern.prefix),)
            for number, shard in enumerate(info.shards)
            if shard == self._shard.id
        ]

    async def _read(self, subscription: LiveSubscription, key: TopicPartition) -> bool:
        """Deliver the partition's next page. Returns False, without waiting, if there is none."""
        places = subscription.places
        assert places is not None
        offset = places.get(key)
        if offset is not None and offset >= self._shard.next_offset(*key):
            return False
        try:
            if offset is None:
                offset = (await self._log.bounds(*key)).first_offset  # created since the start
                if subscription.is_read_by(self._shard.id, self):
                    places[key] = offset
                return True
            page = await self._log.read(
                *key, offset, bytes_max=page_bytes(subscription.credit_bytes)
            )
        except OffsetGoneError as gone:
            if not subscription.is_read_by(self._shard.id, self):
                return True
            subscription.report_gap(
                GapState("retention", gone.gap, *key, gone.offset, gone.first_offset, str(gone)),
                self._shard.id,
            )
            places[key] = gone.first_offset
            return True
        except UnknownTopicError:
            places.pop(key, None)  # deleted meanwhile
            return True
        batches = [await wanted_from(found, offset, self._workers) for found in page.found]
        if not subscription.is_read_by(self._shard.id, self):
            return True
        for gap in page.gaps:
            missing = damage_gap(gap, key, gap.first_offset, gap.next_offset)
            subscription.report_gap(missing, self._shard.id)
        places[key] = page.next_offset
        send_batches(subscription, self._shard.id, self._shard.epoch, batches)
        return True


def send_batches(
    subscription: LiveSubscription, shard: ShardId, epoch: int, batches: Sequence[Batch]
) -> None:
    """Deliver batches outside the shard's order."""
    buffers = [batch.pack() for batch in batches]
    if buffers:
        messages = sum(map(len, batches))
        size = sum(map(len, buffers))
        subscription.send(LiveDelivery(shard, epoch, 0, buffers, size, messages))


async def wanted_from(found: FoundBatch, offset: int, workers: Workers) -> Batch:
    """The wanted messages from an offset on: a stored batch may begin before it."""

    def cut() -> Batch:
        batch = found.wanted()
        head = batch.envelope
        before = offset - head.column64(head.base_offsets)[0]
        return batch.slice(before) if 0 < before < len(batch) else batch

    if found.batch.envelope.codec == Codec.NONE:
        return cut()
    return await workers.submit(cut)


class LastValuesFeed:
    """Sends the last message of every matching partition, as of the start of the subscription.

    The subscription's `first_new` has the first offset of messages that came since, which follow from the log. Messages
    from the places of a resumed subscription on follow from the log too, so last messages among them are left out. A
    step finds the next topics, or sends the last messages in one stored batch or in a few small batches.
    """

    __slots__ = (
        "_begun",
        "_ephemeral",
        "_ephemeral_names",
        "_reading",
        "_seen",
        "_topics",
        "_walks",
        "_wanted",
        "_workers",
    )

    def __init__(
        self,
        topics: TopicLogs,
        ephemeral: EphemeralTopics,
        walks: Sequence[Walk],
        workers: Workers,
        begun: Mapping[ShardId, Feed] | None = None,
    ) -> None:
        """`begun`: only of these shards of a subscription in parts, while these feeds are to read them.

        Ephemeral topics are left out then, unless it is empty.
        """
        self._begun = begun
        self._topics = topics
        self._ephemeral = ephemeral
        self._walks = deque(walks)  # over the topics that existed at the start
        self._workers = workers
        self._seen: set[str] = set()  # several patterns may match a topic
        # Topics found and not sent yet: offsets of kept topic-partitions by shard, and names of ephemeral topics.
        self._wanted: dict[tuple[Store, OwnedShard], dict[TopicPartition, int]] = {}
        self._ephemeral_names: deque[str] = deque()
        self._reading: _Reading | None = None

    def lag(self, subscription: LiveSubscription) -> int:  # noqa: ARG002 - topics do not count as lag
        return 0

    async def step(self, subscription: LiveSubscription) -> bool:
        if subscription.is_closed:
            if self._reading is not None:
                await self._reading.messages.aclose()
            return True
        if self._reading is not None or self._wanted:
            await self._send_kept(subscription)
        elif self._ephemeral_names:
            self._send_ephemeral(subscription)
        elif self._walks:
            self._find(subscription, self._walks[0].step(_TOPICS_AT_ONCE))
            if self._walks[0].done:
                self._walks.popleft()
        else:
            return True
        return False

    def _find(self, subscription: LiveSubscription, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic in self._seen:
                continue
            self._seen.add(topic)
            log = self._topics.log_of(topic)
            if log is None:
                if not self._begun:
                    self._ephemeral_names.append(topic)
                continue
            for number, shard_id in enumerate(log.metadata.topics.get(topic).shards):
                if not self._is_wanted(subscription, shard_id):
                    continue
                key, shard = (topic, number), log.shard(shard_id)
                offset = self._last_before(subscription, shard, key)
                if offset >= 1 and not _is_ahead(subscription, key, offset):
                    self._wanted.setdefault((log, shard), {})[key] = offset

    def _is_wanted(self, subscription: LiveSubscription, shard: ShardId) -> bool:
        """Whether the last values of a shard are wanted, and the shard is still to be read as it was begun."""
        if self._begun is None:
            return True
        feed = self._begun.get(shard)
        return feed is not None and subscription.is_read_by(shard, feed)

    def ends(self, subscription: LiveSubscription) -> Sequence[LiveDelivery]:
        if not self._begun:
            return (LAST_SENT,)
        return [
            LiveDelivery(shard, 0, 0, (), 0, 0)
            for shard in self._begun
            if self._is_wanted(subscription, shard)
        ]

    def _last_before(
        self, subscription: LiveSubscription, shard: OwnedShard, key: TopicPartition
    ) -> int:
        """The offset of the last message at the start of the subscription."""
        assert subscription.first_new is not None
        end = subscription.first_new.get(shard.id, {}).get(key)
        return (shard.next_offset(*key) if end is None else end) - 1

    async def _send_kept(self, subscription: LiveSubscription) -> None:
        if self._reading is None:
            (log, shard), wanted = self._wanted.popitem()
            self._reading = _Reading(log, shard, log.messages_at(shard.id, wanted), dict(wanted))
        log, shard, messages, left = self._reading
        chosen = await anext(messages, None)
        if not self._is_wanted(subscription, shard.id):
            await messages.aclose()
            self._reading = None
            return
        if chosen is None:
            if left:
                await _report_damage(subscription, log, *left.popitem())
            else:
                self._reading = None
            return
        for each in chosen:
            for run in each.batch.runs():
                key = (run.topic, run.partition)
                if 0 <= left.get(key, 0) - run.base_offset < run.count:
                    left.pop(key, None)
        feed = subscription.behind().get(shard.id)
        batches = [
            await taken(each, self._workers)
            for each in chosen
            if not isinstance(feed, ShardFeed) or feed.has_passed(each.batch.envelope.entry)
        ]
        if not subscription.is_closed and self._is_wanted(subscription, shard.id):
            send_batches(subscription, shard.id, shard.epoch, batches)

    def _send_ephemeral(self, subscription: LiveSubscription) -> None:
        """Send some last values of ephemeral topics without awaiting, so that each is still the last when sent."""
        assert subscription.first_new is not None
        first_new = subscription.first_new.get(LIVE_SHARD, {})
        batches: list[Batch] = []
        epoch, size = 0, 0
        while (
            self._ephemeral_names and len(batches) < _EPHEMERAL_AT_ONCE and size < _PAGE_BYTES_MIN
        ):
            topic = self._ephemeral.find(self._ephemeral_names[0])
            if topic is not None:
                if batches and topic.epoch != epoch:
                    break
                epoch = topic.epoch
                for number in range(topic.policy.partitions):
                    batch = topic.last_message(number)
                    # If a message has come since, the newest waits in the queue.
                    if batch is not None and (topic.name, number) not in first_new:
                        batches.append(batch)
                        size += len(batch.body)
            self._ephemeral_names.popleft()
        send_batches(subscription, LIVE_SHARD, epoch, batches)


def _is_ahead(subscription: LiveSubscription, key: TopicPartition, offset: int) -> bool:
    """Whether a subscription to literal topics will read this message from the log."""
    return subscription.places is not None and offset >= subscription.places.get(key, offset + 1)


class _Reading(NamedTuple):
    """Last messages of one shard that are being read."""

    log: Store
    shard: OwnedShard
    messages: AsyncGenerator[Sequence[Chosen], None]
    left: dict[TopicPartition, int]  # offsets of messages not found yet


async def _report_damage(
    subscription: LiveSubscription, log: Store, key: TopicPartition, offset: int
) -> None:
    """Report a last message that was not found if it is damaged, but not if retention or a purge removed it."""
    try:
        page = await log.read(*key, offset, bytes_max=_PAGE_BYTES_MIN)
    except (OffsetGoneError, UnknownTopicError):
        return
    if subscription.is_closed:
        return
    for gap in page.gaps:
        if gap.first_offset <= offset < gap.next_offset:
            subscription.report_gap(damage_gap(gap, key, gap.first_offset, gap.next_offset))


async def taken(chosen: Chosen, workers: Workers) -> Batch:
    """The chosen messages. A worker cuts them out where that takes a while."""
    head = chosen.batch.envelope
    if head.codec == Codec.NONE and head.run_count <= _RUNS_CUT_ON_LOOP_MAX:
        return chosen.taken()
    return await workers.submit(chosen.taken)


def _behind_row(batch: Batch, row: int) -> Batch | None:
    """The messages from a row of the entry on. Rows are numbered as the entry was first stored."""
    if not row:
        return batch
    wanted: list[int] = []
    begin = 0
    for run in batch.runs():
        wanted += range(begin + max(0, min(run.count, row - run.row)), begin + run.count)
        begin += run.count
    return batch.take(wanted) if wanted else None


def damage_gaps(page: EntryPage, matches: Callable[[str], bool]) -> list[GapState]:
    """The gaps of a damaged page for a reader of a shard: by partition, where the partitions are known."""
    gaps: list[GapState] = []
    for gap in page.gaps:
        if not gap.lost:
            gaps.append(GapState("damage", 0, text=_damage_text(gap)))
        gaps += [
            damage_gap(gap, (lost.topic, lost.partition), lost.first_offset, lost.next_offset)
            for lost in gap.lost
            if matches(lost.topic)
        ]
    return gaps


def damage_gap(
    gap: DamageGap, key: TopicPartition, first_offset: int, next_offset: int
) -> GapState:
    missed = next_offset - first_offset
    return GapState("damage", missed, *key, first_offset, next_offset, _damage_text(gap))


def _damage_text(gap: DamageGap) -> str:
    """The damage as text for readers, without the path of the data directory: the log has the whole path."""
    file = PurePath(gap.path).name
    return f"{file}:{gap.position}: {gap.problem.replace(gap.path, file)}"
