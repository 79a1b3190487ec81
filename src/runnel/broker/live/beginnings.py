"""Begins live subscriptions in partitions and shards: looks up where, then starts in all of them at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live import start_positions
from runnel.broker.live.feeds import PartitionsFeed, ShardFeed
from runnel.broker.live.start_positions import Chosen
from runnel.broker.live.subscription import Feed, LiveSubscription
from runnel.broker.stores import Stores, owned_shard
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.log.log import OwnedShard, Position, ShardId, Store
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.pattern_index import PatternIndex


class Begun(NamedTuple):
    """Where a subscription has begun, what it misses already, and the feeds that read what is stored."""

    partitions: Sequence[PartitionPlace]
    shards: Sequence[ShardPlace]
    gaps: Sequence[tuple[ShardId | None, GapState]]
    feeds: Mapping[ShardId, Feed]


Begin: TypeAlias = Callable[[], Begun]


class Beginnings:
    """Finds the places where subscriptions begin."""

    def __init__(
        self,
        stores: Stores,
        index: PatternIndex[LiveSubscription],
        workers: Workers,
        share: LoopShare,
    ) -> None:
        self._stores = stores
        self._index = index
        self._workers = workers
        self._share = share

    async def look_up(
        self, subscription: LiveSubscription, start: Start, owner: Hashable, chosen: Chosen
    ) -> Begin:
        """All look-ups, which await. The result lets it begin in all partitions or shards at the same moment.

        `chosen`: only in these shards; None: everywhere, and then MovedError if a shard that it would read is away.
        """
        stores, patterns = self._stores, subscription.patterns
        if chosen is not None:
            start = _restricted(stores, start, chosen)
        await start_positions.check_epochs(stores, start)
        if subscription.places is not None:
            offsets = await start_positions.offsets_at(stores, patterns, start, chosen)

            def begin_partitions() -> Begun:
                if chosen is None:
                    stores.check_here(pattern.prefix for pattern in patterns if pattern.is_literal)
                begins = start_positions.begin_offsets(stores, patterns, start, offsets, chosen)
                lost = start_positions.lost_partitions(stores, patterns, start)
                return self._begin_partitions(subscription, start, begins, lost)

            return begin_partitions
        ends: Mapping[ShardId, int] = {}
        matching: Mapping[ShardId, Store] = {}
        entries: Mapping[ShardId, int] = {}
        if start.kind in ("earliest", "time"):
            share = self._share
            ends = await start_positions.ends_before(stores, share, owner)
            matching = await start_positions.matching_shards(
                stores, self._index, patterns, share, owner
            )
            if chosen is not None:
                matching = {shard: log for shard, log in matching.items() if shard in chosen}
            if start.kind == "time":
                entries = await start_positions.entries_at(matching, start.time_ns, share, owner)

        def begin_shards() -> Begun:
            if chosen is None:
                stores.check_all_here()
            begins = start_positions.begin_positions(stores, start, matching, entries, ends, chosen)
            lost = [] if chosen is not None else start_positions.lost_shards(stores, start)
            return self._begin_shards(start, begins, lost)

        return begin_shards

    def _begin_partitions(
        self,
        subscription: LiveSubscription,
        start: Start,
        begins: Mapping[TopicPartition, start_positions.Begin],
        lost: Sequence[GapState],
    ) -> Begun:
        assert subscription.places is not None
        places: list[PartitionPlace] = []
        gaps: list[tuple[ShardId | None, GapState]] = [(None, gap) for gap in lost]
        feeds: dict[ShardId, Feed] = {}
        for (topic, number), (log, offset, gap) in begins.items():
            subscription.places[topic, number] = offset
            shard = owned_shard(log, (topic, number))
            places.append(PartitionPlace(topic, number, offset, shard.epoch))
            if gap is not None:
                gaps.append((shard.id, gap))
            is_behind = offset < shard.next_offset(topic, number)
            is_held = start.kind in start_positions.WITH_LAST
            if (is_behind or is_held) and shard.id not in feeds:
                feeds[shard.id] = PartitionsFeed(log, shard, self._stores, self._workers)
        return Begun(places, (), gaps, feeds)

    def _begin_shards(
        self,
        start: Start,
        begins: Sequence[tuple[Store, OwnedShard, Position]],
        lost: Sequence[GapState],
    ) -> Begun:
        is_held = start.kind in start_positions.WITH_LAST
        reports_passed = start.kind not in ("earliest", "time")
        places: list[ShardPlace] = []
        gaps: list[tuple[ShardId | None, GapState]] = [(None, gap) for gap in lost]
        feeds: dict[ShardId, Feed] = {}
        for log, shard, position in begins:
            end = shard.entries().next_offset
            is_of_epoch = position.epoch in (0, shard.epoch)
            if is_of_epoch and position.entry > end:
                text = f"entry {position.entry} of shard {shard.id} is beyond the next one, {end}"
                gaps.append((None, GapState("restart", 0, text=text)))
                position = Position(shard.epoch, end)
            epoch = position.epoch or shard.epoch
            places.append(
                ShardPlace(shard.id.journal, shard.id.shard, epoch, position.entry, position.row)
            )
            # For a place of another epoch the feed reports a gap and sends everything stored, wherever the place is.
            is_behind = position.entry < end or position.row > 0 or not is_of_epoch
            if is_held or is_behind:
                feeds[shard.id] = ShardFeed(
                    log, shard, position, self._workers, reports_passed=reports_passed
                )
        return Begun((), places, gaps, feeds)


def _restricted(stores: Stores, start: Start, chosen: Mapping[ShardId, OwnedShard]) -> Start:
    """The places of a start in these shards. A topic may have partitions in others, which are perhaps not here."""

    def is_chosen(place: PartitionPlace) -> bool:
        shards = stores.shards_of(place.topic)
        return place.partition < len(shards) and shards[place.partition] in chosen

    return msgspec.structs.replace(
        start,
        partitions=[place for place in start.partitions if is_chosen(place)],
        shards=[place for place in start.shards if ShardId(place.journal, place.shard) in chosen],
    )
