"""Makes, joins, pauses, moves and deletes acknowledged subscriptions, and passes the events of the logs to them.

A subscription is its definition, which the catalogue keeps, and the consumer groups that are active. A subscription
without consumers costs its definition and its stored state: no batch is routed to it, and nothing is read for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from typing import Final

import msgspec

from runnel.broker.consumer_groups.ack_journals import ShardAckJournal, wait_stored
from runnel.broker.consumer_groups.active_groups import ActiveConsumerGroups
from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup, ConsumerGroupParts
from runnel.broker.consumer_groups.definition_store import DefinitionStore
from runnel.broker.consumer_groups.sink import HeldPart, WorkSink
from runnel.broker.consumer_groups.start_offsets import ServedPartition, begin_of, start_offsets
from runnel.broker.limits.quotas import Account
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.monitoring.events import EventKind
from runnel.broker.stores import moved
from runnel.config import Keep
from runnel.errors import (
    ClientFault,
    MemberReplacedError,
    MovedError,
    RunnelError,
    SubscriptionDiffersError,
    Unavailable,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats.heads import Start
from runnel.formats.work_heads import Consume, WorkOptions
from runnel.group_rules import definition as definitions
from runnel.group_rules.definition import Definition, MemberRecord, Mode, SubscriptionOptions
from runnel.group_rules.records import AtRecord, ForgottenRecord
from runnel.log.log import LogTopic, MessageLog, OwnedShard, VisibleBatch
from runnel.topics.names import TopicPartition
from runnel.topics.pattern_index import PATTERNS_PER_SUBSCRIBER_MAX, PatternIndex
from runnel.topics.patterns import Pattern, any_of

_WINDOW_MESSAGES_MAX: Final = 1_000_000
_WINDOW_BYTES_MAX: Final = 2**30
_MAINTENANCE_INTERVAL_S: Final = 1.0
_TOPICS_PER_STEP: Final = 500
_TOPICS_LISTED_MAX: Final = 20
# A shard is never without an owner for that long, unless no node can serve it.
_RECENT_NS: Final = 60_000_000_000
# Within this time the consumer of a member without a name has joined here, or it is gone.
_STRANGERS_WAIT_NS: Final = 30_000_000_000


class WorkSubscription:
    """A definition, its parsed patterns, and the consumer groups in memory, by member."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.patterns: Final = tuple(Pattern(text) for text in definition.patterns)
        self.matches: Final = any_of(self.patterns)
        self.consumer_groups: Final[dict[str, ConsumerGroup]] = {}
        self.redelivered_before = 0  # by consumer groups that are no longer in memory

    @property
    def redelivered(self) -> int:
        """Messages that were delivered again, since the broker started."""
        active = sum(
            consumer_group.group.releases for consumer_group in self.consumer_groups.values()
        )
        return self.redelivered_before + active

    @property
    def members(self) -> list[str]:
        """The members whose state is stored; one "" in a mode without members."""
        if self.definition.mode is not Mode.MULTICAST:
            return [""]
        return [member.name for member in self.definition.members]


class SubscriptionRequest(msgspec.Struct, frozen=True):
    """Asks for a subscription: to make it, or to change the options of one with the same patterns and mode."""

    name: str
    patterns: Sequence[str] = ()
    mode: str = ""  # "": shared
    start: Start | None = None  # of a new subscription; None: earliest
    options: WorkOptions | None = None


