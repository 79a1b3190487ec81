"""Topics as clients see them: listed, described, deleted, purged, whoever keeps them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import msgspec

from runnel.broker.feeds import KeptLog
from runnel.broker.live_reading import LiveReading
from runnel.broker.live_subscription import LiveSubscription
from runnel.broker.live_topics import LIVE_SHARD, LiveTopic
from runnel.broker.loop_share import LoopShare
from runnel.broker.pages import PAGE_MAX
from runnel.broker.stores import Stores
from runnel.config import Retain, format_duration, format_size
from runnel.errors import UnknownTopicError
from runnel.formats.wire import Owner, PartitionState, TopicState
from runnel.topics.names import check_topic
from runnel.topics.pattern_index import PatternIndex
from runnel.topics.patterns import Pattern

_TOPICS_PER_STEP: Final = 64
_PARTITIONS_PER_STEP: Final = 256


class Topics:
    """What there is, of every kind."""

    def __init__(
        self,
        stores: Stores,
        index: PatternIndex[LiveSubscription],
        reading: LiveReading,
        share: LoopShare,
    ) -> None:
        self._stores = stores
        self._index = index
        self._reading = reading
        self._share = share

    async def list(
        self,
        pattern: str,
        *,
        after: str,
        limit: int,
        visible: Sequence[Pattern] | None,
        owner: Hashable,
    ) -> tuple[list[TopicState], bool]:
        """In order of their names, from behind `after` on, and whether that is all.

        At most PAGE_MAX, whatever `limit` says. `visible`: only those that one of these patterns matches.
        """
        limit = max(1, min(limit, PAGE_MAX))
        found: list[TopicState] = []
        walk = self._index.walk(Pattern(pattern), after=after, visible=visible)
        while not walk.done:
            await self._share.turn(owner)
            for name in walk.step(found_max=_TOPICS_PER_STEP):
                await self._reading.look_up(name, owner)
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
        topic = self._stores.live.find(name)
        return None if topic is None else self._live(topic)

    def _kept(self, log: KeptLog, name: str) -> TopicState:
        info = log.topic(name)
        policy = info.policy
        return TopicState(
            name,
            policy.keep,
            policy.journal,
            policy.partitions,
            sum(log.next_offset(name, number) - 1 for number in range(policy.partitions)),
            len(self._reading.subscribers(name)),
            policy.rule,
            policy.last_value,
            _retained(policy.retain),
        )

    def _live(self, topic: LiveTopic) -> TopicState:
        policy = topic.policy
        return TopicState(
            topic.name,
            policy.keep,
            policy.journal,
            policy.partitions,
            sum(offset - 1 for offset in topic.next_offsets),
            len(self._reading.subscribers(topic.name)),
            policy.rule,
            policy.last_value,
        )

    async def describe(self, name: str, *, asker: Hashable) -> TopicState:
        """One topic with its partitions."""
        log = self._stores.log_of(name)
        if log is None:
            topic = self._live_topic(name)
            owner = Owner(LIVE_SHARD.journal, LIVE_SHARD.shard, topic.epoch)
            live = [PartitionState(offset, offset, owner) for offset in topic.next_offsets]
            return _with_partitions(self._live(topic), live)
        partitions = []
        shards = enumerate(log.topic(name).shards)
        async for some in self._share.steps(shards, asker, _PARTITIONS_PER_STEP):
            for number, shard in some:
                bounds = await log.bounds(name, number)
                owner = Owner(shard.journal, shard.shard, log.epoch)
                partitions.append(PartitionState(bounds.first_offset, bounds.next_offset, owner))
        return _with_partitions(self._kept(log, name), partitions)

    async def delete(self, name: str) -> None:
        log = self._stores.log_of(name)
        if log is None:
            self._stores.live.vanish(self._live_topic(name))
        else:
            await log.delete_topic(name)

    async def purge(self, name: str) -> None:
        log = self._stores.log_of(name)
        if log is None:
            self._stores.live.purge(self._live_topic(name))
        else:
            await log.purge_topic(name)

    def _live_topic(self, name: str) -> LiveTopic:
        topic = self._stores.live.find(name)
        if topic is None:
            check_topic(name)
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return topic


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
