"""The broker's verbs as one caller may use them: each verb checks the caller's rights and quota.

Every protocol calls the broker through this class only. Where the broker asks for no token it refuses nothing. The
first words of a verb's docstring name the right that it needs; docs/security.md has the whole table. Lists show what
the caller has any right to.
"""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from msgspec.structs import replace

from runnel.broker.access_rules import EVERYTHING, AccessRules
from runnel.broker.broker import Broker
from runnel.broker.cluster_nodes import ClusterNodes
from runnel.broker.consumer_groups import (
    HeldPart,
    OpenConsumer,
    SettleRequest,
    SubscriptionRequest,
    WorkSink,
)
from runnel.broker.cursors import PlaceEnds
from runnel.broker.fetcher import FetchRequest, FetchResult
from runnel.broker.live.beginnings import Begun
from runnel.broker.live.subscription import LiveSubscription, OpenSubscription, SubscribeRequest
from runnel.broker.message_batcher import Published
from runnel.broker.metered_sinks import MeteredLiveSink, MeteredWorkSink
from runnel.broker.monitoring.audit import AuditKind
from runnel.broker.monitoring.exposed_metrics import NodeMetrics
from runnel.broker.monitoring.metric_tables import ConnectionStats
from runnel.broker.monitoring.reporter import METRICS_TOPIC
from runnel.broker.pages import Listed, ListRequest
from runnel.broker.shard_fetcher import ShardFetchRequest, ShardFetchResult
from runnel.broker.topics import TopicListRequest
from runnel.errors import (
    ForbiddenError,
    UnknownSubscriptionError,
)
from runnel.formats.batch import Batch
from runnel.formats.cluster_heads import NodeReport, ShardReport, ShardWish
from runnel.formats.message import Message
from runnel.formats.metrics_report import ExposedMetric
from runnel.formats.wire import (
    CursorPlace,
    CursorState,
    Route,
    ShardState,
    ShardTerm,
    Start,
    TopicState,
)
from runnel.formats.work_heads import Consume, SubscriptionState
from runnel.log.log import Level, ShardId
from runnel.security.authenticator import AuthenticatedClient
from runnel.security.rights import Right, Rights
from runnel.topics.policies import Policies

_STATISTICS_TOPIC: Final = f"{METRICS_TOPIC}/broker"
# Looked up once: with Python 3.11 that takes longer than the rest of the check of a small batch.
_PUBLISH: Final = Right.PUBLISH

_P = ParamSpec("_P")
_T = TypeVar("_T")
_A = TypeVar("_A", bound="Access")


