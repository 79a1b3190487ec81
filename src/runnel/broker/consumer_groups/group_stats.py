"""Computes the state of subscriptions for users: backlog, messages in flight and oldest message of each member."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import msgspec

from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.broker.consumer_groups.dead_letter_queues import DeadLetterQueues
from runnel.broker.consumer_groups.run_reader import read_runs
from runnel.broker.consumer_groups.start_offsets import ServedPartition
from runnel.broker.consumer_groups.subscriptions import WorkSubscription, WorkSubscriptions
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.monitoring.throttled import ThrottledAsync
from runnel.broker.pages import Listed, ListRequest, PageBuilder
from runnel.errors import RunnelError
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import Mode
from runnel.log.log import MessageLog
from runnel.platform.clock import Clock
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition

# Partitions of one member that are searched for its oldest message: each search reads the log.
_OLDEST_PARTITIONS_MAX: Final = 16
_PARTITIONS_LISTED_MAX: Final = 10_000
_SUBSCRIPTIONS_PER_STEP: Final = 32
_PARTITIONS_PER_STEP: Final = 200


class _Progress(msgspec.Struct):
    """How far a member has come in a partition."""

    key: TopicPartition
    log: MessageLog
    acked: AckSet
    next_offset: int

    @property
    def backlog(self) -> int:
        return max(0, self.next_offset - self.acked.floor - self.acked.count_above)


class _Owed(msgspec.Struct):
    """How many messages a member is owed in all partitions, and the first partitions with a backlog."""

    messages: int = 0
    behind: list[_Progress] = msgspec.field(default_factory=list)

    def add(self, progress: _Progress) -> None:
        backlog = progress.backlog
        self.messages += backlog
        if backlog and len(self.behind) < _OLDEST_PARTITIONS_MAX:
            self.behind.append(progress)


class GroupStats:
    """Computes the state of subscriptions on request: nothing is counted while messages pass."""

    def __init__(
        self,
        state: AckJournals,
        subscriptions: WorkSubscriptions,
        dead: DeadLetterQueues,
        workers: Workers,
        clock: Clock,
        share: LoopShare,
    ) -> None:
        self._share = share
        self._report: ThrottledAsync[Sequence[SubscriptionState]] = ThrottledAsync(
            self.states, clock, first=()
        )
        self._state = state
        self._subscriptions = subscriptions
        self._dead = dead
        self._workers = workers

    async def states(
        self,
        name: str | None = None,
        *,
        is_visible: Callable[[Sequence[str]], bool] | None = None,
        owner: Hashable = None,
    ) -> list[SubscriptionState]:
        """All subscriptions in order of their names, or one with its partitions.

        `is_visible`: only subscriptions whose patterns it accepts.
        """
        if name is not None:
            one = self._subscriptions.get(name)
            return [await self._state_of(one, owner, with_partitions=True)]
        known = self._ordered()
        found: list[SubscriptionState] = []
        async for some in self._share.steps(known, owner, _SUBSCRIPTIONS_PER_STEP):
            found += [
                await self._state_of(each, owner, with_partitions=False)
                for each in some
                if is_visible is None or is_visible(each.definition.patterns)
            ]
        return found

    async def page(self, request: ListRequest[Sequence[str]]) -> Listed[SubscriptionState]:
        """A page of subscriptions, and whether it is the last page."""
        owner, is_visible = request.owner, request.is_visible
        page: PageBuilder[SubscriptionState] = PageBuilder(request.limit, "subscriptions")
        for number, each in enumerate(self._ordered(request.after)):
            if number % _SUBSCRIPTIONS_PER_STEP == 0:
                await self._share.turn(owner)
            if is_visible is None or is_visible(each.definition.patterns):
                if page.is_full():
                    return page.items, False
                state = await self._state_of(each, owner, with_partitions=False)
                page.add(state, len(state.members))
        return page.items, True

    def _ordered(self, after: str = "") -> list[WorkSubscription]:
        known = [each for each in self._subscriptions.all() if each.definition.name > after]
        return sorted(known, key=lambda each: each.definition.name)

    async def report(self) -> Sequence[SubscriptionState]:
        """All subscriptions, cached: computing them takes at most a fiftieth of the time."""
        return await self._report.value()

    async def _state_of(
        self, subscription: WorkSubscription, owner: Hashable, *, with_partitions: bool
    ) -> SubscriptionState:
        definition = subscription.definition
        names = list(subscription.members)
        names += [
            consumer_group.member
            for consumer_group in subscription.consumer_groups.values()
            if not consumer_group.is_durable
        ]
        owed = {member: _Owed() for member in names}
        partitions: list[PartitionWork] = []
        computed = 0
        async for served in self._subscriptions.partitions(subscription, owner):
            for member in names:
                computed += 1
                if computed % _PARTITIONS_PER_STEP == 0:
                    await self._share.turn(owner)
                consumer_group = subscription.consumer_groups.get(member)
                progress = self._progress(subscription, member, consumer_group, served)
                if progress is None:
                    continue
                owed[member].add(progress)
                if with_partitions and len(partitions) < _PARTITIONS_LISTED_MAX:
                    partitions.append(_partition_work(member, consumer_group, progress))
        members = [
            await self._member(
                subscription, member, subscription.consumer_groups.get(member), owed[member]
            )
            for member in names
        ]
        return SubscriptionState(
            definition.name,
            definition.mode,
            definition.patterns,
            definition.is_paused,
            definition.made_ns,
            definition.options.to_wire(),
            members,
            subscription.redelivered,
            await self._dead.count(subscription),
            partitions,
        )

    def _progress(
        self,
        subscription: WorkSubscription,
        member: str,
        consumer_group: ConsumerGroup | None,
        served: ServedPartition,
    ) -> _Progress | None:
        """A member's progress in a partition; None if the topic was deleted meanwhile."""
        key, log, shard = served
        acked = None if consumer_group is None else consumer_group.acked(key)
        try:
            if acked is None:
                state = self._state.find(subscription.definition.id, member, key)
                acked = AckSet(1) if state is None else state.acked.copy()
                acked.add(1, shard.floor(*key))  # deleted and purged messages are not owed
            return _Progress(key, log, acked, shard.next_offset(*key))
        except RunnelError:
            return None

    async def _member(
        self,
        subscription: WorkSubscription,
        member: str,
        consumer_group: ConsumerGroup | None,
        owed: _Owed,
    ) -> MemberState:
        definition = subscription.definition
        absent_ns = 0
        if definition.mode is Mode.MULTICAST:
            absent_ns = next(
                (each.absent_since_ns for each in definition.members if each.name == member), 0
            )
        return MemberState(
            member,
            0 if consumer_group is None else consumer_group.consumers,
            owed.messages,
            0 if consumer_group is None else consumer_group.group.in_flight,
            0 if consumer_group is None else consumer_group.group.delayed,
            await self._oldest_ns(owed.behind),
            absent_ns,
        )

    async def _oldest_ns(self, behind: Sequence[_Progress]) -> int:
        """The receive time of the oldest owed message in these partitions; 0 if none is owed."""
        oldest = 0
        for progress in behind:
            offset = progress.acked.first_missing(progress.acked.floor)
            try:
                read = await read_runs(progress.log, progress.key, offset, 1, self._workers)
            except (RunnelError, OSError):
                continue  # gone meanwhile, or unreadable: delivery reports that
            for run in read.runs[:1]:
                received_ns = int.from_bytes(run.batch.envelope.receive_times[:8], "little")
                oldest = received_ns if not oldest else min(oldest, received_ns)
        return oldest


def _partition_work(
    member: str, consumer_group: ConsumerGroup | None, progress: _Progress
) -> PartitionWork:
    return PartitionWork(
        member,
        *progress.key,
        progress.acked.floor,
        progress.next_offset,
        progress.acked.count_above,
        0 if consumer_group is None else consumer_group.group.partition_in_flight(progress.key),
    )
