"""Begins and ends live subscriptions, feeds them from the log, and pushes new batches to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from runnel.broker.limits.fair_semaphore import FairSemaphore
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live import fanout, start_positions
from runnel.broker.live.ephemeral_topics import EphemeralTopic, EphemeralTopics
from runnel.broker.live.feeds import LastValuesFeed, PartitionsFeed, ShardFeed
from runnel.broker.live.subscription import Feed, LiveSubscription, Overflow, SubscribeRequest
from runnel.broker.live_shards import LIVE_SHARD
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.stores import Stores, owned_shard
from runnel.config import BrokerSettings
from runnel.errors import (
    ClientFault,
    LimitExceededError,
    MovedError,
    RunnelError,
    Unavailable,
)
from runnel.formats.columns import first_event_time_ns
from runnel.formats.envelope import Codec, Envelope
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.log.log import OwnedShard, Position, ShardId, Store, VisibleBatch
from runnel.platform.diagnostics import get_logger
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import SYSTEM_MARK, TopicPartition
from runnel.topics.pattern_index import PATTERNS_PER_SUBSCRIBER_MAX, PatternIndex
from runnel.topics.patterns import Pattern

# Pages read at a time for all subscriptions that are behind: other work is done in between.
_FEEDS_AT_ONCE: Final = 4
_SWEPT_PER_STEP: Final = 100
# Comparisons that finding a topic's subscribers may take within the caller's own step.
_FIRST_COMPARISONS: Final = 32
_PLAIN: Final = Codec.NONE.value  # looking up an enum's member takes several times as long

logger = get_logger("runnel")


class LiveSubscriptions:
    """All live subscriptions of a broker."""

    def __init__(
        self,
        stores: Stores,
        ephemeral: EphemeralTopics,
        index: PatternIndex[LiveSubscription],
        settings: BrokerSettings,
        workers: Workers,
        metrics: Metrics,
        events: Events,
        share: LoopShare,
    ) -> None:
        self._metrics = metrics
        self._events = events
        self._stores = stores
        self._ephemeral = ephemeral
        self._index = index
        self._settings = settings
        self._workers = workers
        self._share = share
        self._tasks = OwnedTasks("live subscriptions")
        self._reads = FairSemaphore(_FEEDS_AT_ONCE)
        self._subscriptions: dict[LiveSubscription, None] = {}
        self._slow: set[LiveSubscription] = set()  # reported as slow, and not caught up yet
        self._is_sweep_due = False
        self._sweep: asyncio.Future[None] | None = None  # under way
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._subscriptions)

    def subscriptions(self) -> list[LiveSubscription]:
        return list(self._subscriptions)

    def subscribers(self, topic: str) -> tuple[LiveSubscription, ...]:
        remembered = self._index.recall(topic)
        return self._index.subscribers(topic) if remembered is None else remembered

    async def look_up(self, topic: str, owner: Hashable) -> None:
        """Find a topic's subscribers in steps. The index remembers them until a subscription is added or removed."""
        if self._index.recall(topic) is None:
            search = self._index.search(topic)
            is_over = search.step(_FIRST_COMPARISONS)
            while not is_over:
                await self._share.turn(owner)
                is_over = search.step()

    # --- Beginning and ending ---

    async def subscribe(self, request: SubscribeRequest) -> LiveSubscription:
        """A new subscription. It delivers nothing until its `start` is called."""
        parsed, start = _parse(request.patterns), request.start
        start_positions.check_start(start, parsed)
        if len(self._subscriptions) >= self._settings.subscriptions_max:
            raise LimitExceededError(
                "one subscription more than broker.subscriptions_max = "
                f"{self._settings.subscriptions_max}"
            )
        subscription = LiveSubscription(
            request.number,
            request.sink,
            parsed,
            credit_bytes=request.credit_bytes,
            overflow=Overflow.checked(request.overflow),
            queue_bytes_max=self._settings.live_queue_bytes_max,
            counters=self._metrics.counters,
            on_behind=self._feed,
            on_closed=self._ended,
        )
        while True:
            term_changes = self._stores.term_changes
            try:
                begin = await self._look_up(subscription, request)
                # If a shard has gone or come meanwhile, some of what was looked up may be of a lost term.
                if self._stores.term_changes == term_changes:
                    begin()
                    break
            except MovedError as error:
                raise self._stores.moved(error, _literals(parsed)) from None
        if self._is_closed:
            raise Unavailable("the broker is closing")
        if start.kind in start_positions.WITH_LAST:
            subscription.first_new = {}
            walks = [self._index.walk(pattern) for pattern in parsed]
            subscription.prelude = LastValuesFeed(
                self._stores, self._ephemeral, walks, self._workers
            )
        self._index.add(subscription, parsed)
        self._subscriptions[subscription] = None
        return subscription

    async def _look_up(
        self, subscription: LiveSubscription, request: SubscribeRequest
    ) -> Callable[[], None]:
        """All look-ups, which await. The result lets it begin in all partitions or shards at the same moment.

        MovedError if a shard that it would read is away.
        """
        stores, patterns, start = self._stores, subscription.patterns, request.start
        await start_positions.check_epochs(stores, start)
        await self._wait_swept()
        if subscription.places is not None:
            offsets = await start_positions.offsets_at(stores, patterns, start)

            def begin_partitions() -> None:
                stores.check_here(_literals(patterns))
                begins = start_positions.begin_offsets(stores, patterns, start, offsets)
                lost = start_positions.lost_partitions(stores, patterns, start)
                subscription.gaps_at_start += lost
                self._begin_partitions(subscription, start, begins)

            return begin_partitions
        ends: Mapping[ShardId, int] = {}
        matching: Mapping[ShardId, Store] = {}
        entries: Mapping[ShardId, int] = {}
        if start.kind in ("earliest", "time"):
            share, owner = self._share, request.sink.connection_id
            ends = await start_positions.ends_before(stores, share, owner)
            matching = await start_positions.matching_shards(
                stores, self._index, patterns, share, owner
            )
            if start.kind == "time":
                entries = await start_positions.entries_at(matching, start.time_ns, share, owner)

        def begin_shards() -> None:
            stores.check_all_here()
            begins = start_positions.begin_positions(stores, start, matching, entries, ends)
            subscription.gaps_at_start += start_positions.lost_shards(stores, start)
            self._begin_shards(
                subscription,
                begins,
                is_held=start.kind in start_positions.WITH_LAST,
                reports_passed=start.kind not in ("earliest", "time"),
            )

        return begin_shards

    def _begin_partitions(
        self,
        subscription: LiveSubscription,
        start: Start,
        begins: Mapping[TopicPartition, start_positions.Begin],
    ) -> None:
        assert subscription.places is not None
        places: list[PartitionPlace] = []
        for (topic, number), (log, offset, gap) in begins.items():
            subscription.places[topic, number] = offset
            shard = owned_shard(log, (topic, number))
            places.append(PartitionPlace(topic, number, offset, shard.epoch))
            if gap is not None:
                subscription.gaps_at_start.append(gap)
            is_behind = offset < shard.next_offset(topic, number)
            is_held = start.kind in start_positions.WITH_LAST
            if (is_behind or is_held) and shard.id not in subscription.behind():
                feed = PartitionsFeed(log, shard, self._stores, self._workers)
                subscription.fall_behind(shard.id, feed)
        subscription.partitions = places

    def _begin_shards(
        self,
        subscription: LiveSubscription,
        begins: Sequence[tuple[Store, OwnedShard, Position]],
        *,
        is_held: bool,
        reports_passed: bool,
    ) -> None:
        places: list[ShardPlace] = []
        for log, shard, position in begins:
            end = shard.entries().next_offset
            is_of_epoch = position.epoch in (0, shard.epoch)
            if is_of_epoch and position.entry > end:
                text = f"entry {position.entry} of shard {shard.id} is beyond the next one, {end}"
                subscription.gaps_at_start.append(GapState("restart", 0, text=text))
                position = Position(shard.epoch, end)
            epoch = position.epoch or shard.epoch
            places.append(
                ShardPlace(shard.id.journal, shard.id.shard, epoch, position.entry, position.row)
            )
            # For a place of another epoch the feed reports a gap and sends everything stored, wherever the place is.
            is_behind = position.entry < end or position.row > 0 or not is_of_epoch
            if is_held or is_behind:
                feed = ShardFeed(log, shard, position, self._workers, reports_passed=reports_passed)
                subscription.fall_behind(shard.id, feed)
        subscription.shards = places

    def _ended(self, subscription: LiveSubscription) -> None:
        self._slow.discard(subscription)
        if self._subscriptions.pop(subscription, subscription) is None:
            self._index.remove(subscription)
            if not self._is_sweep_due:
                self._is_sweep_due = True
                if self._sweep is None:
                    self._sweep = asyncio.get_running_loop().create_future()
                    self._tasks.start(self._run_sweeps())

    async def _run_sweeps(self) -> None:
        """Remove ephemeral topics without readers. One sweep serves all readers that have left before it."""
        ephemeral = self._ephemeral
        while self._is_sweep_due:
            self._is_sweep_due = False
            async for names in self._share.steps(ephemeral.names(), self, _SWEPT_PER_STEP):
                for name in names:
                    topic = ephemeral.find(name)
                    if topic is None or topic.policy.last_value:
                        continue
                    await self.look_up(name, self)
                    if ephemeral.find(name) is topic and not self.subscribers(name):
                        ephemeral.vanish(topic)
            assert self._sweep is not None
            self._sweep.set_result(None)
            self._sweep = asyncio.get_running_loop().create_future() if self._is_sweep_due else None

    async def _wait_swept(self) -> None:
        """Wait until topics without readers are removed: for a new reader they begin at offset 1 again."""
        # The sweep under way may have begun before a reader left, so wait for the next one too.
        for _ in range(2):
            if self._sweep is not None:
                await asyncio.wait({self._sweep})

    # --- Shards that go and come ---

    def on_shard_released(self, shard: OwnedShard) -> None:
        """The shard has gone: subscriptions that read it end with MovedError, and resume where they were."""
        for subscription in self.subscriptions():
            if self._is_reader_of(subscription, shard):
                self._end_moved(subscription, f"shard {shard.id} is not served here now")

    def on_new_shard(self, shard: OwnedShard) -> None:
        """A shard has come that this broker never served: subscriptions have no position in it, so they resume."""
        if shard.entries().next_offset <= 1:
            return
        for subscription in self.subscriptions():
            if subscription.places is None or any(
                self._stores.lies_in(pattern.prefix, shard.id) for pattern in subscription.patterns
            ):
                self._end_moved(subscription, f"shard {shard.id} has come here")

    def _is_reader_of(self, subscription: LiveSubscription, shard: OwnedShard) -> bool:
        """Whether a subscription reads a shard that is away: each one by pattern does."""
        return subscription.places is None or any(
            self._stores.has_away(pattern.prefix, shard.id) for pattern in subscription.patterns
        )

    def _end_moved(self, subscription: LiveSubscription, text: str) -> None:
        if subscription.places is None:
            # Not every client may know the name of the shard: it may be that of a single topic.
            text = "a shard goes or has come, and a reader by pattern reads all"
        error = MovedError(text)
        subscription.end(self._stores.moved(error, _literals(subscription.patterns)))

    async def close(self) -> None:
        self._is_closed = True
        for subscription in self.subscriptions():
            subscription.close()
        await self._tasks.finish()

    # --- Reading from the log ---

    def _feed(self, subscription: LiveSubscription) -> None:
        subscription.is_fed = True
        self._tasks.start(self._feed_until_live(subscription))

    async def _feed_until_live(self, subscription: LiveSubscription) -> None:
        try:
            await self._run_feeds(subscription)
            if subscription in self._slow:
                self._slow.remove(subscription)
                self._events.emit(EventKind.READER_CAUGHT_UP, _label(subscription))
        except MovedError as error:  # the log is ahead of its notice
            self._end_moved(subscription, str(error))
        except (RunnelError, OSError) as error:
            logger.warning(
                "reading the log for a live subscription failed",
                reader=_label(subscription),
                error=str(error),
            )
            failure = error if isinstance(error, RunnelError) else Unavailable(str(error))
            subscription.end(failure)
        finally:
            subscription.is_fed = False

    async def _run_feeds(self, subscription: LiveSubscription) -> None:
        if subscription.prelude is not None:
            await self._run_prelude(subscription, subscription.prelude)
            subscription.end_prelude()
        behind = subscription.behind()
        while behind and not subscription.is_closed:
            await subscription.wait_room()
            async with self._reads.of(subscription.sink.connection_id):
                shard, feed = next(iter(behind.items()), _NO_FEED)
                if feed is None:
                    return
                if not subscription.has_room:
                    continue  # paused before its turn came
                if await feed.step(subscription):
                    behind.pop(shard, None)
                elif shard in behind:
                    behind[shard] = behind.pop(shard)  # the next shard's turn
                # A read from the page cache never waits: let other tasks run before the permit is released.
                await asyncio.sleep(0)

    async def _run_prelude(self, subscription: LiveSubscription, prelude: Feed) -> None:
        is_over = False
        while not is_over:
            await subscription.wait_room()
            async with self._reads.of(subscription.sink.connection_id):
                if subscription.has_room or subscription.is_closed:
                    is_over = await prelude.step(subscription)
                    await asyncio.sleep(0)

    # --- New batches ---

    def spread_kept(self, shard: ShardId, stored: VisibleBatch) -> bool:
        """Deliver a stored batch that has become visible. Returns whether any subscription got it at once."""
        subscribers = self._subscribers_by_run(stored.envelope.topics)
        shares = fanout.shares(shard, stored, subscribers)
        is_delivered = fanout.spread_kept(shard, stored, shares, self._fall_behind)
        self._count_out(stored, shares)
        return is_delivered

    def spread_ephemeral(
        self, stored: VisibleBatch, readers: Sequence[tuple[LiveSubscription, ...]]
    ) -> int:
        """Push a batch of ephemeral topics, given the readers of each run. Returns the number of receivers."""
        shares = fanout.shares(LIVE_SHARD, stored, readers)
        self._count_out(stored, shares)
        receivers = fanout.spread_ephemeral(shares)
        if receivers:
            received_ns = int.from_bytes(stored.envelope.receive_times[-8:], "little")
            self.observe_age(stored, received_ns)
        return receivers

    def spread_run(
        self,
        stored: VisibleBatch,
        readers: tuple[LiveSubscription, ...],
        epoch: int,
        entry: int,
        count: int,
        received_ns: int,
    ) -> None:
        """Push a batch of one run, which all its readers get whole."""
        envelope, body = stored.envelope, stored.body
        size = len(body) * len(readers)
        self._metrics.traffic.count_out(envelope.topics[0], count * len(readers), size)
        delivery = fanout.whole_delivery(LIVE_SHARD, stored, epoch, entry, count)
        for reader in readers:
            reader.push(delivery, envelope, body)
        self.observe_age(stored, received_ns)

    def observe_age(self, stored: VisibleBatch, now_ns: int) -> None:
        """Measure the age of a delivered batch's first message: once per batch."""
        head = stored.envelope
        if head.codec == _PLAIN and not head.topics[0].startswith(SYSTEM_MARK):
            event_time_ns = first_event_time_ns(stored.body)
            if event_time_ns > 0:
                self._metrics.live_age.observe(now_ns - event_time_ns)

    def _count_out(self, stored: VisibleBatch, shares: Sequence[fanout.Shared]) -> None:
        """Count by topic what readers get now, or will get once they have caught up."""
        head = stored.envelope
        traffic = self._metrics.traffic
        count = head.message_count
        if len(head.topics) == 1:  # most batches: every subscriber gets all of it
            for _, subscribers in shares:
                readers = len(subscribers)
                traffic.count_out(head.topics[0], count * readers, len(stored.body) * readers)
            return
        for share, subscribers in shares:
            readers = len(subscribers)
            topics, counts = share.topics_and_counts()
            total = sum(counts)
            size = len(stored.body) * total // count * readers
            if len(topics) == 1:
                traffic.count_out(topics[0], total * readers, size)
            else:
                sent = counts if readers == 1 else [count * readers for count in counts]
                traffic.count_runs(topics, sent, total * readers, size, is_out=True)

    def _fall_behind(
        self, subscription: LiveSubscription, shard: ShardId, envelope: Envelope, *, is_slow: bool
    ) -> None:
        log = self._stores.log_of(envelope.topics[0])
        if log is None:
            return  # deleted while its last batches were being stored
        if is_slow and not subscription.is_behind:
            self._slow.add(subscription)
            self._metrics.counters.slow_readers += 1
            self._events.emit(
                EventKind.SLOW_READER,
                _label(subscription),
                patterns=[pattern.text for pattern in subscription.patterns],
                shard=str(shard),
                entry=envelope.entry,
            )
        owned = log.shard(shard)
        feed: Feed
        if subscription.places is not None:
            subscription.begin_new(envelope)
            feed = PartitionsFeed(log, owned, self._stores, self._workers)
        else:
            position = Position(owned.epoch, envelope.entry)
            feed = ShardFeed(log, owned, position, self._workers)
        subscription.fall_behind(shard, feed)

    def ephemeral_readers(
        self, topics: Sequence[EphemeralTopic]
    ) -> list[tuple[LiveSubscription, ...]]:
        """The readers of each ephemeral topic; a topic that has lost its last reader vanishes."""
        changes = self._index.changes
        return [
            topic.readers if topic.readers_change == changes else self._update_readers(topic)
            for topic in topics
        ]

    def is_current(self, topic: EphemeralTopic) -> bool:
        """Whether a topic's readers are known as of the last change of subscriptions."""
        return topic.readers_change == self._index.changes

    def readers_of_ephemeral(self, topic: EphemeralTopic) -> tuple[LiveSubscription, ...]:
        """The readers of one ephemeral topic."""
        is_known = topic.readers_change == self._index.changes
        return topic.readers if is_known else self._update_readers(topic)

    def _update_readers(self, topic: EphemeralTopic) -> tuple[LiveSubscription, ...]:
        """Look up the readers of a topic, and create or remove the topic accordingly."""
        readers = self.subscribers(topic.name)
        if topic.exists and not readers and not topic.keeps_last:
            self._ephemeral.vanish(topic)
        elif not topic.exists and (readers or topic.keeps_last):
            self._ephemeral.make(topic)
        topic.readers, topic.readers_change = readers, self._index.changes
        return readers

    def _subscribers_by_run(self, topics: Sequence[str]) -> list[tuple[LiveSubscription, ...]]:
        """The subscribers of each topic. Hot path: once per run."""
        recall = self._index.recall
        return [
            self._index.subscribers(topic) if remembered is None else remembered
            for topic, remembered in zip(topics, map(recall, topics), strict=True)
        ]


_NO_FEED: tuple[ShardId, None] = (ShardId(""), None)


def _label(subscription: LiveSubscription) -> str:
    """The name of a subscription in events: its peer and number."""
    return f"{subscription.sink.peer} {subscription.number}"


def _literals(patterns: Sequence[Pattern]) -> list[str]:
    return [pattern.prefix for pattern in patterns if pattern.is_literal]


def _parse(patterns: Sequence[str]) -> list[Pattern]:
    if not patterns:
        raise ClientFault("a subscription needs at least one pattern")
    if len(patterns) > PATTERNS_PER_SUBSCRIBER_MAX:
        raise LimitExceededError(
            f"{len(patterns)} patterns in one subscription: at most {PATTERNS_PER_SUBSCRIBER_MAX}"
        )
    return [Pattern(text) for text in dict.fromkeys(patterns)]
