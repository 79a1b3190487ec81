"""The broker as one caller may use it: the same verbs at every door, each of which needs a right.

Doors have no other way in. Where nobody is asked for a token there are no rights to look at, and nothing is refused.
What a verb needs is told in docs/security.md; lists show what the caller has any right to.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from runnel.broker.audit import AuditKind
from runnel.broker.broker import Broker
from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.sink import WorkSink
from runnel.broker.fetching import Fetched
from runnel.broker.gathering import Published
from runnel.broker.live_subscription import LiveSubscription, Sink
from runnel.broker.metered import MeteredSink, MeteredWorkSink
from runnel.broker.metric_tables import ConnectionRow
from runnel.broker.pages import Listed
from runnel.broker.reporter import METRICS_TOPIC
from runnel.broker.shard_reading import ShardFetched
from runnel.errors import (
    ClientFault,
    ForbiddenError,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats.batch import Batch
from runnel.formats.dead_letters import TOPIC_TAG
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, CursorState, Route, ShardState, Start, TopicState
from runnel.formats.work_heads import Consume, SubscriptionState, WorkOptions
from runnel.log.log import Level, ShardId
from runnel.security.rights import Right, Rights
from runnel.topics.names import dead_letter_topic
from runnel.topics.policies import Policies

_STATISTICS_TOPIC: Final = f"{METRICS_TOPIC}/broker"
_EVERYTHING: Final = ("*",)
# Looked up once: with Python 3.11 that takes longer than the rest of the check of a small batch.
_PUBLISH: Final = Right.PUBLISH

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _audited(
    verb: Callable[Concatenate[Access, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Access, _P], Coroutine[Any, Any, _T]]:
    """A verb whose denials are recorded."""

    @functools.wraps(verb)
    async def audited(self: Access, /, *args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return await verb(self, *args, **named)
        except ForbiddenError as error:
            self.record_denial(verb.__name__, error)
            raise

    return audited


class Access:
    """Made by a door for a connection, or for a call where calls come one by one."""

    __slots__ = ("_account", "_broker", "_has_checkpoint", "_peer", "_rights", "_slowed_reads")

    def __init__(self, broker: Broker, rights: Rights | None, peer: str = "") -> None:
        """`peer` is where the caller is, for the audit trail."""
        self._broker = broker
        self._rights = rights
        self._has_checkpoint = False
        self._peer = peer
        self._slowed_reads: set[asyncio.Task[Any]] = set()  # that wait for the token's rate
        # None: nobody was asked for a token, or nobody has come in yet.
        self._account = None if rights is None or not rights.name else broker.quotas.of(rights)

    @property
    def _token(self) -> str:
        """The token's name; empty where nobody is asked for one."""
        return "" if self._rights is None else self._rights.name

    def _record(self, kind: AuditKind, subject: str, **fields: object) -> None:
        """A change was made."""
        self._broker.audit.record(kind, subject, token=self._token, peer=self._peer, **fields)

    def record_denial(self, verb: str, error: Exception) -> None:
        """A verb was denied: by this, or by a listener that knows more of the request."""
        problem = str(
            error.__cause__ or error
        )  # the cause of a neutral answer says which right is missing
        self._broker.audit.deny(verb, problem, token=self._token, peer=self._peer)

    def time_ns(self) -> int:
        """The broker's clock; everybody may know."""
        return self._broker.clock.time_ns()

    @property
    def policies(self) -> Policies:
        """The rules as they are now; whoever may see a topic may know what they say of it."""
        return self._broker.policies

    # --- Copying ---

    @_audited
    async def checkpoint(self) -> tuple[str, str]:
        """`admin` for everything. It stays until `drop_checkpoint`: who is given this has to call that in the end."""
        if self._rights is not None:
            self._rights.check_patterns(Right.ADMIN, _EVERYTHING)
        made = await self._broker.checkpoint()
        self._has_checkpoint = True
        return made

    @property
    def has_checkpoint(self) -> bool:
        return self._has_checkpoint

    async def drop_checkpoint(self) -> None:
        """The caller's, if it has one."""
        if self._has_checkpoint:
            self._has_checkpoint = False
            await self._broker.drop_checkpoint()

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

    async def wait_room(self, topic: str) -> None:
        """Until a batch of this topic can be taken, and the token may publish."""
        await self._broker.wait_room(topic)
        if self._account is not None:
            await self._account.wait_in()

    @property
    def is_slowed(self) -> bool:
        """Whether a publish has to wait for the token's rate."""
        return self._account is not None and self._account.is_slowed_in

    def new_term(self, producer: str) -> int:
        """`publish` for anything at all: a producer's name belongs to no topic."""
        if self._rights is not None and not self._rights.has_any(Right.PUBLISH):
            error = self._rights.refusal(Right.PUBLISH, "any topic")
            self.record_denial("new_term", error)
            raise error
        return self._broker.new_term(producer)

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
        """The caller has gone, or has to go: cancel its reads that wait for the token's rate.

        Left alone they would take the turns of those who are still there.
        """
        for task in list(self._slowed_reads):
            task.cancel()

    async def _wait_out(self) -> None:
        """Until the token's rate allows another read."""
        account, task = self._account, asyncio.current_task()
        if account is None or task is None or not account.is_slowed_out:
            return
        self._slowed_reads.add(task)
        try:
            await account.wait_out()
        finally:
            self._slowed_reads.discard(task)

    @_audited
    async def fetch(
        self,
        topic: str,
        partition: int | None = None,
        *,
        offset: int | None = None,
        time_ns: int | None = None,
        messages_max: int = 0,
        bytes_max: int = 2**20,
        wait_ns: int = 0,
        while_waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> Fetched:
        """`read` for the topic."""
        if self._rights is not None:
            self._rights.check(Right.READ, topic)
        account = self._account
        if account is not None:
            await self._wait_out()
            messages_max, bytes_max = account.page_max(messages_max, bytes_max)
        fetched = await self._broker.fetch(
            topic,
            partition,
            offset=offset,
            time_ns=time_ns,
            messages_max=messages_max,
            bytes_max=bytes_max,
            wait_ns=wait_ns,
            while_waiting=while_waiting,
        )
        if account is not None and account.outgoing is not None:
            account.charge_out(fetched.messages, sum(len(each.body) for each in fetched.batches))
        return fetched

    @_audited
    async def shards(self, patterns: Sequence[str], time_ns: int | None = None) -> list[ShardState]:
        """`read` for the patterns."""
        self._check_read(patterns)
        return await self._broker.shards(patterns, time_ns, owner=self._owner)

    @_audited
    async def fetch_shard(
        self,
        shard: ShardId,
        entry: int,
        *,
        end_entry: int = 0,
        patterns: Sequence[str] = ("*",),
        epoch: int = 0,
        bytes_max: int = 2**20,
    ) -> ShardFetched:
        """`read` for the patterns; and any right to the topic, if the journal is one topic's own."""
        self._check_read(patterns)
        if self._rights is not None:
            self._check_journals((shard.journal,))
        account = self._account
        if account is not None:
            await self._wait_out()
            _, bytes_max = account.page_max(0, bytes_max)
        fetched = await self._broker.fetch_shard(
            shard,
            entry,
            end_entry=end_entry,
            patterns=patterns,
            epoch=epoch,
            bytes_max=bytes_max,
        )
        if account is not None:
            account.charge_out(fetched.messages, sum(map(len, fetched.blocks)))
        return fetched

    @_audited
    async def subscribe(
        self,
        number: int,
        sink: Sink,
        patterns: Sequence[str],
        start: Start,
        *,
        credit_bytes: int,
        overflow: str = "drop_oldest",
    ) -> LiveSubscription:
        """`read` for the patterns."""
        self._check_read(patterns)
        account = self._account
        metered = None if account is None else MeteredSink(sink, account)
        subscription = await self._broker.subscribe(
            number,
            metered or sink,
            patterns,
            start,
            credit_bytes=credit_bytes,
            overflow=overflow,
        )
        if account is not None and metered is not None:
            metered.reader = subscription
            account.slow_if_over(subscription)
        return subscription

    def _check_read(self, patterns: Sequence[str]) -> None:
        # Of a shard one learns something even without patterns: how far it has come.
        self._check_patterns(Right.READ, patterns or _EVERYTHING)

    def _check_journals(self, journals: Iterable[str]) -> None:
        """Refuse journals of single topics that the caller has no right to.

        They are called after their topics, and how far they have come tells how much was published.
        """
        for journal in journals:
            topic = self._broker.policies.topic_of_journal(journal)
            if topic is not None:
                self._check_seen(topic)

    # --- Topics and cursors ---

    def routes(self, topics: Sequence[str]) -> list[Route]:
        """Any right to each of the topics."""
        if self._rights is not None:
            try:
                for topic in topics:
                    self._check_seen(topic)
            except ForbiddenError as error:
                self.record_denial("routes", error)
                raise
        return self._broker.routes(topics)

    async def topics(
        self, pattern: str = "*", *, after: str = "", limit: int = 1000
    ) -> tuple[list[TopicState], bool]:
        """Those that the caller has any right to."""
        visible = None if self._rights is None else self._rights.visible
        return await self._broker.topics(
            pattern, after=after, limit=limit, visible=visible, owner=self._owner
        )

    @property
    def _owner(self) -> object:
        """In whose turns it walks over what there is: a token's, or this connection's."""
        return self if self._rights is None else self._rights.name

    @_audited
    async def describe_topic(self, name: str) -> TopicState:
        """Any right to the topic."""
        self._check_seen(name)
        return await self._broker.describe_topic(name, owner=self._owner)

    def _check_seen(self, topic: str) -> None:
        if self._rights is not None and not self._rights.sees(topic):
            raise ForbiddenError(f"token {self._rights.name!r} has no right to topic {topic!r}")

    @_audited
    async def delete_topic(self, name: str) -> None:
        """`admin` for the topic."""
        if self._rights is not None:
            self._rights.check(Right.ADMIN, name)
        await self._broker.delete_topic(name)
        self._record(AuditKind.TOPIC_DELETED, name)

    @_audited
    async def purge_topic(self, name: str) -> None:
        """`admin` for the topic."""
        if self._rights is not None:
            self._rights.check(Right.ADMIN, name)
        await self._broker.purge_topic(name)
        self._record(AuditKind.TOPIC_PURGED, name)

    @_audited
    async def set_cursor(self, name: str, places: Sequence[CursorPlace]) -> None:
        """`read` for every place, and for those that it has had so far."""
        known = self._broker.known_cursors(name)
        if self._rights is not None:
            self._check_places(places)
            try:
                for each in known:
                    self._check_places(each.places)
            except ForbiddenError as error:  # it names places that are not the caller's to know
                raise ForbiddenError(
                    f"token {self._token!r} has no right to read for all places of cursor {name!r}"
                ) from error
        await self._broker.set_cursor(name, places, self._account)
        if any(_is_moved_back(each.places, places) for each in known):
            self._record(AuditKind.CURSOR_MOVED, name)

    @_audited
    async def remove_cursor(self, name: str) -> None:
        """`read` or `admin` for every place."""
        if self._rights is not None:
            known = self._broker.known_cursors(name)
            if not known or not all(map(self._sees_cursor, known)):
                raise self._neutral(
                    f"cursor {name!r}", "places", (Right.READ, Right.ADMIN), UnknownTopicError
                )
        await self._broker.remove_cursor(name)
        self._record(AuditKind.CURSOR_REMOVED, name)

    async def cursors(self, *, after: str = "", limit: int = 0) -> Listed[CursorState]:
        """Those of which the caller may read, or administer, every place, and whether these are all of them."""
        is_visible = None if self._rights is None else self._sees_cursor
        return await self._broker.cursor_page(
            after=after, limit=limit, is_visible=is_visible, owner=self._owner
        )

    async def cursor(self, name: str) -> list[CursorState]:
        """The one of this name; none if the caller may not see it."""
        is_visible = None if self._rights is None else self._sees_cursor
        return await self._broker.cursors(name, is_visible=is_visible, owner=self._owner)

    def _check_places(self, places: Sequence[CursorPlace]) -> None:
        assert self._rights is not None
        self._rights.check_all(
            Right.READ, {place.topic for place in places if place.topic is not None}
        )
        self._rights.check_patterns(Right.READ, _patterns_of(places))
        self._check_journals({place.journal for place in places if place.journal is not None})

    def _sees_cursor(self, cursor: CursorState) -> bool:
        assert self._rights is not None
        rights = self._rights
        return any(
            all(
                rights.allows(right, place.topic)
                for place in cursor.places
                if place.topic is not None
            )
            and self._covers(right, _patterns_of(cursor.places))
            for right in (Right.READ, Right.ADMIN)
            if rights.has_any(right)
        )

    # --- Acknowledged work ---

    @_audited
    async def consume(self, number: int, sink: WorkSink, request: Consume) -> WorkConsumer:
        """`consume` for the patterns of the subscription, whether it exists or is made."""
        self._check_patterns(Right.CONSUME, request.patterns)
        if self._rights is not None:
            self._check_subscription(
                request.subscription, Right.CONSUME, is_new=bool(request.patterns)
            )
        account = self._account
        metered = None if account is None else MeteredWorkSink(sink, account)
        consumer = await self._broker.work.consume(number, metered or sink, request, account)
        if account is not None and metered is not None:
            metered.reader = consumer
            account.slow_if_over(consumer)
        if self._rights is not None and not self._covers(
            Right.CONSUME, consumer.definition.patterns
        ):
            # It was deleted and made anew, over other topics, since the first look. Nothing was delivered yet.
            consumer.close(is_clean=True)
            raise self._refusal_of(request.subscription, Right.CONSUME)
        return consumer

    @_audited
    async def make_subscription(
        self,
        name: str,
        patterns: Sequence[str],
        mode: str,
        start: Start | None,
        options: WorkOptions | None,
    ) -> bool:
        """`consume` for the patterns. False: it was there already."""
        self._check_patterns(Right.CONSUME, patterns)
        if self._rights is not None:
            self._check_subscription(name, Right.CONSUME, is_new=True)
        try:
            self._broker.work.patterns_of(name)
        except UnknownSubscriptionError:
            is_new = True
        else:
            is_new = False
        await self._broker.work.make_subscription(
            name, patterns, mode, start, options, self._account
        )
        if is_new:
            await self._broker.warn_of_habits(f"subscription {name}", patterns)
        return is_new

    @_audited
    async def delete_subscription(self, name: str) -> None:
        """`admin` for its patterns; so for the next three."""
        self._check_subscription(name, Right.ADMIN)
        await self._broker.work.delete_subscription(name)
        self._record(AuditKind.SUBSCRIPTION_DELETED, name)

    @_audited
    async def pause_subscription(self, name: str, *, is_paused: bool) -> None:
        self._check_subscription(name, Right.ADMIN)
        await self._broker.work.pause_subscription(name, is_paused=is_paused)
        kind = AuditKind.SUBSCRIPTION_PAUSED if is_paused else AuditKind.SUBSCRIPTION_RESUMED
        self._record(kind, name)

    @_audited
    async def move_subscription(self, name: str, start: Start, member: str | None = None) -> None:
        self._check_subscription(name, Right.ADMIN)
        await self._broker.work.move_subscription(name, start, member=member)
        self._record(AuditKind.SUBSCRIPTION_MOVED, name, to=start.kind, member=member or "")

    @_audited
    async def remove_member(self, name: str, member: str) -> None:
        self._check_subscription(name, Right.ADMIN)
        await self._broker.work.remove_member(name, member)
        self._record(AuditKind.MEMBER_REMOVED, name, member=member)

    @_audited
    async def subscription(self, name: str) -> SubscriptionState:
        """One with its partitions: `consume` or `admin` for its patterns."""
        self._check_subscription(name, Right.CONSUME, Right.ADMIN)
        [state] = await self._broker.work.subscriptions(name, owner=self._owner)
        return state

    async def subscriptions(self, *, after: str = "", limit: int = 0) -> Listed[SubscriptionState]:
        """Those whose patterns the caller may consume, or administer, and whether these are all of them."""
        is_visible = None if self._rights is None else self._sees_subscription
        return await self._broker.work.subscription_page(
            after=after, limit=limit, is_visible=is_visible, owner=self._owner
        )

    def _sees_subscription(self, patterns: Sequence[str]) -> bool:
        return self._covers(Right.CONSUME, patterns) or self._covers(Right.ADMIN, patterns)

    @_audited
    async def dead_letters(
        self, subscription: str, offset: int, messages_max: int
    ) -> tuple[Sequence[Batch], int]:
        """`consume` or `admin` for its patterns, or `read` for `!dead/…` itself.

        Without the last, letters of other topics are left out: they outlive a subscription, and one of the same name
        may since have been made over other topics.
        """
        self._check_subscription_seen(subscription)
        account = self._account
        if account is not None:
            await self._wait_out()
            messages_max, _ = account.page_max(messages_max, 0)
        found = await self._broker.work.dead_letters(subscription, offset, messages_max)
        if account is not None:
            account.charge_out(sum(map(len, found[0])), sum(len(each.body) for each in found[0]))
        if self._reads_letters(subscription):
            return found
        batches, next_offset = found
        return [own for batch in batches for own in self._own_letters(batch)], next_offset

    def _check_subscription_seen(self, name: str) -> None:
        if not self._reads_letters(name):
            self._check_subscription(name, Right.CONSUME, Right.ADMIN)

    def _reads_letters(self, subscription: str) -> bool:
        return self._rights is None or self._rights.allows(
            Right.READ, dead_letter_topic(subscription)
        )

    def _own_letters(self, batch: Batch) -> Iterable[Batch]:
        assert self._rights is not None
        rows = [
            row
            for row, letter in enumerate(batch)
            if any(
                self._rights.allows(right, letter.tags.get(TOPIC_TAG, ""))
                for right in (Right.CONSUME, Right.ADMIN)
            )
        ]
        return [batch if len(rows) == len(batch) else batch.take(rows)] if rows else ()

    @_audited
    async def settle_dead(
        self, subscription: str, offsets: Sequence[int], *, is_all: bool, is_redriven: bool
    ) -> int:
        """`admin` for its patterns."""
        self._check_subscription(subscription, Right.ADMIN)
        settled = await self._broker.work.settle_dead(
            subscription, offsets, is_all=is_all, is_redriven=is_redriven
        )
        kind = AuditKind.DEAD_LETTERS_REDRIVEN if is_redriven else AuditKind.DEAD_LETTERS_DROPPED
        self._record(kind, subscription, messages=settled)
        return settled

    def _check_subscription(self, name: str, *any_of: Right, is_new: bool = False) -> None:
        """One of the rights for all patterns of a subscription. `is_new`: it need not exist."""
        if self._rights is None:
            return
        try:
            patterns: Sequence[str] = self._broker.work.patterns_of(name)
        except UnknownSubscriptionError:
            if is_new:
                return
            patterns = ()
        if patterns and any(self._covers(right, patterns) for right in any_of):
            return
        if is_new:
            raise self._refusal_of(name, any_of[0])
        raise self._neutral(f"subscription {name!r}", "patterns", any_of, UnknownSubscriptionError)

    def _neutral(
        self, what: str, parts: str, any_of: Sequence[Right], unknown: type[ClientFault]
    ) -> ClientFault:
        """The same for what is another's and for what does not exist, so that nobody can tell them apart.

        A caller with a right to every topic is answered that it does not exist, which is nearly always so.
        """
        assert self._rights is not None
        is_for_all = any(self._rights.covers(right, "*") for right in any_of)
        kind = unknown if is_for_all else ForbiddenError
        return kind(
            f"{what} does not exist, or token {self._token!r} has no right to {' or '.join(any_of)} "
            f"for all of its {parts}"
        )

    def _refusal_of(self, subscription: str, right: Right) -> ForbiddenError:
        assert self._rights is not None
        return self._rights.refusal(right, f"all patterns of subscription {subscription!r}")

    # --- Telling ---

    def statistics(self) -> dict[str, object]:
        """`read` for `!system/metrics/broker`, whose document it is."""
        self.check_watching()
        return self._broker.statistics()

    async def connections(self, *, after: int = 0, limit: int = 0) -> Listed[ConnectionRow]:
        """Of all listeners, in the order in which they came, and whether these are all: needs what statistics need."""
        self.check_watching()
        return await self._broker.connections.page(after=after, limit=limit, owner=self._owner)

    def check_watching(self) -> None:
        """What statistics, metrics and the list of connections need."""
        if self._rights is not None:
            try:
                self._rights.check(Right.READ, _STATISTICS_TOPIC)
            except ForbiddenError as error:
                self.record_denial("statistics", error)
                raise

    def _check_patterns(self, right: Right, patterns: Sequence[str]) -> None:
        if self._rights is not None:
            self._rights.check_patterns(right, patterns)

    def _covers(self, right: Right, patterns: Iterable[str]) -> bool:
        assert self._rights is not None
        return all(self._rights.covers(right, pattern) for pattern in patterns)


def _patterns_of(places: Sequence[CursorPlace]) -> set[str]:
    """What the places in shards are over; one without patterns is a look at the whole shard."""
    return {
        pattern
        for place in places
        if place.topic is None
        for pattern in place.patterns or _EVERYTHING
    }


def _is_moved_back(before: Sequence[CursorPlace], after: Sequence[CursorPlace]) -> bool:
    """Whether a place that both have lies earlier now, or one is there no more."""
    known = {_place_key(place): _place_order(place) for place in after}
    return any(known.get(_place_key(place), (-1, -1)) < _place_order(place) for place in before)


def _place_key(place: CursorPlace) -> tuple[object, ...]:
    if place.topic is not None:
        return (place.topic, place.partition)
    return (place.journal, place.shard, frozenset(place.patterns))


def _place_order(place: CursorPlace) -> tuple[int, int]:
    return (place.offset, 0) if place.topic is not None else (place.entry, place.row)