def audited(
    verb: Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]]:
    """Decorates a verb: each denial goes to the audit trail."""

    @functools.wraps(verb)
    async def recorded(self: _A, /, *args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return await verb(self, *args, **named)
        except ForbiddenError as error:
            self.record_denial(verb.__name__, error)
            raise

    return recorded


class Scope(enum.Enum):
    """For how much of a cluster a caller wants to be answered. A single broker answers all of them alike."""

    CLUSTER = "cluster"  # everything, at any node: the caller knows nothing of nodes
    PARTS = "parts"  # it follows routes, and merges the parts of what it reads by itself
    NODE = "part_only"  # this node's own part: it is another node, which merges


class MakeAccess(Protocol):
    """Makes the access of a caller. Listeners are opened with one, and know no other way to the verbs."""

    def __call__(
        self, client: AuthenticatedClient, peer: str, scope: Scope = Scope.CLUSTER
    ) -> Access:
        """`peer` is the caller's address, for the audit trail."""
        ...


def local_access(broker: Broker) -> MakeAccess:
    """Access to a broker that has everything: it is alone."""

    def make(
        client: AuthenticatedClient,
        peer: str,
        scope: Scope = Scope.CLUSTER,  # noqa: ARG001 - its own part is everything
    ) -> Access:
        return Access(broker, client.rights, peer)

    return make


class Access:
    """One caller: a connection of the native protocol, or a single call of HTTP and gRPC."""

    __slots__ = (
        "_account",
        "_broker",
        "_has_checkpoint",
        "_part_only",
        "_peer",
        "_rights",
        "_rules",
        "_slowed_reads",
    )

    def __init__(
        self, broker: Broker, rights: Rights | None, peer: str = "", *, part_only: bool = False
    ) -> None:
        """`peer` is the caller's address, for the audit trail.

        `part_only`: verbs over several shards answer for those that are served here, and refuse nothing because of
        the others.
        """
        self._broker = broker
        self._part_only = part_only
        self._rights = rights
        self._rules = AccessRules(broker, rights)
        self._has_checkpoint = False
        self._peer = peer
        self._slowed_reads: set[asyncio.Task[Any]] = set()  # they wait for the token's rate
        # None: the broker asks for no token, or the caller has not authenticated yet.
        self._account = None if rights is None or not rights.name else broker.quotas.of(rights)

    @property
    def _token(self) -> str:
        """The token's name; empty where the broker asks for none."""
        return "" if self._rights is None else self._rights.name

    def _record(self, kind: AuditKind, subject: str, **fields: object) -> None:
        """Record a change in the audit trail."""
        self._broker.audit.record(kind, subject, token=self._token, peer=self._peer, **fields)

    def record_denial(self, verb: str, error: Exception) -> None:
        """Record that this class, or a protocol that knows more about the request, denied a verb."""
        # Some errors hide whether a thing exists. The cause of such an error says which right is missing.
        problem = str(error.__cause__ or error)
        self._broker.audit.deny(verb, problem, token=self._token, peer=self._peer)

    def time_ns(self) -> int:
        """The broker's clock; needs no right."""
        return self._broker.clock.time_ns()

    def served_stamp(self) -> int:
        """A hash over the shards that are served here at this moment; 0 for callers that are no other node."""
        return 0

    @property
    def policies(self) -> Policies:
        """The topic rules that hold now. A caller that may see a topic may know its rule."""
        return self._broker.policies

    @property
    def nodes(self) -> ClusterNodes:
        """The living nodes of the cluster; needs no right, as routes name them too."""
        return self._broker.nodes

    # --- Copying ---

    @audited
    async def checkpoint(self) -> tuple[str, str]:
        """`admin` for everything. The checkpoint stays until the caller drops it with `drop_checkpoint`."""
        self._rules.check_patterns(Right.ADMIN, EVERYTHING)
        made = await self._broker.checkpoint()
        self._has_checkpoint = True
        return made

    @property
    def has_checkpoint(self) -> bool:
        return self._has_checkpoint

    async def drop_checkpoint(self) -> None:
        """Remove the caller's checkpoint, if it has one."""
        if self._has_checkpoint:
            self._has_checkpoint = False
            await self._broker.drop_checkpoint()

    # --- The cluster ---

    @audited
    async def cluster(
        self, *, after: ShardId | None = None, limit: int = 0
    ) -> tuple[int, Sequence[NodeReport], Sequence[ShardReport], bool]:
        """`admin` for everything, as for all verbs about the cluster."""
        self._rules.check_patterns(Right.ADMIN, EVERYTHING)
        return await self._broker.cluster.report(after=after, limit=limit)

    @audited
    async def move_shard(self, shard: ShardId, node: str) -> None:
        """Wish that a node serves a shard; "" takes the wish back."""
        self._rules.check_patterns(Right.ADMIN, EVERYTHING)
        await self._broker.cluster.move(shard, node)
        self._record(AuditKind.SHARD_MOVED, str(shard), node=node)

    @audited
    async def drain_node(self, node: str, *, is_draining: bool) -> None:
        """Let a node give up its shards, or take some again."""
        self._rules.check_patterns(Right.ADMIN, EVERYTHING)
        await self._broker.cluster.drain(node, is_draining=is_draining)
        self._record(AuditKind.NODE_DRAINED, node, is_draining=is_draining)

    @audited
    async def balance_cluster(self) -> Sequence[ShardWish]:
        """Wish for the moves that make loads even."""
        self._rules.check_patterns(Right.ADMIN, EVERYTHING)
        wishes = await self._broker.cluster.balance()
        self._record(AuditKind.CLUSTER_BALANCED, "", moves=len(wishes))
        return wishes

    # --- Publishing ---

    def publish(self, batch: Batch, level: Level | None = None) -> asyncio.Future[Published]:
        """`publish` for every topic of the batch."""
        if self._rights is not None:
            try:
                self._rights.check_all(_PUBLISH, batch.envelope.topics)
            except ForbiddenError as error:
                self.record_denial("publish", error)
                raise
        account = self._account
        if account is None or account.incoming is None:
            return self._broker.publish(batch, level, account)
        account.check_in()
        published = self._broker.publish(batch, level, account)
        account.charge_in(batch.envelope.message_count, len(batch.body))
        return published

    def send(
        self, message: Message, level: Level | None = None, *, partition: int | None = None
    ) -> asyncio.Future[Published]:
        """`publish` for its topic."""
        if self._rights is not None:
            try:
                self._rights.check(_PUBLISH, message.topic)
            except ForbiddenError as error:
                self.record_denial("send", error)
                raise
        account = self._account
        if account is None or account.incoming is None:
            return self._broker.send(message, level, partition=partition, account=account)
        account.check_in()
        published = self._broker.send(message, level, partition=partition, account=account)
        account.charge_in(1, message.size)
        return published

    async def wait_room(self, topic: str, partition: int | None = None) -> None:
        """Wait until the broker can take a batch of this topic-partition and the token's rate allows it."""
        await self._broker.wait_room(topic, partition)
        if self._account is not None:
            await self._account.wait_in()

    @property
    def is_slowed(self) -> bool:
        """Whether a publish has to wait for the token's rate."""
        return self._account is not None and self._account.is_slowed_in

    async def new_term(self, producer: str) -> int:
        """`publish` for any topic: a producer's name belongs to no topic."""
        if self._rights is not None and not self._rights.has_any(Right.PUBLISH):
            error = self._rights.refusal(Right.PUBLISH, "any topic")
            self.record_denial("new_term", error)
            raise error
        return await self._broker.new_term(producer)

    # --- Reading ---

    @property
    def is_slowed_out(self) -> bool:
        """Whether a fetch has to wait for the token's rate."""
        return self._account is not None and self._account.is_slowed_out

    @property
    def has_slowed_reads(self) -> bool:
        """Whether reads wait for the token's rate."""
        return bool(self._slowed_reads)

    def give_up_slowed_reads(self) -> None:
        """Cancel the reads that wait for the token's rate: the caller has left, or has to leave.

        Otherwise they would use up the rate of the callers that remain.
        """
        for task in list(self._slowed_reads):
            task.cancel()

    async def _wait_out(self) -> None:
        """Wait until the token's rate allows another read."""
        account, task = self._account, asyncio.current_task()
        if account is None or task is None or not account.is_slowed_out:
            return
        self._slowed_reads.add(task)
        try:
            await account.wait_out()
        finally:
            self._slowed_reads.discard(task)

    @audited
    async def fetch(self, request: FetchRequest) -> FetchResult:
        """`read` for the topic."""
        self._rules.check_topic(Right.READ, request.topic)
        account = self._account
        if account is not None:
            await self._wait_out()
            messages_max, bytes_max = account.page_max(request.messages_max, request.bytes_max)
            request = replace(request, messages_max=messages_max, bytes_max=bytes_max)
        fetched = await self._broker.fetch(request)
        if account is not None and account.outgoing is not None:
            account.charge_out(fetched.messages, sum(len(each.body) for each in fetched.batches))
        return fetched

    @audited
    async def shards(self, patterns: Sequence[str], time_ns: int | None = None) -> list[ShardState]:
        """`read` for the patterns."""
        self._rules.check_read(patterns)
        return await self._broker.shards(
            patterns, time_ns, owner=self._owner, part_only=self._part_only
        )

    @audited
    async def fetch_shard(self, request: ShardFetchRequest) -> ShardFetchResult:
        """`read` for the patterns; and any right to the topic, if the journal is one topic's own."""
        self._rules.check_read(request.patterns)
        self._rules.check_journals((request.shard.journal,))
        account = self._account
        if account is not None:
            await self._wait_out()
            _, bytes_max = account.page_max(0, request.bytes_max)
            request = replace(request, bytes_max=bytes_max)
        fetched = await self._broker.fetch_shard(request)
        if account is not None:
            account.charge_out(fetched.messages, sum(map(len, fetched.blocks)))
        return fetched

    @audited
    async def subscribe(self, request: SubscribeRequest) -> OpenSubscription:
        """`read` for the patterns."""
        self._rules.check_read(request.patterns)
        account = self._account
        if account is None:
            return await self._broker.subscribe(request)
        metered = MeteredLiveSink(request.sink, account)
        subscription = await self._broker.subscribe(replace(request, sink=metered))
        metered.reader = subscription
        account.slow_if_over(subscription)
        return subscription

    def served_for(self, subscription: LiveSubscription) -> list[ShardTerm]:
        """The shards that the caller's subscription in parts may begin here. `subscribe` has checked its patterns."""
        return self._broker.served_for(subscription)

    async def begin_shards(
        self, subscription: LiveSubscription, shards: Sequence[ShardTerm], start: Start
    ) -> Begun:
        """Begin these shards of the caller's subscription in parts."""
        return await self._broker.begin_shards(subscription, shards, start)

    # --- Topics and cursors ---

    def routes(self, topics: Sequence[str]) -> list[Route]:
        """Any right to each of the topics."""
        if self._rights is not None:
            try:
                for topic in topics:
                    self._rules.check_seen(topic)
            except ForbiddenError as error:
                self.record_denial("routes", error)
                raise
        return self._broker.routes(topics)

    async def topics(
        self, pattern: str = "*", *, after: str = "", limit: int = 1000
    ) -> Listed[TopicState]:
        """Lists the topics that the caller has any right to; False: there are more."""
        visible = None if self._rights is None else self._rights.visible
        return await self._broker.topics.list(
            TopicListRequest(pattern, after, limit, visible, self._owner)
        )

    @property
    def _owner(self) -> object:
        """The owner by which walks over large lists take turns: the token, or this connection."""
        return self if self._rights is None else self._rights.name

    @audited
    async def describe_topic(self, name: str) -> TopicState:
        """Any right to the topic."""
        self._rules.check_seen(name)
        return await self._broker.topics.describe(
            name, asker=self._owner, part_only=self._part_only
        )

    @audited
    async def delete_topic(self, name: str) -> None:
        """`admin` for the topic."""
        self._rules.check_topic(Right.ADMIN, name)
        await self._broker.delete_topic(name, part_only=self._part_only)
        self._record(AuditKind.TOPIC_DELETED, name)

    @audited
    async def purge_topic(self, name: str) -> None:
        """`admin` for the topic."""
        self._rules.check_topic(Right.ADMIN, name)
        await self._broker.purge_topic(name, part_only=self._part_only)
        self._record(AuditKind.TOPIC_PURGED, name)

    @audited
    async def set_cursor(
        self, name: str, places: Sequence[CursorPlace], *, ends: PlaceEnds | None = None
    ) -> None:
        """`read` for every new place and for every place that the cursor has so far.

        `ends`: what their owners say of the places that are not served here.
        """
        known = self._broker.cursors.known(name)
        self._rules.check_cursor(name, places, known)
        await self._broker.cursors.set(name, places, self._account, ends=ends)
        if any(_is_moved_back(each.places, places) for each in known):
            self._record(AuditKind.CURSOR_MOVED, name)

    @audited
    async def remove_cursor(self, name: str) -> None:
        """`read` or `admin` for every place."""
        self._rules.check_cursor_removal(name, self._broker.cursors.known(name))
        await self._broker.cursors.remove(name)
        self._record(AuditKind.CURSOR_REMOVED, name)

    async def cursors(self, *, after: str = "", limit: int = 0) -> Listed[CursorState]:
        """Lists cursors of which the caller may read, or administer, every place; False: there are more."""
        is_visible = None if self._rights is None else self._rules.sees_cursor
        request = ListRequest(after, limit, is_visible, self._owner)
        return await self._broker.cursors.page(request, part_only=self._part_only)

    async def cursor(self, name: str) -> list[CursorState]:
        """The cursor of this name; an empty list if it does not exist or the caller may not see it."""
        is_visible = None if self._rights is None else self._rules.sees_cursor
        return await self._broker.cursors.list(
            name, is_visible=is_visible, owner=self._owner, part_only=self._part_only
        )

    # --- Acknowledged work ---

    @audited
    async def consume(
        self, number: int, sink: WorkSink, request: Consume, part: HeldPart | None = None
    ) -> OpenConsumer:
        """`consume` for the patterns of the subscription, whether it exists or has to be made.

        `part`: the consumer joins at every node, and this is its part here.
        """
        self._rules.check_patterns(Right.CONSUME, request.patterns)
        self._rules.check_subscription(
            request.subscription, Right.CONSUME, is_new=bool(request.patterns)
        )
        account = self._account
        metered = None if account is None else MeteredWorkSink(sink, account)
        consumer = await self._broker.consumer_groups.consume(
            number, metered or sink, request, account, part
        )
        if account is not None and metered is not None:
            metered.reader = consumer
            account.slow_if_over(consumer)
        if not self._rules.covers(Right.CONSUME, consumer.definition.patterns):
            # Since the first check the subscription was deleted and made again over other topics. Nothing was sent yet.
            consumer.close(is_clean=True)
            raise self._rules.refusal_of(request.subscription, Right.CONSUME)
        return consumer

    async def consume_polling(self, number: int, sink: WorkSink, request: Consume) -> OpenConsumer:
        """`consume` by a consumer that lives in this process and gets requests, perhaps one by one."""
        return await self.consume(number, sink, request)

    @audited
    async def make_subscription(self, request: SubscriptionRequest) -> bool:
        """`consume` for the patterns. Returns False if the subscription existed already."""
        name = request.name
        self._rules.check_patterns(Right.CONSUME, request.patterns)
        self._rules.check_subscription(name, Right.CONSUME, is_new=True)
        try:
            self._broker.consumer_groups.patterns_of(name)
        except UnknownSubscriptionError:
            is_new = True
        else:
            is_new = False
        await self._broker.consumer_groups.make_subscription(request, self._account)
        if is_new:
            await self._broker.warn_of_habits(f"subscription {name}", request.patterns)
        return is_new

    @audited
    async def delete_subscription(self, name: str) -> None:
        """`admin` for the subscription's patterns."""
        self._rules.check_subscription(name, Right.ADMIN)
        await self._broker.consumer_groups.delete_subscription(name)
        self._record(AuditKind.SUBSCRIPTION_DELETED, name)

    @audited
    async def pause_subscription(self, name: str, *, is_paused: bool) -> None:
        """`admin` for the subscription's patterns."""
        self._rules.check_subscription(name, Right.ADMIN)
        await self._broker.consumer_groups.pause_subscription(name, is_paused=is_paused)
        kind = AuditKind.SUBSCRIPTION_PAUSED if is_paused else AuditKind.SUBSCRIPTION_RESUMED
        self._record(kind, name)

    @audited
    async def move_subscription(self, name: str, start: Start, member: str | None = None) -> None:
        """`admin` for the subscription's patterns."""
        self._rules.check_subscription(name, Right.ADMIN)
        await self._broker.consumer_groups.move_subscription(name, start, member=member)
        self._record(AuditKind.SUBSCRIPTION_MOVED, name, to=start.kind, member=member or "")

    @audited
    async def remove_member(self, name: str, member: str) -> None:
        """`admin` for the subscription's patterns."""
        self._rules.check_subscription(name, Right.ADMIN)
        await self._broker.consumer_groups.remove_member(name, member)
        self._record(AuditKind.MEMBER_REMOVED, name, member=member)

    @audited
    async def subscription(self, name: str) -> SubscriptionState:
        """`consume` or `admin` for the patterns. The answer includes the partitions."""
        self._rules.check_subscription(name, Right.CONSUME, Right.ADMIN)
        [state] = await self._broker.consumer_groups.subscriptions(name, owner=self._owner)
        return state

    async def subscriptions(self, *, after: str = "", limit: int = 0) -> Listed[SubscriptionState]:
        """Lists subscriptions whose patterns the caller may consume, or administer; False: there are more."""
        is_visible = None if self._rights is None else self._rules.sees_subscription
        return await self._broker.consumer_groups.subscription_page(
            ListRequest(after, limit, is_visible, self._owner)
        )

    @audited
    async def dead_letters(
        self, subscription: str, offset: int, messages_max: int
    ) -> tuple[Sequence[Batch], int]:
        """`consume` or `admin` for the subscription's patterns, or `read` for its topic `!dead/…`.

        Without `read`, letters of other topics are left out: letters outlive their subscription, and a new one of the
        same name may be over other topics.
        """
        self._rules.check_letters_seen(subscription)
        account = self._account
        if account is not None:
            await self._wait_out()
            messages_max, _ = account.page_max(messages_max, 0)
        found = await self._broker.consumer_groups.dead_letters(subscription, offset, messages_max)
        if account is not None:
            account.charge_out(sum(map(len, found[0])), sum(len(each.body) for each in found[0]))
        if self._rules.reads_letters(subscription):
            return found
        batches, next_offset = found
        return [own for batch in batches for own in self._rules.own_letters(batch)], next_offset

    @audited
    async def settle_dead(self, request: SettleRequest) -> int:
        """`admin` for the subscription's patterns."""
        self._rules.check_subscription(request.subscription, Right.ADMIN)
        settled = await self._broker.consumer_groups.settle_dead(request)
        kind = (
            AuditKind.DEAD_LETTERS_REDRIVEN
            if request.is_redriven
            else AuditKind.DEAD_LETTERS_DROPPED
        )
        self._record(kind, request.subscription, messages=settled)
        return settled

    # --- Monitoring ---

    def statistics(self) -> dict[str, object]:
        """`read` for `!system/metrics/broker`, the topic with the same document."""
        self.check_monitoring()
        return self._broker.statistics()

    async def statistics_of_nodes(self) -> dict[str, object]:
        """As `statistics`, and in a cluster with those of all nodes under `nodes`."""
        return self.statistics()

    async def metrics(self) -> Sequence[ExposedMetric]:
        """As for `statistics`. Returns all metrics of this broker."""
        self.check_monitoring()
        return await self._broker.monitor.read_metrics()

    async def metrics_of_nodes(self) -> Sequence[NodeMetrics]:
        """As for `statistics`. Returns the metrics of each node; of a broker that is alone, under no name."""
        return [NodeMetrics("", await self.metrics())]

    async def connections(self, *, after: int = 0, limit: int = 0) -> Listed[ConnectionStats]:
        """As for `statistics`. Lists connections of all listeners in order of age; False: there are more."""
        self.check_monitoring()
        return await self._broker.connections.page(after=after, limit=limit, owner=self._owner)

    def check_monitoring(self) -> None:
        """The right that statistics, metrics and the list of connections need."""
        if self._rights is not None:
            try:
                self._rights.check(Right.READ, _STATISTICS_TOPIC)
            except ForbiddenError as error:
                self.record_denial("statistics", error)
                raise


def _is_moved_back(before: Sequence[CursorPlace], after: Sequence[CursorPlace]) -> bool:
    """Whether a place lies earlier than before, or is missing."""
    known = {_place_key(place): _place_order(place) for place in after}
    return any(known.get(_place_key(place), (-1, -1)) < _place_order(place) for place in before)


def _place_key(place: CursorPlace) -> tuple[object, ...]:
    if place.topic is not None:
        return (place.topic, place.partition)
    return (place.journal, place.shard, frozenset(place.patterns))


def _place_order(place: CursorPlace) -> tuple[int, int]:
    return (place.offset, 0) if place.topic is not None else (place.entry, place.row)
