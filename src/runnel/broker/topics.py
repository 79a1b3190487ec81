"""Lists, describes, deletes and purges topics, kept or ephemeral."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live.ephemeral_topics import EphemeralTopic, EphemeralTopics
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.live.subscriptions import LiveSubscriptions
from runnel.broker.live_shards import LIVE_SHARD
from runnel.broker.pages import PAGE_MAX
from runnel.broker.stores import Stores
from runnel.config import Retain, format_duration, format_size
from runnel.errors import MovedError, UnknownTopicError
from runnel.formats.wire import Owner, PartitionState, TopicState
from runnel.log.log import LogTopic, OffsetBounds, Store
from runnel.topics.names import check_topic
from runnel.topics.pattern_index import PatternIndex
from runnel.topics.patterns import Pattern

_TOPICS_PER_STEP: Final = 64
_PARTITIONS_PER_STEP: Final = 256
# Of a partition that is not served here.
_ELSEWHERE: Final = OffsetBounds(0, 0)


class TopicListRequest(msgspec.Struct, frozen=True):
    """Asks for a page of the topics that match a pattern, in order of their names."""

    pattern: str = "*"
    after: str = ""  # the last name of the page before
    limit: int = PAGE_MAX  # PAGE_MAX at most
    visible: Sequence[Pattern] | None = None  # lists only topics that one of these patterns matches
    owner: Hashable = None  # the walk takes this owner's turns of the loop


_ALL_TOPICS: Final = TopicListRequest()


class TopicDirectory:
    """The topics of a broker, of every kind."""

    def __init__(
        self,
        stores: Stores,
        ephemeral: EphemeralTopics,
        index: PatternIndex[LiveSubscription],
        subscriptions: LiveSubscriptions,
        share: LoopShare,
    ) -> None:
        self._stores = stores
        self._ephemeral = ephemeral
        self._index = index
        self._subscriptions = subscriptions
        self._share = share

    async def list(self, request: TopicListRequest = _ALL_TOPICS) -> tuple[list[TopicState], bool]:
        """Topics, and whether these are all that remain."""
        owner = request.owner
        limit = max(1, min(request.limit, PAGE_MAX))
        found: list[TopicState] = []
        walk = self._index.walk(
            Pattern(request.pattern), after=request.after, visible=request.visible
        )
        while not walk.done:
            await self._share.turn(owner)
            for name in walk.step(found_max=_TOPICS_PER_STEP):
                await self._subscriptions.look_up(name, owner)
                state = self._state(name)
                if state is not None:
                    found.append(state)
            if len(found) > limit:
                return found[:limit], False
        return found, True

    def _state(self, name: str) -> TopicState | None:
        log = self._stores.log_of(name)
        if log is not None:
            return self._kept(log, name)
        topic = self._ephemeral.find(name)
        return None if topic is None else self._ephemeral_state(topic)

    def _kept(self, log: Store, name: str) -> TopicState:
        info = log.metadata.topics.get(name)
        policy = info.policy
        return TopicState(
            name,
            policy.keep,
            policy.journal,
            policy.partitions,
            _messages(log, info),
            len(self._subscriptions.subscribers(name)),
            policy.rule,
            policy.last_value,
            _retained(policy.retain),
        )

    def _ephemeral_state(self, topic: EphemeralTopic) -> TopicState:
        policy = topic.policy
        return TopicState(
            topic.name,
            policy.keep,
            policy.journal,
            policy.partitions,
            sum(offset - 1 for offset in topic.next_offsets),
            len(self._subscriptions.subscribers(topic.name)),
            policy.rule,
            policy.last_value,
        )

    async def describe(
        self, name: str, *, asker: Hashable = None, part_only: bool = False
    ) -> TopicState:
        """One topic with its partitions. `part_only`: those that are not served here have the offsets 0."""
        log = self._stores.log_of(name)
        if log is None:
            topic = self._ephemeral_topic(name)
            owner = Owner(LIVE_SHARD.journal, LIVE_SHARD.shard, topic.epoch)
            live = [PartitionState(offset, offset, owner) for offset in topic.next_offsets]
            return _with_partitions(self._ephemeral_state(topic), live)
        partitions = []
        shards = enumerate(log.metadata.topics.get(name).shards)
        async for some in self._share.steps(shards, asker, _PARTITIONS_PER_STEP):
            for number, shard in some:
                try:
                    bounds = await log.bounds(name, number)
                    owner = Owner(shard.journal, shard.shard, log.shard(shard).epoch)
                except MovedError as error:
                    if not part_only:
                        raise self._stores.moved(error, [name]) from None
                    bounds = _ELSEWHERE
                    owner = Owner(shard.journal, shard.shard, 0)
                state = PartitionState(bounds.first_offset, bounds.next_offset, owner)
                partitions.append(state)
        return _with_partitions(self._kept(log, name), partitions)

    async def delete(self, name: str, *, part_only: bool = False) -> None:
        log = self._stores.log_of(name)
        if log is None:
            self._ephemeral.vanish(self._ephemeral_topic(name))
        else:
            try:
                await log.metadata.delete_topic(name, part_only=part_only)
            except MovedError as error:
                raise self._stores.moved(error, [name]) from None

    async def purge(self, name: str, *, part_only: bool = False) -> None:
        log = self._stores.log_of(name)
        if log is None:
            self._ephemeral.purge(self._ephemeral_topic(name))
        else:
            try:
                await log.metadata.purge_topic(name, part_only=part_only)
            except MovedError as error:
                raise self._stores.moved(error, [name]) from None

    def _ephemeral_topic(self, name: str) -> EphemeralTopic:
        topic = self._ephemeral.find(name)
        if topic is None:
            check_topic(name)
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return topic


def _messages(log: Store, topic: LogTopic) -> int:
    """How many messages were stored in the topic, as far as its partitions are served here."""
    count = 0
    for number, shard in enumerate(topic.shards):
        with suppress(MovedError):
            count += log.shard(shard).next_offset(topic.name, number) - 1
    return count


def _with_partitions(state: TopicState, partitions: list[PartitionState]) -> TopicState:
    return msgspec.structs.replace(state, partitions=partitions)


def _retained(retain: Retain) -> str:
    """How long messages are kept, in words."""
    parts = []
    if retain.age_ns is not None:
        parts.append(format_duration(retain.age_ns))
    if retain.bytes_max is not None:
        parts.append(format_size(retain.bytes_max))
    if retain.until is not None:
        parts.append(f"until {retain.until}")
    return ", ".join(parts)
