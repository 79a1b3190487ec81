"""Begins and ends live subscriptions, feeds them from the log, and pushes new batches to them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

from runnel.broker.limits.fair_semaphore import FairSemaphore
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live import fanout, start_positions
from runnel.broker.live.beginnings import Beginnings, Begun
from runnel.broker.live.ephemeral_topics import EphemeralTopic, EphemeralTopics
from runnel.broker.live.feeds import LastValuesFeed, PartitionsFeed, ShardFeed
from runnel.broker.live.subscription import (
    Feed,
    LiveSubscription,
    Overflow,
    SubscribeRequest,
)
from runnel.broker.live_shards import LIVE_SHARD
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.stores import Stores
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
from runnel.formats.wire import ShardPlace, ShardTerm, Start
from runnel.log.log import OwnedShard, Position, ShardId, Store, VisibleBatch
from runnel.platform.diagnostics import get_logger
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import SYSTEM_MARK
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
        self._beginnings = Beginnings(stores, index, workers, share)
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
            parts=request.parts,
        )
        if request.parts is not None:
            return self._begin_in_parts(subscription, start)
        begun = await self._begin_everywhere(subscription, start)
        subscription.partitions, subscription.shards = begun.partitions, begun.shards
        subscription.gaps_at_start += [gap for _, gap in begun.gaps]
        for shard, feed in begun.feeds.items():
            subscription.fall_behind(shard, feed)
        self._check_open()
        if start.kind in start_positions.WITH_LAST:
            subscription.first_new = {}
            self._add_prelude(subscription, None)
        self._add(subscription)
        return subscription

    async def _begin_everywhere(self, subscription: LiveSubscription, start: Start) -> Begun:
        owner = subscription.sink.connection_id
        while True:
            term_changes = self._stores.term_changes
            try:
                await self._wait_swept()
                begin = await self._beginnings.look_up(subscription, start, owner, None)
                # If a shard has gone or come meanwhile, some of what was looked up may be of a lost term.
                if self._stores.term_changes == term_changes:
                    return begin()
            except MovedError as error:
                raise self._stores.moved(error, _literals(subscription.patterns)) from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the broker is closing")

    def _add(self, subscription: LiveSubscription) -> None:
        self._index.add(subscription, subscription.patterns)
        self._subscriptions[subscription] = None

    def _add_prelude(
        self, subscription: LiveSubscription, begun: Mapping[ShardId, Feed] | None
    ) -> None:
        walks = [self._index.walk(pattern) for pattern in subscription.patterns]
        prelude = LastValuesFeed(self._stores, self._ephemeral, walks, self._workers, begun)
        subscription.preludes.append(prelude)

    # --- In parts ---

    def _begin_in_parts(self, subscription: LiveSubscription, start: Start) -> LiveSubscription:
        """Begin with ephemeral topics only. Every shard is held until the reader says where to begin."""
        self._check_open()
        for _, shard in self._stores.shards():
            if self._may_match(subscription, shard.id):
                subscription.hold(shard.id)
        subscription.elsewhere = [
            owner
            for owner in self._stores.elsewhere()
            if self._may_match(subscription, ShardId(owner.journal, owner.shard))
        ]
        if start.kind in start_positions.WITH_LAST:
            subscription.first_new = {LIVE_SHARD: {}}
            self._add_prelude(subscription, {})
        self._add(subscription)
        return subscription

    def served_for(self, subscription: LiveSubscription) -> list[ShardTerm]:
        """The shards that a subscription in parts may begin here."""
        return [
            _term(shard) for _, shard in self._stores.shards() if shard.id in subscription.behind()
        ]

    async def begin_shards(
        self, subscription: LiveSubscription, terms: Sequence[ShardTerm], start: Start
    ) -> Begun:
        """Let a subscription in parts begin these shards, as far as they are served here in these terms and held."""
        start_positions.check_start(start, subscription.patterns)
        while True:
            term_changes = self._stores.term_changes
            chosen = {
                shard.id: shard
                for _, shard in self._stores.shards()
                if _term(shard) in terms and subscription.is_held(shard.id)
            }
            owner = subscription.sink.connection_id
            begin = await self._beginnings.look_up(subscription, start, owner, chosen)
            # Shards may have gone, come, or been begun by another request meanwhile.
            if self._stores.term_changes == term_changes and all(map(subscription.is_held, chosen)):
                break
            if subscription.is_closed:
                return Begun((), (), (), {})
        begun = begin()
        if subscription.is_closed:
            return begun
        with_last = start.kind in start_positions.WITH_LAST
        for shard, owned in chosen.items():
            feed = begun.feeds.get(shard)
            if feed is None and with_last:
                feed = PartitionsFeed(self._log_of(shard), owned, self._stores, self._workers)
            subscription.begin(shard, feed)
            if with_last:
                subscription.first_new = subscription.first_new or {}
                subscription.first_new[shard] = {}
        if with_last:
            feeds = {shard: subscription.behind()[shard] for shard in chosen}
            self._add_prelude(subscription, feeds)
        if subscription.places is not None:
            places = [
                ShardPlace(shard.journal, shard.shard, owned.epoch, 0)
                for shard, owned in chosen.items()
            ]
            begun = begun._replace(shards=places)
        subscription.proceed()
        return begun

    def _log_of(self, shard: ShardId) -> Store:
        return self._stores.shard(shard)[0]

    def _may_match(self, subscription: LiveSubscription, shard: ShardId) -> bool:
        """Whether a topic of a subscription lies in the shard, or may: with wildcards in each."""
        return subscription.places is None or any(
            self._stores.lies_in(pattern.prefix, shard) for pattern in subscription.patterns
        )

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
        """The shard has gone: subscriptions that read it end with MovedError, and resume where they were.

        Those in parts go on without it.
        """
        for subscription in self.subscriptions():
            if subscription.parts is not None:
                if shard.id in subscription.behind() or self._may_match(subscription, shard.id):
                    subscription.leave(shard.id)
                    subscription.parts.shards_left(subscription.number, [_term(shard)])
            elif self._is_reader_of(subscription, shard):
                self._end_moved(subscription, f"shard {shard.id} is not served here now")

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        """The shard has come, perhaps again: subscriptions in parts are told."""
        for subscription in self.subscriptions():
            if subscription.parts is not None and self._may_match(subscription, shard.id):
                subscription.hold(shard.id)
                subscription.parts.shards_came(subscription.number, [_term(shard)])

    def on_new_shard(self, shard: OwnedShard) -> None:
        """A shard has come that this broker never served: subscriptions have no position in it, so they resume."""
        if shard.entries().next_offset <= 1:
            return
        for subscription in self.subscriptions():
            if subscription.parts is None and self._may_match(subscription, shard.id):
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
        behind = subscription.behind()
        while subscription.is_behind and not subscription.is_closed:
            if subscription.preludes:
                await self._run_prelude(subscription, subscription.preludes[0])
                subscription.end_prelude()
                continue
            await subscription.wait_room()
            async with self._reads.of(subscription.sink.connection_id):
                turn = subscription.next_feed()
                if turn is None:
                    return
                if not subscription.has_room:
                    continue  # paused before its turn came
                shard, feed = turn
                is_over = await self._step(subscription, feed)
                if behind.get(shard) is feed:
                    del behind[shard]
                    if not is_over:
                        behind[shard] = feed  # the next shard's turn
                # A read from the page cache never waits: let other tasks run before the permit is released.
                await asyncio.sleep(0)

    async def _step(self, subscription: LiveSubscription, feed: Feed) -> bool:
        try:
            return await feed.step(subscription)
        except MovedError:
            if subscription.parts is None:
                raise
            return False  # the shard leaves in a moment, and the reader goes on at its next owner

    async def _run_prelude(self, subscription: LiveSubscription, prelude: Feed) -> None:
        is_over = False
        while not is_over:
            await subscription.wait_room()
            async with self._reads.of(subscription.sink.connection_id):
                if subscription.has_room or subscription.is_closed:
                    is_over = await self._step(subscription, prelude)
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


def _term(shard: OwnedShard) -> ShardTerm:
    return ShardTerm(shard.id.journal, shard.id.shard, shard.epoch)


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
