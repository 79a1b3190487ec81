"""All acknowledged subscriptions: made, joined, paused, moved and deleted; told of what is stored.

A subscription is its definition, which the catalogue keeps, and the consumer groups that are active. One without
consumers costs its definition and what is stored of it: nothing is told to it, and nothing is read for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from typing import Final

import msgspec

from runnel.broker.consumer_groups.active_groups import ActiveConsumerGroups
from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup, ConsumerGroupParts
from runnel.broker.consumer_groups.sink import WorkSink
from runnel.broker.consumer_groups.start_offsets import start_offsets
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.monitoring.events import EventKind
from runnel.broker.quotas import Account
from runnel.broker.stores import KeptLog
from runnel.errors import (
    ClientFault,
    MemberReplacedError,
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
from runnel.log.log import LogTopic, VisibleBatch
from runnel.topics.names import TopicPartition
from runnel.topics.pattern_index import PATTERNS_PER_SUBSCRIBER_MAX, PatternIndex
from runnel.topics.patterns import Pattern, any_of

_WINDOW_MESSAGES_MAX: Final = 1_000_000
_WINDOW_BYTES_MAX: Final = 2**30
_LOOK_INTERVAL_S: Final = 1.0
_TOPICS_PER_STEP: Final = 500
_TOPICS_TOLD_MAX: Final = 20


class WorkSubscription:
    """A definition, its patterns as they are compared, and the consumer groups that are active, by member."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.patterns: Final = tuple(Pattern(text) for text in definition.patterns)
        self.matches: Final = any_of(self.patterns)
        self.consumer_groups: Final[dict[str, ConsumerGroup]] = {}
        self.redelivered_before = 0  # by consumer groups that are no more

    @property
    def redelivered(self) -> int:
        """Messages that were delivered again, since the broker started."""
        active = sum(
            consumer_group.group.releases for consumer_group in self.consumer_groups.values()
        )
        return self.redelivered_before + active

    @property
    def members(self) -> list[str]:
        """Who is owed something and has it written down; "" where there are no members."""
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
    """See the module's first lines."""

    def __init__(self, parts: ConsumerGroupParts, index: PatternIndex[LiveSubscription]) -> None:
        self._parts = parts
        self._index = index  # of the topics there are
        self._by_name: dict[str, WorkSubscription] = {}
        self._owned: Counter[str] = Counter()  # by the token that made them
        self._covering: PatternIndex[WorkSubscription] = PatternIndex()
        self._active = ActiveConsumerGroups(parts.run_cache)
        self._changing = asyncio.Lock()
        self._last_id = 0
        self._unnamed = count(1)
        # Of members, by the monotonic clock: as long as this broker has missed them.
        self._absent_since_ns: dict[tuple[int, str], int] = {}
        self._changes = 0

    # --- Beginning ---

    def open(self) -> None:
        """Take up what is stored."""
        for content in self._keeper.subscriptions().values():
            definition = definitions.decode(content)
            self._last_id = max(self._last_id, definition.id)
            self._add(WorkSubscription(definition))
        self._parts.state.open()

    def tell_lost(self) -> None:
        """After damage: subscriptions that have acknowledged messages, and whose definitions are gone.

        State has their numbers and topics, not their names. A number is the time at which a subscription was made.
        """
        lost: dict[int, set[str]] = {}
        for state in self._parts.state.all().values():
            for number, topics in state.table.topics().items():
                lost.setdefault(number, set()).update(topics)
        for subscription in self.all():
            lost.pop(subscription.definition.id, None)
        for number, topics in lost.items():
            made = datetime.fromtimestamp(number // 10**9, tz=UTC).isoformat()
            self._parts.events.emit(
                EventKind.DAMAGE,
                f"the definition of the subscription that was made at {made}",
                log="disk",
                topics=sorted(topics)[:_TOPICS_TOLD_MAX],
            )

    @property
    def _keeper(self) -> KeptLog:
        """The log whose catalogue has the definitions."""
        return self._parts.stores.disk

    def _add(self, subscription: WorkSubscription) -> None:
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
        """Goes up when a definition comes, changes or goes, and when something is stored of one."""
        return self._changes + self._parts.state.version

    # --- Definitions ---

    async def make(self, request: SubscriptionRequest, account: Account | None = None) -> None:
        """Make a subscription; one that is there already must be the same."""
        async with self._changing:
            known = self._by_name.get(request.name)
            if known is None:
                await self._make(request, account)
            else:
                await self._check_same(known, request)

    async def _make(
        self, request: SubscriptionRequest, account: Account | None
    ) -> WorkSubscription:
        name, patterns = request.name, request.patterns
        definitions.check_name(name)
        self._check_patterns(name, patterns)
        if account is not None:
            account.check_subscription(name)
        checked_mode = Mode.checked(request.mode or Mode.SHARED)
        now_ns = self._parts.clock.time_ns()
        self._last_id = max(now_ns, self._last_id + 1)
        definition = Definition(
            self._last_id,
            name,
            tuple(patterns),
            checked_mode,
            SubscriptionOptions.of(request.options),
            made_ns=now_ns,
            owner="" if account is None else account.name,
        )
        subscription = WorkSubscription(definition)
        if checked_mode is not Mode.MULTICAST:  # whose members each begin when they join
            await self._begin(subscription, "", request.start or Start("earliest"))
        await self._keeper.set_subscription(name, definitions.encode(definition))
        self._add(subscription)
        self._parts.events.emit(
            EventKind.SUBSCRIPTION_MADE, name, mode=checked_mode, patterns=list(patterns)
        )
        return subscription

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
        """Mode and topics are fixed; options that are given hold from now on."""
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
        wanted = definition.options.changed(request.options)
        if wanted != definition.options:
            await self._redefine(subscription, msgspec.structs.replace(definition, options=wanted))

    async def _redefine(self, subscription: WorkSubscription, definition: Definition) -> None:
        await self._keeper.set_subscription(definition.name, definitions.encode(definition))
        subscription.definition = definition
        self._changes += 1
        for consumer_group in subscription.consumer_groups.values():
            consumer_group.redefine(definition)

    async def delete(self, name: str) -> None:
        """Forget it and everything it was owed. Its dead letters stay."""
        async with self._changing:
            subscription = self.get(name)
            await self._keeper.remove_subscription(name)
            del self._by_name[name]
            self._covering.remove(subscription)
            self._owned[subscription.definition.owner] -= 1
            self._changes += 1
            error = UnknownSubscriptionError(f"subscription {name!r} was deleted")
            for consumer_group in list(subscription.consumer_groups.values()):
                self._end(subscription, consumer_group, error)
            self._forget(subscription, None)
            self._parts.events.emit(EventKind.SUBSCRIPTION_DELETED, name)

    def _forget(self, subscription: WorkSubscription, member: str | None) -> None:
        for state in self._parts.state.all().values():
            state.note(ForgottenRecord(subscription.definition.id, member, None))

    async def pause(self, name: str, *, is_paused: bool) -> None:
        """Deliver nothing more for now, or go on."""
        async with self._changing:
            subscription = self.get(name)
            await self._redefine(
                subscription,
                msgspec.structs.replace(subscription.definition, is_paused=is_paused),
            )

    async def move(self, name: str, start: Start, member: str | None) -> None:
        """Begin elsewhere, in all partitions that there are or in those that are named."""
        async with self._changing:
            subscription = self.get(name)
            members = subscription.members
            if member is not None:
                self._check_member(subscription, member)
                members = [member]
            begins = await self._begins(subscription, start)
            for each in members:
                consumer_group = subscription.consumer_groups.get(each)
                if consumer_group is not None:  # in the same moment as it is written down
                    for key, floor in begins.items():
                        consumer_group.reset(key, floor)
                self._note_begins(subscription, each, begins)
            await self._parts.state.wait_stored()

    async def remove_member(self, name: str, member: str) -> None:
        """Nothing is owed to it any more."""
        async with self._changing:
            subscription = self.get(name)
            self._check_member(subscription, member)
            await self._remove_member(subscription, member)

    def _check_member(self, subscription: WorkSubscription, member: str) -> None:
        if member not in subscription.members:
            raise UnknownSubscriptionError(
                f"subscription {subscription.definition.name!r} has no member {member!r}"
            )

    async def _remove_member(self, subscription: WorkSubscription, member: str) -> None:
        definition = subscription.definition
        left = tuple(each for each in definition.members if each.name != member)
        await self._redefine(subscription, msgspec.structs.replace(definition, members=left))
        consumer_group = subscription.consumer_groups.get(member)
        if consumer_group is not None:
            text = f"member {member!r} of subscription {definition.name!r} was removed"
            self._end(subscription, consumer_group, UnknownSubscriptionError(text))
        self._forget(subscription, member)

    # --- Where it begins ---

    async def _begin(self, subscription: WorkSubscription, member: str, start: Start) -> None:
        """Store where each partition begins. Of topics that are made later everything is owed."""
        self._note_begins(subscription, member, await self._begins(subscription, start))
        await self._parts.state.wait_stored()

    def _note_begins(
        self, subscription: WorkSubscription, member: str, begins: Mapping[TopicPartition, int]
    ) -> None:
        for (topic, partition), floor in begins.items():
            with suppress(UnknownTopicError):  # deleted meanwhile
                self._parts.state.of((topic, partition)).note(
                    AtRecord(subscription.definition.id, member, topic, partition, floor, b"", [])
                )

    async def _begins(
        self, subscription: WorkSubscription, start: Start
    ) -> dict[TopicPartition, int]:
        return await start_offsets(
            f"subscription {subscription.definition.name!r}", self.partitions(subscription), start
        )

    async def partitions(
        self, subscription: WorkSubscription, owner: Hashable = None
    ) -> AsyncIterator[tuple[TopicPartition, KeptLog]]:
        """The partitions that there are, of topics that match and are kept; walked in steps."""
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
                    for partition in range(len(log.topic(topic).shards)):
                        yield (topic, partition), log

    # --- Consuming ---

    async def consume(
        self, number: int, sink: WorkSink, request: Consume, account: Account | None = None
    ) -> WorkConsumer:
        """A place in a consumer group. Nothing is delivered before its `start` is called."""
        name = request.subscription
        wanted = SubscriptionRequest(
            name, request.patterns, request.mode, request.start, request.options
        )
        async with self._changing:
            subscription = self._by_name.get(name)
            if subscription is not None:
                await self._check_same(subscription, wanted)
            elif request.patterns:
                subscription = await self._make(wanted, account)
            else:
                raise UnknownSubscriptionError(
                    f"subscription {name!r} does not exist; name its topics to make it"
                )
            consumer_group, member = await self._consumer_group_for(subscription, request)
            try:
                await self._activate(subscription, consumer_group)
            except BaseException:
                self._left(
                    subscription, consumer_group
                )  # half active, it would miss what it was not told of
                raise
            consumer_id = consumer_group.join(
                number,
                sink,
                min(request.window_messages, _WINDOW_MESSAGES_MAX),
                min(request.window_bytes, _WINDOW_BYTES_MAX),
            )
        return WorkConsumer(
            consumer_group, consumer_id, member, lambda closed: self._left(subscription, closed)
        )

    async def _consumer_group_for(
        self, subscription: WorkSubscription, request: Consume
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
            begins = await self._begins(subscription, start)
            unnamed = ConsumerGroup(
                definition,
                f"{definitions.UNNAMED_MARK}{next(self._unnamed)}",
                self._parts,
                is_durable=False,
            )
            unnamed.begins = begins
            subscription.consumer_groups[unnamed.member] = unnamed
            return unnamed, ""
        definitions.check_member(request.member)
        if request.member not in subscription.members:
            await self._begin(subscription, request.member, start)
            since_ns = self._parts.clock.time_ns()
            joined = (*definition.members, MemberRecord(request.member, since_ns, 0))
            definition = msgspec.structs.replace(definition, members=joined)
            await self._redefine(subscription, definition)
        consumer_group = self._consumer_group(subscription, request.member)
        consumer_group.dismiss(
            MemberReplacedError(
                f"another consumer took the place of member {request.member!r} of subscription "
                f"{definition.name!r}"
            )
        )
        return consumer_group, request.member

    def _consumer_group(self, subscription: WorkSubscription, member: str) -> ConsumerGroup:
        consumer_group = subscription.consumer_groups.get(member)
        if consumer_group is None:
            consumer_group = ConsumerGroup(subscription.definition, member, self._parts)
            subscription.consumer_groups[member] = consumer_group
        return consumer_group

    async def _activate(
        self, subscription: WorkSubscription, consumer_group: ConsumerGroup
    ) -> None:
        """Tell it of everything that is stored from now on, and then of what there is."""
        if consumer_group in self._active:
            return
        self._active.add(consumer_group, subscription.matches)
        async for key, log in self.partitions(subscription):
            with suppress(UnknownTopicError):  # deleted meanwhile
                consumer_group.cover(key, log)

    def _left(self, subscription: WorkSubscription, consumer_group: ConsumerGroup) -> None:
        """A consumer has gone. A consumer group without any is told nothing more."""
        if consumer_group.consumers:
            return
        self._active.discard(consumer_group)
        if not consumer_group.is_durable:
            subscription.consumer_groups.pop(consumer_group.member, None)
            subscription.redelivered_before += consumer_group.group.releases
            self._changes += 1

    def _end(
        self, subscription: WorkSubscription, consumer_group: ConsumerGroup, error: RunnelError
    ) -> None:
        consumer_group.end(error)
        subscription.consumer_groups.pop(consumer_group.member, None)
        self._active.discard(consumer_group)

    # --- What the logs tell ---

    def on_stored(self, stored: VisibleBatch) -> None:
        """Hot: once a batch."""
        self._active.on_stored(stored)

    def on_topic_made(self, info: LogTopic) -> None:
        log = self._parts.stores.log_of(info.name)
        if log is None:
            return
        for consumer_group in self._active.of(info.name):
            for partition in range(len(info.shards)):
                consumer_group.cover((info.name, partition), log)

    def on_topic_deleted(self, name: str) -> None:
        self._parts.run_cache.forget(name)
        for subscription in self.covering(name):
            for consumer_group in subscription.consumer_groups.values():  # those that sleep, too
                consumer_group.uncover_topic(name)

    def on_topic_purged(self, name: str) -> None:
        """Its messages are found missing as they are wanted."""
        self._parts.run_cache.forget(name)

    # --- Keeping house ---

    async def run(self) -> None:
        """Let go of consumer groups at rest, and end what absent members are owed, until cancelled."""
        while True:
            await self._parts.clock.sleep(_LOOK_INTERVAL_S)
            for subscription in self.all():
                for member, consumer_group in list(subscription.consumer_groups.items()):
                    if consumer_group.is_at_rest and consumer_group not in self._active:
                        del subscription.consumer_groups[member]
                        subscription.redelivered_before += consumer_group.group.releases
                if subscription.definition.mode is Mode.MULTICAST:
                    # On a full or broken disk nothing is noted of members: at the next look, then.
                    with suppress(Unavailable):
                        async with self._changing:
                            await self._look_for_absent(subscription)

    async def _look_for_absent(self, subscription: WorkSubscription) -> None:
        definition = subscription.definition
        if self._by_name.get(definition.name) is not subscription:
            return
        now_ns = self._parts.clock.time_ns()
        members = [
            _seen(member, subscription.consumer_groups.get(member.name), now_ns)
            for member in definition.members
        ]
        if members != list(definition.members):
            definition = msgspec.structs.replace(definition, members=tuple(members))
            await self._redefine(subscription, definition)
        now_ns = self._parts.clock.monotonic_ns()
        for member in members:
            # Only time counts in which it could have come: not that in which the broker was down.
            since_ns = self._absent_since_ns.setdefault((definition.id, member.name), now_ns)
            if not member.absent_since_ns:
                del self._absent_since_ns[definition.id, member.name]
            elif now_ns - since_ns > definition.options.absent_ns_max:
                del self._absent_since_ns[definition.id, member.name]
                await self._remove_member(subscription, member.name)
                self._parts.events.emit(
                    EventKind.MEMBER_ABSENT, definition.name, member=member.name
                )

    async def close(self) -> None:
        for subscription in self.all():
            for consumer_group in list(subscription.consumer_groups.values()):
                consumer_group.rest()
        self._active.clear()
        await self._parts.tasks.finish()
        await self._parts.state.close()


def _seen(member: MemberRecord, consumer_group: ConsumerGroup | None, now_ns: int) -> MemberRecord:
    """The member with the time since when nobody is there."""
    is_there = consumer_group is not None and consumer_group.consumers > 0
    if is_there == (member.absent_since_ns == 0):
        return member
    return msgspec.structs.replace(member, absent_since_ns=0 if is_there else now_ns)
