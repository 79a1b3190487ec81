"""The broker's verbs, the same for every protocol: publish, fetch, subscribe, topics, cursors.

The way of a batch: `publish` checks it and hands it to the log that keeps its topics. When the batch is visible, the
log calls `on_stored`, which sends it to live readers and wakes waiting fetches. Batches of ephemeral topics go from
`publish` straight to their readers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from runnel.broker.cluster_nodes import ClusterNodes
from runnel.broker.cluster_verbs import ClusterVerbs
from runnel.broker.connections import Connections
from runnel.broker.consumer_groups import ConsumerGroups, GroupHolds
from runnel.broker.cursors import CursorStore
from runnel.broker.fetcher import Fetcher, FetchRequest, FetchResult
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.limits.quotas import Account, Quota, Quotas
from runnel.broker.live.beginnings import Begun
from runnel.broker.live.ephemeral_publisher import EphemeralPublisher
from runnel.broker.live.ephemeral_topics import EphemeralTopic, EphemeralTopics
from runnel.broker.live.subscription import (
    LiveDelivery,
    LiveSink,
    LiveSubscription,
    SubscribeRequest,
)
from runnel.broker.live.subscriptions import LiveSubscriptions
from runnel.broker.live_shards import LIVE_SHARD
from runnel.broker.log_maintenance import LogMaintenance, report_recovery
from runnel.broker.message_batcher import MessageBatcher, Published
from runnel.broker.monitoring.audit import Audit
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.metric_tables import ConnectionStats, LiveSubscriptionStats
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.monitoring.monitor import DiskRoom, Monitor, MonitoredParts
from runnel.broker.monitoring.reporter import Reporter
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.broker.node_reports import NodeReports
from runnel.broker.opening import open_stores
from runnel.broker.producer_terms import ProducerTerms
from runnel.broker.shard_fetcher import ShardFetcher, ShardFetchRequest, ShardFetchResult
from runnel.broker.shard_loads import ShardLoads
from runnel.broker.stores import Stores, moved
from runnel.broker.topic_creator import TOPICS_PER_STEP, TopicCreator
from runnel.broker.topics import TopicDirectory, TopicListRequest
from runnel.broker.validation import check_batch, check_message
from runnel.cluster import ClusterNode
from runnel.cluster.state import Node
from runnel.config import Settings
from runnel.errors import (
    BusyError,
    ClientFault,
    ClosedError,
    DiskFullError,
    InvalidNameError,
    MovedError,
    RunnelError,
    Unavailable,
)
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import NodeState, Route, ShardState, ShardTerm, Start
from runnel.log.log import (
    Appended,
    Level,
    LogTopic,
    ManyTopicsError,
    OwnedShard,
    ShardId,
    Store,
    VisibleBatch,
)
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers
from runnel.topics.hints import glob_hint, glob_meant
from runnel.topics.names import (
    DEAD_LETTER_PREFIX,
    STATS_PREFIX,
    SYSTEM_MARK,
    has_wildcard,
    is_reserved,
)
from runnel.topics.partitions import partition_of_key
from runnel.topics.pattern_index import PatternIndex
from runnel.topics.policies import Difference, Policies

logger = get_logger("runnel")

__all__ = [
    "Broker",
    "ConnectionStats",
    "FetchResult",
    "Level",
    "LiveDelivery",
    "LiveSink",
    "LiveSubscription",
    "Published",
    "ShardId",
]

# About the size of one fetch's answer; a client that wants more asks again.
_PAGE_BYTES_MAX: Final = 4 * 2**20
_HINTS_MAX: Final = 10  # log lines about the patterns of one request, or of the settings


class Broker:
    """A broker without listeners. Create it with `await Broker.open(…)`. Everything runs on one event loop."""

    def __init__(self, settings: Settings, clock: Clock, workers: Workers) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics(
            topics_max=settings.broker.metrics_topics_max, journal_of=self._journal_of
        )
        self.events = Events(clock, self._publish_event)
        self.audit = Audit(clock, self._publish_event)
        self.events.on_flush.append(self.audit.flush)
        self.metrics.add_counter(
            "requests_denied",
            "Requests that a token had no right to.",
            lambda: self.audit.denied_count,
        )
        self.connection_ids = itertools.count(1)  # unique over all listeners
        self.nodes: Final = ClusterNodes()
        self.share: Final = LoopShare()  # of the loop's time, for walks over large collections
        self.connections: Final = Connections(self.share, clock)
        self.quotas = Quotas(settings.security, clock, self.metrics.counters, self.events)
        self._workers = workers
        self._index: PatternIndex[LiveSubscription] = PatternIndex()
        self._batcher = MessageBatcher(self._publish_now, self.wait_room, settings.broker)
        self._terms = ProducerTerms()
        self._holds = GroupHolds()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False
        # Other brokers may change metadata before this one has begun. It then begins with the change.
        self._has_begun = False
        # `open` sets these, once the logs are open.
        self._stores: Stores
        self._live_subscriptions: LiveSubscriptions
        self._ephemeral_publisher: EphemeralPublisher
        self._fetcher: Fetcher
        self._shard_fetcher: ShardFetcher
        self.topic_creator: TopicCreator
        self.topics: TopicDirectory
        self.cursors: CursorStore
        self._statistics: StoreStatistics
        self._reporter: Reporter
        self.monitor: Monitor
        self.consumer_groups: ConsumerGroups  # the verbs of acknowledged work
        self.cluster = ClusterVerbs(None)

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        directory: str | None,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        node: ClusterNode | None = None,
    ) -> Broker:
        """Open the logs and start the background tasks. Without a directory everything is in memory.

        With a `node` this broker is one of several that serve the directory. It serves nothing before `node.start`,
        and stops the node when it is closed.
        """
        broker = cls(settings, clock, workers)
        stores = await open_stores(
            settings,
            directory=directory,
            disk=disk,
            clock=clock,
            workers=workers,
            listener=broker,
            holds=broker._holds,
            node=node,
        )
        room = None if directory is None else lambda: DiskRoom.of(disk, directory)
        broker._begin(stores, room)
        if node is not None:
            broker.events.node = broker.audit.node = node.name
            stores.loads = ShardLoads(stores.shards_of, node.serves, broker._reporter.loop_lag_ms)
            broker.metrics.traffic.on_ended = stores.loads.take
            stores.use(stores.used_shards())
            node.attach(stores, NodeReports(node.name, broker.events))
            broker.cluster = ClusterVerbs(node)
            node.on_nodes_changed.append(lambda: broker._on_nodes_changed(node))
            broker._on_nodes_changed(node)
        return broker

    def _begin(self, stores: Stores, room: Callable[[], DiskRoom] | None) -> None:
        settings, clock = self.settings, self.clock
        self._stores = stores
        self._has_begun = True
        self._ephemeral = stores.ephemeral = EphemeralTopics(
            stores.policies,
            settings.limits.topics_max,
            clock.time_ns(),
            on_known=self._index.add_topic,
            on_forgotten=self._index.remove_topic,
            on_made=self._on_ephemeral_topic_made,
            live_shards=stores.live_shards,
        )
        for log in stores.kept:
            for name in log.metadata.topics.names():
                self._index.add_topic(name)
        self._live_subscriptions = LiveSubscriptions(
            stores,
            self._ephemeral,
            self._index,
            settings.broker,
            self._workers,
            self.metrics,
            self.events,
            self.share,
        )
        self._ephemeral_publisher = EphemeralPublisher(
            self._ephemeral,
            self._live_subscriptions,
            clock,
            self._workers,
            self.share,
            last_value_bytes_max=settings.log.last_value_bytes_max,
            count_in=self._count_in,
            moved=stores.moved,
        )
        page_bytes_max = min(settings.native.frame_bytes_max // 2, _PAGE_BYTES_MAX)
        self._fetcher = Fetcher(stores, settings.broker, clock, self._workers, page_bytes_max)
        self._shard_fetcher = ShardFetcher(
            stores, self._index, self._workers, self.share, page_bytes_max
        )
        self.topic_creator = TopicCreator(self.share, self._live_subscriptions.look_up)
        self.topics = TopicDirectory(
            stores, self._ephemeral, self._index, self._live_subscriptions, self.share
        )
        self.cursors = CursorStore(stores, settings.limits, self.share)
        self.consumer_groups = ConsumerGroups(
            settings,
            stores,
            self._holds,
            self._index,
            clock,
            self._workers,
            self.metrics,
            self.events,
            self._store_own,
            self.wait_room,
            self.share,
        )
        self.quotas.counts = {
            Quota.TOPICS: lambda name: sum(
                log.metadata.topics.owned_by(name) for log in stores.kept
            ),
            Quota.CURSORS: self.cursors.owned_by,
            Quota.SUBSCRIPTIONS: self.consumer_groups.owned_by,
        }
        statistics = self._statistics = StoreStatistics(stores.by_name, clock)
        self.monitor = self._new_monitor(statistics, room)
        self._reporter = Reporter(
            settings,
            clock,
            self.metrics,
            statistics,
            self._publish_document,
            connections=self.connections.report,
            subscriptions=self._subscription_rows,
            work=self.monitor.refresh,
        )
        maintenance = LogMaintenance(settings, clock, stores.by_name, statistics, self.events)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._reporter.run(), name="runnel-metrics"),
            loop.create_task(maintenance.run(), name="runnel-housekeeping"),
        ]
        self.consumer_groups.start()
        self._is_open = True
        for name, log in stores.by_name.items():
            report_recovery(self.events, name, log.recovered)
        if stores.main.recovered.damage:
            self.consumer_groups.tell_lost()

    def _new_monitor(
        self, statistics: StoreStatistics, room: Callable[[], DiskRoom] | None
    ) -> Monitor:
        parts = MonitoredParts(
            live=self._live_subscriptions.subscriptions,
            ephemeral_topics=lambda: len(self._ephemeral),
            fetches_waiting=lambda: self._fetcher.waiting_count,
            # Each node counts what it serves: a lag that was counted here before a move is its new owner's now.
            cursors=partial(self.cursors.list, part_only=self._stores.node is not None),
            connections=self.connections.report,
            subscriptions=self.consumer_groups.report,
            disk_room=None if room is None else lambda: self._workers.submit(room),
        )
        return Monitor(
            self.settings,
            self.clock,
            self.metrics,
            self.events,
            statistics,
            parts,
            in_memory=[
                name
                for name, log in self._stores.by_name.items()
                if not log.capabilities.has_free_space
            ],
        )

    def _on_nodes_changed(self, node: ClusterNode) -> None:
        known = node.nodes or [Node(node.name, 0, "")]  # before it has joined
        self.nodes.changed(
            node.view.version,
            [
                NodeState(each.name, each.address, each.incarnation, each.is_draining)
                for each in known
            ],
        )

    @property
    def recovered(self) -> Sequence[str]:
        """The problems that opening found, as lines for an operator; empty if there were none."""
        return self._stores.main.recovered.lines

    @property
    def policies(self) -> Policies:
        """The topic rules that hold now."""
        return self._stores.policies

    async def follow_rules(self, policies: Policies) -> Sequence[Difference]:
        """Apply other topic rules from now on. Returns where existing topics differ from them and stay as they are."""
        self._check_open()
        return await self._stores.follow_rules(policies)

    # --- Publishing ---

    def publish(
        self, batch: Batch, level: Level | None = None, account: Account | None = None
    ) -> asyncio.Future[Published]:
        """Store a batch, or send it to the readers of ephemeral topics.

        Raises errors that are known at once; on BusyError, await `wait_room` and call again. The future is done when
        the level is reached; without a level that is `stored` on disk, `received` elsewhere. Topics that the batch
        creates count for the account.
        """
        self._batcher.flush()
        topics = batch.envelope.topics
        if len(topics) == 1 or SYSTEM_MARK in {topic[:1] for topic in topics}:
            for topic in filter(is_reserved, topics):
                raise _reserved(topic)
        if not self.settings.limits.allow_wildcard_names:
            _check_no_wildcard(topics)
        return self._publish_now(batch, level, account)

    def _publish_now(
        self, batch: Batch, level: Level | None, account: Account | None = None
    ) -> asyncio.Future[Published]:
        try:
            self._check_open()
            check_batch(batch, self.settings.limits)
            head = batch.envelope
            log = self._stores.log_for(head.topics[0])
            if log is None:
                return self._ephemeral_publisher.publish(batch, level)
            if head.producer is not None:
                self._terms.check(head.producer, head.term)
            level = Level.STORED if level is None else level
            published = self._append(log, batch, level, account)
        except RunnelError as error:
            if not isinstance(error, BusyError):
                self.metrics.counters.publishes_failed += 1
            if isinstance(error, MovedError):
                if self._stores.is_coming(*_first_place(batch)):
                    raise BusyError("the shard is being loaded; wait for room") from None
                raise self._stores.moved(error, batch.envelope.topics) from None
            raise
        began_ns = self.clock.monotonic_ns()
        published.add_done_callback(lambda done: self._on_published(done, began_ns))
        self._count_in(batch, head.message_count)
        return published

    def _append(
        self, log: Store, batch: Batch, level: Level, account: Account | None
    ) -> asyncio.Future[Appended]:
        try:
            return log.append(batch, level, account, topics_made_max=TOPICS_PER_STEP)
        except ManyTopicsError:
            self.topic_creator.begin(log.metadata, batch.envelope, account)
            raise

    def _on_published(self, done: asyncio.Future[Appended], began_ns: int) -> None:
        if done.cancelled() or done.exception() is not None:
            self.metrics.counters.publishes_failed += 1
            if not done.cancelled() and isinstance(done.exception(), DiskFullError):
                self.monitor.on_no_room()
        else:
            self.metrics.publish_time.observe(self.clock.monotonic_ns() - began_ns)
            if done.result().is_repeated:
                self.metrics.counters.publishes_repeated += 1

    def _count_in(self, batch: Batch, count: int) -> None:
        head, size = batch.envelope, len(batch.body)
        topics = head.topics
        if len(topics) == 1:
            self.metrics.traffic.count_in(topics[0], count, size)
        else:
            counts = head.column32(head.counts)
            self.metrics.traffic.count_runs(topics, counts, count, size, is_out=False)
        if not is_reserved(topics[0]):  # the broker publishes to reserved topics itself
            counters = self.metrics.counters
            counters.batches_in += 1
            counters.bytes_in += size
            counters.messages_in += count

    def send(
        self,
        message: Message,
        level: Level | None = None,
        *,
        partition: int | None = None,
        account: Account | None = None,
    ) -> asyncio.Future[Published]:
        """Publish a single message, in one batch with others of this turn of the loop. BusyError as for `publish`."""
        self._check_open()
        check_message(message, self.settings.limits)
        if is_reserved(message.topic):
            raise _reserved(message.topic)
        if not self.settings.limits.allow_wildcard_names:
            _check_no_wildcard((message.topic,))
        shards = self._stores.shards_of(message.topic)
        if partition is None:
            key = message.key if message.partition_key is None else message.partition_key
            partition = 0 if key is None else partition_of_key(key, len(shards))
        shard = shards[min(partition, len(shards) - 1)]
        placed = Message(
            message.topic,
            message.payload,
            message.key,
            message.tags,
            message.event_time_ns,
            message.transmit_time_ns,
            0,
            partition,
            0,
            message.uid,
            message.partition_key,
        )
        if account is not None and self._creates_topic(message.topic):
            return self.publish(Batch.from_messages([placed]), level, account)
        return self._batcher.add(shard, placed, level)

    def _creates_topic(self, topic: str) -> bool:
        """Whether a message creates this topic: batched with others, the topic would count for no account."""
        return self._stores.log_of(topic) is None and self._stores.log_for(topic) is not None

    async def wait_room(self, topic: str, partition: int | None = None) -> None:
        """Wait until the broker can take a batch of this topic-partition; without a partition, of any in the topic."""
        await self.topic_creator.wait(topic)
        log = self._stores.log_for(topic)
        await self._stores.wait_here([topic], partition)
        if log is None:
            await self._ephemeral_publisher.wait_room(topic)
        else:
            shards = self._stores.shards_of(topic)
            if partition is not None:
                shards = [shards[min(partition, len(shards) - 1)]]
            wanted = dict.fromkeys(shards)
            # Of several, one that takes nothing may not be the caller's.
            passed_over = (Unavailable,) if len(wanted) > 1 else ()
            try:
                for shard in wanted:
                    with suppress(*passed_over):
                        await log.wait_room(shard)
            except MovedError as error:
                raise self._stores.moved(error, [topic]) from None

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the broker is closed")

    # --- Named publishers ---

    async def new_term(self, producer: str) -> int:
        """A term higher than all before it: producers with an older term may not publish any more."""
        self._check_open()
        term = await self._stores.take_term(producer)
        self._terms.taken(producer, term)
        return term

    # --- Callbacks of the logs ---

    def on_stored(self, shard: ShardId, batches: Sequence[VisibleBatch]) -> None:
        for stored in batches:
            if self._live_subscriptions.spread_kept(shard, stored):
                received_ns = int.from_bytes(stored.envelope.receive_times[-8:], "little")
                now_ns = self.clock.time_ns()
                self.metrics.delivery_time.observe(now_ns - received_ns)
                self._live_subscriptions.observe_age(stored, now_ns)
            self._fetcher.on_stored(stored.envelope)
            self.consumer_groups.on_stored(stored)

    def on_synced(self, shard: ShardId, took_ns: int) -> None:  # noqa: ARG002 - all shards together
        self.metrics.sync_time.observe(took_ns)

    def on_topic_made(self, topic: LogTopic) -> None:
        if not self._has_begun:
            return
        self._index.add_topic(topic.name)
        if self._stores.node is not None:
            self._stores.use(topic.shards)
            self._stores.node.use(topic.shards)
        self.consumer_groups.on_topic_made(topic)
        self.metrics.counters.topics_made += 1
        self.events.emit(
            EventKind.TOPIC_MADE,
            topic.name,
            keep=topic.policy.keep,
            journal=topic.policy.journal,
            partitions=topic.policy.partitions,
        )

    def on_topic_deleted(self, name: str) -> None:
        if not self._has_begun:
            return
        self._index.remove_topic(name)
        self.consumer_groups.on_topic_deleted(name)
        self.metrics.counters.topics_removed += 1
        self.events.emit(EventKind.TOPIC_DELETED, name)

    def on_term_taken(self, producer: str, term: int) -> None:
        self._terms.taken(producer, term)

    def on_subscription_changed(self, name: str) -> None:
        if not self._has_begun:
            return
        self.consumer_groups.on_subscription_changed(name)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        if not self._stores.on_shard_acquired(shard):
            self._live_subscriptions.on_new_shard(shard)
        self._live_subscriptions.on_shard_acquired(shard)
        self.consumer_groups.on_shard_acquired(shard)
        self._statistics.forget()

    async def before_release(self, shard: OwnedShard) -> None:
        self._batcher.flush()
        await self.consumer_groups.before_release(shard)

    def on_shard_released(self, shard: OwnedShard) -> None:
        self._stores.on_shard_released(shard)
        error = moved(shard.id)
        self._batcher.fail(shard.id, lambda topics: self._stores.moved(error, topics))
        self._live_subscriptions.on_shard_released(shard)
        self._fetcher.on_shard_released(shard)
        self.consumer_groups.on_shard_released(shard)
        self._statistics.forget()

    def _on_ephemeral_topic_made(self, topic: EphemeralTopic) -> None:
        self.metrics.counters.topics_made += 1
        if not topic.name.startswith("!"):
            self.events.emit(
                EventKind.TOPIC_MADE, topic.name, keep=topic.policy.keep, epoch=topic.epoch
            )

    # --- Reading ---

    async def fetch(self, request: FetchRequest) -> FetchResult:
        """Read stored messages of one partition."""
        self._check_open()
        try:
            try:
                fetched = await self._fetcher.fetch(request)
            except MovedError:
                if not await self._stores.wait_here([request.topic], request.partition):
                    raise
                fetched = await self._fetcher.fetch(request)
        except MovedError as error:
            raise self._stores.moved(error, [request.topic]) from None
        counters, size = self.metrics.counters, sum(len(batch.body) for batch in fetched.batches)
        counters.fetches += 1
        counters.messages_out += fetched.messages
        counters.bytes_out += size
        if fetched.batches:
            self.metrics.traffic.count_out(request.topic, fetched.messages, size)
        return fetched

    async def shards(
        self,
        patterns: Sequence[str],
        time_ns: int | None = None,
        *,
        owner: Hashable = None,
        part_only: bool = False,
    ) -> list[ShardState]:
        """The shards that have a matching topic, and their first and next entries. `part_only`: those served here."""
        self._check_open()
        return await self._shard_fetcher.shards(patterns, time_ns, owner, part_only=part_only)

    async def fetch_shard(self, request: ShardFetchRequest) -> ShardFetchResult:
        """Read stored messages of a shard, in the order in which they were stored."""
        self._check_open()
        try:
            fetched = await self._shard_fetcher.fetch(request)
        except MovedError as error:
            raise self._stores.shard_moved(error, request.shard) from None
        counters, size = self.metrics.counters, sum(map(len, fetched.blocks))
        counters.fetches += 1
        counters.messages_out += fetched.messages
        counters.bytes_out += size
        self.metrics.traffic.count_journal_out(request.shard.journal, fetched.messages, size)
        return fetched

    async def subscribe(self, request: SubscribeRequest) -> LiveSubscription:
        """Begin a live subscription. Deliveries begin when its `start` is called."""
        self._check_open()
        subscription = await self._live_subscriptions.subscribe(request)
        self.metrics.counters.subscriptions_opened += 1
        return subscription

    def served_for(self, subscription: LiveSubscription) -> list[ShardTerm]:
        """The shards that a subscription in parts may begin at this node."""
        return self._live_subscriptions.served_for(subscription)

    async def begin_shards(
        self, subscription: LiveSubscription, shards: Sequence[ShardTerm], start: Start
    ) -> Begun:
        """Let a subscription in parts begin these shards."""
        self._check_open()
        try:
            return await self._live_subscriptions.begin_shards(subscription, shards, start)
        except MovedError as error:
            raise self._stores.moved(error, ()) from None

    # --- Topics ---

    def routes(self, topics: Sequence[str]) -> list[Route]:
        """The shards that messages of these topics go to, whether the topics exist or not."""
        return self._stores.routes(topics)

    async def warn_of_habits(self, where: str, patterns: Iterable[str]) -> None:
        """Log each pattern in the syntax of MQTT or NATS that matches no topic, with the glob that was meant."""
        suspects = [each for each in patterns if glob_meant(each) is not None]
        for pattern in suspects[:_HINTS_MAX]:
            found, is_complete = await self.topics.list(TopicListRequest(pattern, limit=1))
            if is_complete and not found and (glob := glob_meant(pattern)) is not None:
                logger.warning(glob_hint(pattern, glob), where=where, pattern=pattern)

    async def delete_topic(self, name: str, *, part_only: bool = False) -> None:
        """Hide a topic and its messages; created again, it continues after its last offset.

        `part_only`: although other nodes serve some of its partitions.
        """
        self._check_open()
        await self.topics.delete(name, part_only=part_only)

    async def purge_topic(self, name: str, *, part_only: bool = False) -> None:
        """Hide all messages that a topic has now. `part_only`: in the partitions that are served here."""
        self._check_open()
        await self.topics.purge(name, part_only=part_only)
        self.consumer_groups.on_topic_purged(name)
        self.events.emit(EventKind.TOPIC_PURGED, name)

    # --- Monitoring ---

    def statistics(self) -> dict[str, object]:
        """The document of `!system/metrics/broker`, as of now."""
        return self._reporter.document()

    def _journal_of(self, topic: str) -> str:
        log = self._stores.log_of(topic)
        if log is not None:
            return log.metadata.topics.policy(topic).journal
        if self._ephemeral.knows(topic):
            return LIVE_SHARD.journal
        return self._stores.policies.for_topic(topic).journal

    def _subscription_rows(self) -> list[LiveSubscriptionStats]:
        return [
            LiveSubscriptionStats(
                each.sink.connection_id,
                each.number,
                each.sink.peer,
                [pattern.text for pattern in each.patterns],
                each.is_behind,
                each.lag,
                each.queued_bytes,
                each.messages_missed,
            )
            for each in self._live_subscriptions.subscriptions()
        ]

    def _publish_document(self, topic: str, payload: bytes) -> None:
        self._publish_own(Message(topic, payload, event_time_ns=self.clock.time_ns()))

    def _publish_event(self, topic: str, payload: bytes, tags: Mapping[str, str]) -> None:
        self._publish_own(Message(topic, payload, tags=tags, event_time_ns=self.clock.time_ns()))

    def _publish_own(self, message: Message) -> None:
        """Publish a message of the broker itself, without waiting for it."""
        if self._is_open:
            if self._stores.node is not None:
                partition = self._stores.partition_here(message.topic)
                message = msgspec.structs.replace(message, partition=partition)
            self._publish_now(Batch.from_messages([message]), Level.NONE)

    def _store_own(self, batch: Batch, level: Level) -> asyncio.Future[Published]:
        """Store a dead letter, or a message sent back. It was allowed once, so the current limits do not apply."""
        self._check_open()
        log = self._stores.log_for(batch.envelope.topics[0])
        if log is None:
            return self._publish_now(batch, level)
        published = log.append(batch, level)
        self._count_in(batch, len(batch))
        return published

    # --- Sync, checkpoint, close ---

    async def sync(self) -> None:
        """Wait until everything published so far is stored."""
        self._batcher.flush()
        for log in self._stores.kept:
            await log.sync()

    async def checkpoint(self) -> tuple[str, str]:
        """See `LogUpkeep.checkpoint`."""
        self._check_open()
        return await self._stores.main.checkpoint()

    async def drop_checkpoint(self) -> None:
        await self._stores.main.drop_checkpoint()

    async def close(self) -> None:
        """End all subscriptions, store queued batches, close the logs."""
        if not self._is_open:
            return
        if self._stores.node is not None:
            await self._stores.node.stop()
        self._batcher.flush()
        self._is_open = False
        self.monitor.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.quotas.close()
        await self._live_subscriptions.close()
        await self.consumer_groups.close()
        await self._ephemeral_publisher.tasks.finish()
        await self.topic_creator.tasks.finish()
        await self._batcher.tasks.finish()
        await self._stores.close()


def _first_place(batch: Batch) -> tuple[str, int]:
    """The first topic-partition of a batch. All of them lie in one shard."""
    return batch.envelope.topics[0], batch.envelope.column32(batch.envelope.partitions)[0]


def _check_no_wildcard(topics: Sequence[str]) -> None:
    """Refuse names that were most likely meant as patterns."""
    # Checking a thousand names takes a few microseconds if they are joined.
    if not has_wildcard(topics[0] if len(topics) == 1 else "".join(topics)):
        return
    topic = next(filter(has_wildcard, topics))
    raise InvalidNameError(
        f"topic {topic!r}: *, ? and [ are wildcards of patterns, and publishing goes to one topic; "
        "limits.allow_wildcard_names = true allows such names"
    )


def _reserved(topic: str) -> ClientFault:
    return ClientFault(
        f"topic {topic!r}: names that begin with ! are the system's; only {DEAD_LETTER_PREFIX}… and {STATS_PREFIX}… "
        "are open to publishers"
    )