class WorkSubscriptions:
    """All acknowledged subscriptions of a broker."""

    def __init__(self, parts: ConsumerGroupParts, index: PatternIndex[LiveSubscription]) -> None:
        self._parts = parts
        self._index = index  # of the existing topics
        self._by_name: dict[str, WorkSubscription] = {}
        self._owned: Counter[str] = Counter()  # by the token that made them
        self._covering: PatternIndex[WorkSubscription] = PatternIndex()
        self._active = ActiveConsumerGroups(parts.run_cache)
        self._change_lock = asyncio.Lock()
        self._definitions = DefinitionStore(lambda: parts.stores.main.metadata)
        self._unnamed = count(1)
        # Since when this broker misses each absent member, by the monotonic clock.
        self._absent_since_ns: dict[tuple[int, str], int] = {}
        # Members that this node has said to be absent since it had a consumer of theirs. Others may have one.
        self._said_absent: set[tuple[int, str]] = set()
        self._changes = 0

    # --- Start ---

    def open(self) -> None:
        """Load the stored definitions and the state journals."""
        for definition in self._definitions.all():
            self._add(WorkSubscription(definition))
        self._parts.state.open()

    def tell_lost(self) -> None:
        """After damage, report subscriptions that have acknowledged messages, and whose definitions are gone.

        The state has their numbers and topics, not their names. A number is the time when a subscription was made.
        """
        lost: dict[int, set[str]] = {}
        for state in self._parts.state.all():
            for number, topics in state.table.topics().items():
                lost.setdefault(number, set()).update(topics)
        for subscription in self.all():
            lost.pop(subscription.definition.id, None)
        for number, topics in lost.items():
            made = datetime.fromtimestamp(number // 10**9, tz=UTC).isoformat()
            self._parts.events.emit(
                EventKind.DAMAGE,
                f"the definition of the subscription that was made at {made}",
                log=Keep.DISK,
                topics=sorted(topics)[:_TOPICS_LISTED_MAX],
            )

    def _add(self, subscription: WorkSubscription) -> None:
        self._definitions.note_id(subscription.definition.id)
        self._by_name[subscription.definition.name] = subscription
        self._covering.add(subscription, subscription.patterns)
        self._owned[subscription.definition.owner] += 1
        self._changes += 1

    def __len__(self) -> int:
        return len(self._by_name)

    def owned_by(self, owner: str) -> int:
        return self._owned[owner]

    def all(self) -> list[WorkSubscription]:
        return list(self._by_name.values())

    def get(self, name: str) -> WorkSubscription:
        subscription = self._by_name.get(name)
        if subscription is None:
            raise UnknownSubscriptionError(f"subscription {name!r} does not exist")
        return subscription

    def covering(self, topic: str) -> tuple[WorkSubscription, ...]:
        """The subscriptions that a topic belongs to."""
        return self._covering.subscribers(topic)

    @property
    def changes(self) -> int:
        """Rises when a definition is added, changed or removed, and when the state of a subscription changes."""
        return self._changes + self._parts.state.version

    # --- Definitions ---

    async def make(self, request: SubscriptionRequest, account: Account | None = None) -> None:
        """Make a subscription. An existing one must have the same mode and patterns."""
        async with self._change_lock:
            await self._make_or_check(request, account)

    async def _make_or_check(
        self, request: SubscriptionRequest, account: Account | None
    ) -> WorkSubscription:
        if request.name not in self._by_name and await self._make(request, account):
            return self.get(request.name)
        subscription = self.get(request.name)
        await self._check_same(subscription, request)
        return self.get(request.name)

    async def _make(self, request: SubscriptionRequest, account: Account | None) -> bool:
        """Make a subscription. False: another node has made one of this name at the same time."""
        name, patterns = request.name, request.patterns
        definitions.check_name(name)
        self._check_patterns(name, patterns)
        if account is not None:
            account.check_subscription(name)
        checked_mode = Mode.checked(request.mode or Mode.SHARED)
        now_ns = self._parts.clock.time_ns()
        definition = Definition(
            self._definitions.new_id(now_ns),
            name,
            tuple(patterns),
            checked_mode,
            SubscriptionOptions.of(request.options),
            made_ns=now_ns,
            owner="" if account is None else account.name,
        )
        if checked_mode is not Mode.MULTICAST:  # members of a multicast begin when they join
            start = request.start or Start("earliest")
            definition = self._with_start(definition, "", start)
            await self._begin(WorkSubscription(definition), "", start)
        if not await self._definitions.add(definition):
            self._follow(name)
            return False
        self._follow(name)
        self._parts.events.emit(
            EventKind.SUBSCRIPTION_MADE, name, mode=checked_mode, patterns=list(patterns)
        )
        return True

    def _with_start(self, definition: Definition, member: str, start: Start) -> Definition:
        """With other nodes, keep the start: it also says where partitions begin that are not served here now."""
        if not self._definitions.is_shared:
            return definition
        return msgspec.structs.replace(definition, starts={**definition.starts, member: start})

    def _check_patterns(self, name: str, patterns: Sequence[str]) -> None:
        if not 1 <= len(patterns) <= PATTERNS_PER_SUBSCRIBER_MAX:
            raise ClientFault(
                f"subscription {name!r}: {len(patterns)} patterns; 1 to "
                f"{PATTERNS_PER_SUBSCRIBER_MAX} are allowed"
            )
        for text in patterns:
            pattern = Pattern(text)
            stores = self._parts.stores
            if pattern.is_literal and stores.log_for(pattern.prefix) is None:
                raise ClientFault(
                    f"subscription {name!r}: topic {text!r} is not kept, so nobody could be owed its "
                    'messages; subscribe to it live, or give it a rule with keep = "disk"'
                )

    async def _check_same(
        self, subscription: WorkSubscription, request: SubscriptionRequest
    ) -> None:
        """Check mode and patterns, which are fixed, and apply the options that are given."""
        definition = subscription.definition
        mode, patterns = request.mode, request.patterns
        if mode and Mode.checked(mode) is not definition.mode:
            raise SubscriptionDiffersError(
                f"subscription {definition.name!r} is {definition.mode}, not {mode}"
            )
        if patterns and set(patterns) != set(definition.patterns):
            raise SubscriptionDiffersError(
                f"subscription {definition.name!r} is over {' '.join(definition.patterns)}, not over "
                f"{' '.join(patterns)}; delete it first, or choose another name"
            )
        await self._change(
            subscription,
            lambda present: msgspec.structs.replace(
                present, options=present.options.changed(request.options)
            ),
        )

    async def _change(
        self, subscription: WorkSubscription, change: Callable[[Definition], Definition]
    ) -> None:
        """Record a change of the definition, and apply it."""
        definition = subscription.definition
        await self._definitions.change(definition, change)
        self._follow(definition.name)

    async def delete(self, name: str) -> None:
        """Delete a subscription and its state. Its dead letters stay."""
        async with self._change_lock:
            await self._check_all_here(self.get(name))
            await self._definitions.remove(name)
            self._follow(name)
            self._parts.events.emit(EventKind.SUBSCRIPTION_DELETED, name)

    def on_subscription_changed(self, name: str) -> None:
        """Another node has made, changed or deleted a subscription."""
        begun = self._follow(name)
        if begun:
            self._parts.tasks.start(self._begin_later(name, begun))

    async def _begin_later(self, name: str, members: Sequence[str]) -> None:
        """Store where new members begin in the shards that are served here. Another node has made them."""
        async with self._change_lock:
            subscription = self._by_name.get(name)
            if subscription is not None:
                with suppress(RunnelError):  # what has no stored start begins when it is consumed
                    await self._begin_missing(subscription, members)

    def _follow(self, name: str) -> Sequence[str]:
        """Take over what is recorded of a subscription. Returns the members that are new here."""
        definition = self._definitions.find(name)
        known = self._by_name.get(name)
        if known is not None and (definition is None or definition.id != known.definition.id):
            self._remove(known)
            known = None
        if definition is None:
            return ()
        if known is None:
            subscription = WorkSubscription(definition)
            self._add(subscription)
            return subscription.members
        former, known.definition = known.definition, definition
        if definition == former:
            return ()
        self._changes += 1
        is_there = {(member.name, member.since_ns) for member in definition.members}
        for member in former.members:
            if (member.name, member.since_ns) not in is_there:
                self._drop_member(known, member.name)
        for consumer_group in known.consumer_groups.values():
            consumer_group.redefine(definition)
        was_there = {member.name for member in former.members}
        return [each.name for each in definition.members if each.name not in was_there]

    def _remove(self, subscription: WorkSubscription) -> None:
        """The subscription is no longer recorded: its consumers end, its state is forgotten."""
        definition = subscription.definition
        del self._by_name[definition.name]
        self._covering.remove(subscription)
        self._owned[definition.owner] -= 1
        self._changes += 1
        error = UnknownSubscriptionError(f"subscription {definition.name!r} was deleted")
        for consumer_group in list(subscription.consumer_groups.values()):
            self._end(subscription, consumer_group, error)
        self._forget(subscription, None)

    def _drop_member(self, subscription: WorkSubscription, member: str) -> None:
        consumer_group = subscription.consumer_groups.get(member)
        if consumer_group is not None:
            name = subscription.definition.name
            text = f"member {member!r} of subscription {name!r} was removed"
            self._end(subscription, consumer_group, UnknownSubscriptionError(text))
        self._forget(subscription, member)

    def _forget(self, subscription: WorkSubscription, member: str | None) -> None:
        for state in self._parts.state.all():
            state.note(ForgottenRecord(subscription.definition.id, member, None))

    async def pause(self, name: str, *, is_paused: bool) -> None:
        """Pause or resume delivery."""
        async with self._change_lock:
            await self._change(
                self.get(name),
                lambda present: msgspec.structs.replace(present, is_paused=is_paused),
            )

    async def move(self, name: str, start: Start, member: str | None) -> None:
        """Begin elsewhere, in all existing partitions or in those that `start` names."""
        async with self._change_lock:
            subscription = self.get(name)
            members = subscription.members
            if member is not None:
                self._check_member(subscription, member)
                members = [member]
            begins = await self._begins(subscription, start)
            journals = self._journals_of(begins)
            for each in members:
                consumer_group = subscription.consumer_groups.get(each)
                # No await until the note: memory and stored state change together.
                if consumer_group is not None:
                    for key, floor in begins.items():
                        consumer_group.reset(key, floor)
                self._note_begins(subscription, each, begins, journals)
            await wait_stored(set(journals.values()))

    async def remove_member(self, name: str, member: str) -> None:
        """Remove a member, which is owed nothing any more."""
        async with self._change_lock:
            subscription = self.get(name)
            self._check_member(subscription, member)
            await self._remove_member(subscription, member)

    def _check_member(self, subscription: WorkSubscription, member: str) -> None:
        if member not in subscription.members:
            raise UnknownSubscriptionError(
                f"subscription {subscription.definition.name!r} has no member {member!r}"
            )

    async def _remove_member(self, subscription: WorkSubscription, member: str) -> None:
        await self._check_all_here(subscription)
        await self._change(subscription, lambda present: present.without_member(member))

    # --- Start offsets ---

    async def _begin(self, subscription: WorkSubscription, member: str, start: Start) -> None:
        """Store where each partition begins. Topics that are made later are owed from their first message on."""
        begins = await self._begins(subscription, start)
        journals = self._journals_of(begins)
        self._note_begins(subscription, member, begins, journals)
        await wait_stored(set(journals.values()))

    def _journals_of(
        self, begins: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ShardAckJournal]:
        """Where the starts of these partitions are noted. MovedError, before anything is noted, if a shard is away."""
        journals: dict[TopicPartition, ShardAckJournal] = {}
        for key in begins:
            with suppress(UnknownTopicError):  # deleted meanwhile
                journals[key] = self._parts.state.of(key)
        return journals

    def _note_begins(
        self,
        subscription: WorkSubscription,
        member: str,
        begins: Mapping[TopicPartition, int],
        journals: Mapping[TopicPartition, ShardAckJournal],
    ) -> None:
        for (topic, partition), journal in journals.items():
            floor = begins[topic, partition]
            journal.note(
                AtRecord(subscription.definition.id, member, topic, partition, floor, b"", [])
            )

    async def _begins(
        self, subscription: WorkSubscription, start: Start
    ) -> dict[TopicPartition, int]:
        return await start_offsets(
            f"subscription {subscription.definition.name!r}",
            self.partitions(subscription, needs_all=not self._definitions.is_shared),
            start,
            is_elsewhere=lambda key: self._is_elsewhere(subscription, key),
        )

    def _is_elsewhere(self, subscription: WorkSubscription, key: TopicPartition) -> bool:
        """Whether the subscription covers a partition that exists and that another node serves."""
        if not self._definitions.is_shared or not subscription.matches(key[0]):
            return False
        log = self._parts.stores.log_of(key[0])
        topic = None if log is None else log.metadata.topics.find(key[0])
        return topic is not None and key[1] < len(topic.shards)

    async def _begin_missing(
        self,
        subscription: WorkSubscription,
        members: Sequence[str],
        shard: OwnedShard | None = None,
    ) -> None:
        """Store where members begin in partitions, all that are served here or one shard's, of which nothing is stored.

        Their shards were served elsewhere, or nowhere, when the members joined.
        """
        definition = subscription.definition
        journals: set[ShardAckJournal] = set()
        async for key, log, owned in self.partitions(subscription):
            if shard is not None and owned is not shard:
                continue
            for member in members:
                with suppress(UnknownTopicError, MovedError):  # deleted, or gone meanwhile
                    journal = self._parts.state.of_shard(owned)
                    if journal.table.get(definition.id, member, key) is None:
                        floor = await begin_of(log, owned, key, definition.later_start(member))
                        # Still nothing: a group that has covered it meanwhile may have noted acks.
                        if journal.table.get(definition.id, member, key) is None:
                            journal.note(AtRecord(definition.id, member, *key, floor, b"", []))
                            journals.add(journal)
        await wait_stored(journals)

    async def _check_all_here(self, subscription: WorkSubscription) -> None:
        """Raise MovedError if a partition that the subscription covers is away: its state could not be changed.

        With other nodes, each of them changes the state in its own shards, and hears of what is recorded.
        """
        if self._parts.stores.is_any_away and not self._definitions.is_shared:
            async for _ in self.partitions(subscription, needs_all=True):
                pass

    async def partitions(
        self, subscription: WorkSubscription, owner: Hashable = None, *, needs_all: bool = False
    ) -> AsyncIterator[ServedPartition]:
        """The existing partitions of matching topics that are kept and served here, walked in steps.

        `needs_all`: a partition that is not served here is a MovedError.
        """
        seen: set[str] = set()
        stores = self._parts.stores
        for pattern in subscription.patterns:
            walk = self._index.walk(pattern)
            while not walk.done:
                await self._parts.share.turn(owner)
                for topic in walk.step(found_max=_TOPICS_PER_STEP):
                    log = stores.log_of(topic)
                    if topic in seen or log is None:
                        continue
                    seen.add(topic)
                    for partition, shard in enumerate(log.metadata.topics.get(topic).shards):
                        try:
                            owned = log.shard(shard)
                        except MovedError as error:
                            if needs_all:
                                raise stores.moved(error, [topic]) from None
                            continue
                        yield ServedPartition((topic, partition), log, owned)

    # --- Consumers ---

    async def consume(
        self,
        number: int,
        sink: WorkSink,
        request: Consume,
        account: Account | None = None,
        part: HeldPart | None = None,
    ) -> WorkConsumer:
        """Join a consumer group. Nothing is delivered before the consumer's `start` is called.

        `part`: the consumer joins at every node, and this is its part here.
        """
        name = request.subscription
        wanted = SubscriptionRequest(
            name, request.patterns, request.mode, request.start, request.options
        )
        async with self._change_lock:
            if name not in self._by_name and not request.patterns:
                raise UnknownSubscriptionError(
                    f"subscription {name!r} does not exist; name its topics to make it"
                )
            subscription = await self._make_or_check(wanted, account)
            holder = "" if part is None else part.holder
            consumer_group, member = await self._consumer_group_for(subscription, request, holder)
            try:
                await self._activate(subscription, consumer_group)
                if self._by_name.get(name) is not subscription:
                    raise UnknownSubscriptionError(f"subscription {name!r} was deleted")
            except BaseException:
                # A half-active group would miss the partitions that it does not cover yet.
                self._on_left(subscription, consumer_group)
                raise
            consumer_id = consumer_group.join(
                number,
                sink,
                min(request.window_messages, _WINDOW_MESSAGES_MAX),
                min(request.window_bytes, _WINDOW_BYTES_MAX),
                part,
            )
        return WorkConsumer(
            consumer_group, consumer_id, member, lambda closed: self._on_left(subscription, closed)
        )

    async def _consumer_group_for(
        self, subscription: WorkSubscription, request: Consume, holder: str
    ) -> tuple[ConsumerGroup, str]:
        definition = subscription.definition
        if definition.mode is not Mode.MULTICAST:
            if request.member:
                raise ClientFault(
                    f"subscription {definition.name!r} is {definition.mode}: only a multicast has "
                    "members"
                )
            return self._consumer_group(subscription, ""), ""
        start = request.start or Start("latest")
        if not request.member:
            return await self._unnamed_group(subscription, start, holder), ""
        definitions.check_member(request.member)
        if request.member not in subscription.members:
            await self._begin(subscription, request.member, start)
            since_ns = self._parts.clock.time_ns()
            joined = MemberRecord(request.member, since_ns, 0)
            await self._change(
                subscription,
                lambda present: self._with_start(
                    present.with_member(joined), request.member, start
                ),
            )
        consumer_group = self._consumer_group(subscription, request.member)
        consumer_group.dismiss(
            MemberReplacedError(
                f"another consumer took the place of member {request.member!r} of subscription "
                f"{definition.name!r}"
            )
        )
        return consumer_group, request.member

    async def _unnamed_group(
        self, subscription: WorkSubscription, start: Start, holder: str
    ) -> ConsumerGroup:
        """The group of a new member without a name. One that joins at every node has the same name at all of them."""
        now_ns = self._parts.clock.time_ns()
        begins = await self._begins(subscription, start)
        member = f"{definitions.UNNAMED_MARK}{holder or next(self._unnamed)}"
        former = subscription.consumer_groups.get(member)
        if former is not None:  # the broker has not noticed yet that its connection is lost
            self._end(subscription, former, MemberReplacedError("its consumer has joined anew"))
        definition = subscription.definition
        unnamed = ConsumerGroup(definition, member, self._parts, is_durable=False)
        unnamed.begins = begins
        unnamed.later_start = Start("time", time_ns=now_ns) if start.kind == "latest" else start
        subscription.consumer_groups[member] = unnamed
        return unnamed

    def _consumer_group(self, subscription: WorkSubscription, member: str) -> ConsumerGroup:
        consumer_group = subscription.consumer_groups.get(member)
        if consumer_group is None:
            consumer_group = ConsumerGroup(subscription.definition, member, self._parts)
            subscription.consumer_groups[member] = consumer_group
        return consumer_group

    async def _activate(
        self, subscription: WorkSubscription, consumer_group: ConsumerGroup
    ) -> None:
        """Route batches to a consumer group from now on, then let it cover the existing partitions."""
        if consumer_group in self._active:
            return
        # First: else maintenance might drop it meanwhile, at rest as it is.
        self._active.add(consumer_group, subscription.matches)
        if self._definitions.is_shared and consumer_group.is_durable:
            await self._begin_missing(subscription, [consumer_group.member])
        async for key, _, shard in self.partitions(subscription):
            with suppress(UnknownTopicError, MovedError):  # deleted, or gone meanwhile
                consumer_group.cover(key, shard)

    def _on_left(self, subscription: WorkSubscription, consumer_group: ConsumerGroup) -> None:
        """A consumer has left. A consumer group without consumers becomes inactive."""
        if consumer_group.consumers:
            return
        self._active.discard(consumer_group)
        if not consumer_group.is_durable:
            if subscription.consumer_groups.get(consumer_group.member) is consumer_group:
                del subscription.consumer_groups[consumer_group.member]
            if self._definitions.is_shared:
                self._forget(subscription, consumer_group.member)  # what came with a shard
            subscription.redelivered_before += consumer_group.group.releases
            self._changes += 1

    def _end(
        self, subscription: WorkSubscription, consumer_group: ConsumerGroup, error: RunnelError
    ) -> None:
        consumer_group.end(error)
        subscription.consumer_groups.pop(consumer_group.member, None)
        self._active.discard(consumer_group)

    # --- Events of the logs ---

    def on_stored(self, stored: VisibleBatch) -> None:
        """Route a batch to the active consumer groups. Hot: once a batch."""
        self._active.on_stored(stored)

    def on_topic_made(self, info: LogTopic) -> None:
        log = self._parts.stores.log_of(info.name)
        if log is None:
            return
        for consumer_group in self._active.of(info.name):
            for partition, shard in enumerate(info.shards):
                with suppress(MovedError):
                    consumer_group.cover((info.name, partition), log.shard(shard))

    def on_topic_deleted(self, name: str) -> None:
        self._parts.run_cache.forget(lambda key: key[0] == name)
        for subscription in self.covering(name):
            for consumer_group in subscription.consumer_groups.values():  # inactive ones, too
                consumer_group.uncover_topic(name)

    def on_topic_purged(self, name: str) -> None:
        """Groups find the messages missing when they read them."""
        self._parts.run_cache.forget(lambda key: key[0] == name)

    # --- Shards that go and come ---

    async def before_release(self, shard: OwnedShard) -> None:
        """Store every acknowledgement in the shard. From now on they are late, so that none is lost in between."""
        journal = self._parts.state.known(shard)
        if journal is not None:
            journal.is_leaving = True
            self._drop(journal, is_planned=True)
            await journal.leave()

    def on_shard_released(self, shard: OwnedShard) -> None:
        """The groups drop the shard's partitions. Their messages are owed by the shard's next owner."""
        journal = self._parts.state.known(shard)
        self._parts.state.forget(shard)
        self._parts.run_cache.forget(lambda key: self._parts.stores.lies_in(key[0], shard.id))
        if journal is not None:
            self._drop(journal, is_planned=False)
            if journal.end():
                error = MovedError(f"{moved(shard.id)}; acknowledgements may be lost with it")
                for consumer_group in self._consumer_groups():
                    consumer_group.lose_acks(journal, error)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        """Read the state of a shard that has come. The active groups cover its partitions again."""
        journal = self._parts.state.of_shard(shard)
        if any(
            member.startswith(definitions.UNNAMED_MARK) for _, member in journal.table.members()
        ):
            due_ns = self._parts.clock.monotonic_ns() + _STRANGERS_WAIT_NS
            self._parts.timers.set(due_ns, lambda: self._forget_strangers(shard))
        if self._active or self._definitions.is_shared:
            self._parts.tasks.start(self._cover(shard))

    def _consumer_groups(self) -> list[ConsumerGroup]:
        """All consumer groups in memory, also those without consumers."""
        return [
            each
            for subscription in self._by_name.values()
            for each in subscription.consumer_groups.values()
        ]

    def _drop(self, journal: ShardAckJournal, *, is_planned: bool) -> None:
        for consumer_group in self._consumer_groups():
            consumer_group.release(journal, is_planned=is_planned)

    async def _cover(self, shard: OwnedShard) -> None:
        """Let the active groups cover the partitions of a shard. Groups that become active meanwhile do so anyway."""
        async with self._change_lock:  # a move is not half noted
            for subscription in self.all():
                groups = [
                    each for each in subscription.consumer_groups.values() if each in self._active
                ]
                if self._definitions.is_shared and (recent := self._recent(subscription)):
                    with suppress(
                        RunnelError
                    ):  # what has no stored start begins when it is consumed
                        await self._begin_missing(subscription, recent, shard)
                if not groups:
                    continue
                if self._definitions.is_shared:
                    durable = [each.member for each in groups if each.is_durable]
                    with suppress(RunnelError):  # a disk that stores nothing: the acks will say so
                        await self._begin_missing(subscription, durable, shard)
                async for key, log, owned in self.partitions(subscription):
                    if owned is shard:
                        for each in groups:
                            with suppress(UnknownTopicError, MovedError):
                                if self._definitions.is_shared:
                                    await self._begin_unnamed(each, key, log, shard)
                                each.cover(key, shard)
                for each in groups:
                    each.wake()

    def _recent(self, subscription: WorkSubscription) -> list[str]:
        """The members that may have begun while the shard was served by nobody."""
        definition = subscription.definition
        since_ns = self._parts.clock.time_ns() - _RECENT_NS
        if definition.mode is not Mode.MULTICAST:
            return [""] if definition.made_ns > since_ns else []
        return [each.name for each in definition.members if each.since_ns > since_ns]

    async def _begin_unnamed(
        self, group: ConsumerGroup, key: TopicPartition, log: MessageLog, shard: OwnedShard
    ) -> None:
        """Where a member without a name begins in a shard that has come, unless its state has come with it."""
        stored = self._parts.state.of_shard(shard).table
        has_state = stored.get(group.definition.id, group.member, key) is not None
        if not (group.is_durable or has_state or key in group.begins):
            group.begins[key] = await begin_of(log, shard, key, group.later_start)

    def _forget_strangers(self, shard: OwnedShard) -> None:
        """Forget members without a name whose state has come with a shard, and whose consumers have not."""
        journal = self._parts.state.known(shard)
        if journal is None or journal.is_leaving:
            return
        present = {
            (subscription.definition.id, member)
            for subscription in self.all()
            for member in subscription.consumer_groups
        }
        for number, member in journal.table.members():
            is_unnamed = member.startswith(definitions.UNNAMED_MARK)
            if is_unnamed and (number, member) not in present:
                journal.note(ForgottenRecord(number, member, None))

    # --- Maintenance ---

    async def run(self) -> None:
        """Drop consumer groups at rest, and remove members that are absent too long, until cancelled."""
        while True:
            await self._parts.clock.sleep(_MAINTENANCE_INTERVAL_S)
            for subscription in self.all():
                for member, consumer_group in list(subscription.consumer_groups.items()):
                    if consumer_group.is_at_rest and consumer_group not in self._active:
                        del subscription.consumer_groups[member]
                        subscription.redelivered_before += consumer_group.group.releases
                if subscription.definition.mode is Mode.MULTICAST:
                    # A full or broken disk stores no change of members: the next round tries again.
                    with suppress(Unavailable):
                        async with self._change_lock:
                            await self._remove_absent(subscription)

    async def _remove_absent(self, subscription: WorkSubscription) -> None:
        definition = subscription.definition
        if self._by_name.get(definition.name) is not subscription:
            return
        if self._with_absences(subscription, definition) != definition:
            await self._change(
                subscription, lambda present: self._with_absences(subscription, present)
            )
            definition = subscription.definition
        if self._definitions.is_shared:
            for member in definition.members:
                mark = (definition.id, member.name)
                if self._has_consumer(subscription, member.name):
                    self._said_absent.discard(mark)
                else:
                    self._said_absent.add(mark)
        now_ns = self._parts.clock.monotonic_ns()
        for member in definition.members:
            # Only time in which the member could have come counts, not the broker's downtime.
            since_ns = self._absent_since_ns.setdefault((definition.id, member.name), now_ns)
            if not member.absent_since_ns:
                del self._absent_since_ns[definition.id, member.name]
            elif now_ns - since_ns > definition.options.absent_ns_max:
                del self._absent_since_ns[definition.id, member.name]
                await self._remove_member(subscription, member.name)
                self._parts.events.emit(
                    EventKind.MEMBER_ABSENT, definition.name, member=member.name
                )

    def _with_absences(self, subscription: WorkSubscription, definition: Definition) -> Definition:
        """The definition, with the time since when members have no consumer.

        With other nodes, a member may have its consumers there. So this node says once that it has lost the last one,
        or has had none since it started; a node that has one says the opposite.
        """
        now_ns = self._parts.clock.time_ns()
        members: list[MemberRecord] = []
        for member in definition.members:
            since_ns = member.absent_since_ns
            if self._has_consumer(subscription, member.name):
                since_ns = 0
            elif not since_ns and (definition.id, member.name) not in self._said_absent:
                since_ns = now_ns
            members.append(msgspec.structs.replace(member, absent_since_ns=since_ns))
        return msgspec.structs.replace(definition, members=tuple(members))

    def _has_consumer(self, subscription: WorkSubscription, member: str) -> bool:
        consumer_group = subscription.consumer_groups.get(member)
        return consumer_group is not None and consumer_group.consumers > 0

    def abandon(self) -> None:
        """Deliver nothing more. Leases end with the broker, which is no failure."""
        for consumer_group in self._consumer_groups():
            consumer_group.rest()
        self._active.clear()

    async def close(self) -> None:
        self.abandon()
        await self._parts.tasks.finish()
        await self._parts.state.close()
