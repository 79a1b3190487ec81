"""Computes where a live subscription begins: a place in every partition or shard, given its `start`."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.stores import Stores, check_epoch, owned_shard
from runnel.errors import ClientFault, OffsetAheadError, UnknownTopicError
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.log.log import OwnedShard, Position, ShardId, Store
from runnel.topics.names import LIVE_JOURNAL, TopicPartition
from runnel.topics.pattern_index import SLICE_COMPARISONS, PatternIndex
from runnel.topics.patterns import Pattern

_FIRST_COMPARISONS: Final = 64
_TOPICS_PER_STEP: Final = 256
SHARDS_PER_STEP: Final = 256
# Only these shards, as their owner sees them; None: all.
Chosen: TypeAlias = Mapping[ShardId, OwnedShard] | None

_LOST: Final = "messages in memory were lost when the broker started anew"

KINDS: Final = ("latest", "last", "earliest", "offsets", "time", "resume", "resume_last")
RESUMING: Final = ("resume", "resume_last")
WITH_LAST: Final = ("last", "resume_last")


def check_start(start: Start, patterns: Sequence[Pattern]) -> None:
    """Check that a start fits the patterns; an error says what would fit."""
    if start.kind not in KINDS:
        raise ClientFault(f"start {start.kind!r} is none of {', '.join(KINDS)}")
    if start.kind != "offsets":
        return
    if not start.partitions:
        raise ClientFault("start at offsets needs at least one topic, partition and offset")
    literals = {pattern.prefix for pattern in patterns if pattern.is_literal}
    for place in start.partitions:
        if place.topic not in literals:
            raise ClientFault(
                f"start at an offset needs its topic as a pattern of its own: {place.topic!r} is none"
            )
        if place.offset < 1:
            raise ClientFault(f"offset {place.offset}: messages are numbered 1, 2, 3 …")
    if len(literals) < len(patterns):
        raise ClientFault(
            "start at offsets goes with topics, not with patterns that have wildcards"
        )


def literal_keys(
    stores: Stores, patterns: Sequence[Pattern], chosen: Chosen = None
) -> dict[TopicPartition, Store]:
    """The topic-partitions of literal patterns whose topics exist and are kept, and the log that has each."""
    found: dict[TopicPartition, Store] = {}
    for pattern in patterns:
        log = stores.log_of(pattern.prefix)
        if log is not None:
            for number, shard in enumerate(log.metadata.topics.get(pattern.prefix).shards):
                if chosen is None or shard in chosen:
                    found[pattern.prefix, number] = log
    return found


async def offsets_at(
    stores: Stores, patterns: Sequence[Pattern], start: Start, chosen: Chosen = None
) -> dict[TopicPartition, int]:
    """The first offset of each partition, or the first at a time, where `start` does not give an offset.

    It repeats until no topic was created meanwhile: then no message can have been stored in an unknown partition.
    """
    if start.kind not in ("earliest", "time", *RESUMING):
        return {}
    given = {(place.topic, place.partition): place for place in start.partitions}
    offsets: dict[TopicPartition, int] = {}
    while unknown := {
        key: log
        for key, log in literal_keys(stores, patterns, chosen).items()
        if key not in offsets and not (key in given and _is_resumable(log, key, given[key]))
    }:
        for (topic, number), log in unknown.items():
            with contextlib.suppress(UnknownTopicError):  # deleted meanwhile
                if start.kind == "time":
                    offset = await log.offset_at(topic, number, start.time_ns)
                else:  # includes damaged messages: the reader gets a gap for them
                    offset = (await log.bounds(topic, number)).first_offset
                offsets[topic, number] = offset
    return offsets


async def matching_shards(
    stores: Stores,
    index: PatternIndex[LiveSubscription],
    patterns: Sequence[Pattern],
    share: LoopShare,
    owner: Hashable,
) -> dict[ShardId, Store]:
    """The shards that have a matching topic."""
    found: dict[ShardId, Store] = {}
    for pattern in patterns:
        walk = index.walk(pattern)
        comparisons = _FIRST_COMPARISONS  # often the first topics suffice
        while not walk.done:
            await share.turn(owner)
            for topic in walk.step(comparisons, found_max=_TOPICS_PER_STEP):
                log = stores.log_of(topic)
                if log is not None:
                    found.update(dict.fromkeys(log.metadata.topics.get(topic).shards, log))
            comparisons = min(2 * comparisons, SLICE_COMPARISONS)
            served = [shard for log in stores.kept for shard in log.shards()]
            if len(found) >= len(served) and all(shard in found for shard in served):
                return found  # all shards: other topics add none
    return found


async def entries_at(
    shards: Mapping[ShardId, Store], time_ns: int, share: LoopShare, owner: Hashable
) -> dict[ShardId, int]:
    """The first entry of each shard at a time."""
    entries: dict[ShardId, int] = {}
    async for some in share.steps(shards.items(), owner, SHARDS_PER_STEP):
        for shard, log in some:
            entries[shard] = await log.entry_at(shard, time_ns)
    return entries


class Begin(NamedTuple):
    """The offset at which a reader begins a partition, and the gap that it gets before, if any."""

    log: Store
    offset: int
    gap: GapState | None = None


def begin_offsets(
    stores: Stores,
    patterns: Sequence[Pattern],
    start: Start,
    found: Mapping[TopicPartition, int],
    chosen: Chosen = None,
) -> dict[TopicPartition, Begin]:
    """Where a reader begins each existing partition of literal topics, as of now."""
    given = {(place.topic, place.partition): place for place in start.partitions}
    begins: dict[TopicPartition, Begin] = {}
    for key, log in literal_keys(stores, patterns, chosen).items():
        end = owned_shard(log, key).next_offset(*key)
        match start.kind:
            case "earliest" | "time":
                begins[key] = Begin(log, found[key])
            case "offsets" if key in given:
                if given[key].offset > end:
                    raise OffsetAheadError(*key, given[key].offset, end)
                begins[key] = Begin(log, given[key].offset)
            case "resume" | "resume_last":
                begins[key] = _resumed(log, key, given.get(key), found)
            case _:
                begins[key] = Begin(log, end)
    return begins


def lost_partitions(stores: Stores, patterns: Sequence[Pattern], start: Start) -> list[GapState]:
    """The gaps for places in topics that were in memory and have not been created again.

    The reader keeps its place, so that it gets the gap again until a message comes.
    """
    literals = {pattern.prefix for pattern in patterns}
    lost = []
    for place in start.partitions if start.kind in RESUMING else ():
        log = stores.log_for(place.topic) if place.topic in literals else None
        if log is None or log.metadata.topics.has(place.topic):
            continue
        shards = stores.shards_of(place.topic)
        if _is_of_older_epoch(log, shards[min(place.partition, len(shards) - 1)], place):
            key = (place.topic, place.partition)
            lost.append(GapState("restart", 0, *key, place.offset, 1, _LOST))
    return lost


def lost_shards(stores: Stores, start: Start) -> list[GapState]:
    """The gaps for places in shards none of whose topics has been created again."""
    if start.kind not in RESUMING:
        return []
    known = {shard for log in stores.kept for shard in log.shards()}
    return [
        GapState("restart", 0, text=f"shard {place.journal}/{place.shard}: {_LOST}")
        for place in start.shards
        if place.journal != LIVE_JOURNAL
        and ShardId(place.journal, place.shard) not in known
        and place.entry > 1
    ]


def _resumed(
    log: Store,
    key: TopicPartition,
    place: PartitionPlace | None,
    found: Mapping[TopicPartition, int],
) -> Begin:
    if place is None:
        return Begin(log, found[key])  # created since
    if key not in found:
        return Begin(log, max(1, place.offset))
    shard = owned_shard(log, key)
    if _is_of_older_epoch(log, shard.id, place):
        text = _LOST
    else:
        text = f"offset {place.offset} is beyond the next message's, {shard.next_offset(*key)}"
    return Begin(log, found[key], GapState("restart", 0, *key, place.offset, found[key], text))


def _is_resumable(log: Store, key: TopicPartition, place: PartitionPlace) -> bool:
    shard = owned_shard(log, key)
    is_lost = _is_of_older_epoch(log, shard.id, place)
    return not is_lost and place.offset <= shard.next_offset(*key)


def _is_of_older_epoch(log: Store, shard: ShardId, place: PartitionPlace) -> bool:
    """Whether the messages before a place are lost with the epoch that it is of."""
    if log.capabilities.keeps_positions:
        return False
    try:
        return place.epoch not in (0, log.shard(shard).epoch)
    except UnknownTopicError:
        return place.epoch != 0  # the shard has not begun again


async def check_epochs(stores: Stores, start: Start) -> None:
    """Check the epochs of the places that a reader gives. Unavailable if a shard may have moved away unnoticed."""
    for at in start.shards:
        with contextlib.suppress(UnknownTopicError):  # lost, or of ephemeral topics
            log, shard = stores.shard(ShardId(at.journal, at.shard))
            await check_epoch(log, shard, at.epoch)
    for place in start.partitions:
        kept_in = stores.log_of(place.topic)
        if kept_in is not None:
            with contextlib.suppress(UnknownTopicError):  # it has fewer partitions than it had
                key = (place.topic, place.partition)
                await check_epoch(kept_in, owned_shard(kept_in, key), place.epoch)


async def ends_before(stores: Stores, share: LoopShare, owner: Hashable) -> dict[ShardId, int]:
    """The next entry of each shard, as of this call or earlier; a shard created meanwhile has none."""
    ends: dict[ShardId, int] = {}
    async for some in share.steps(stores.shards(), owner, SHARDS_PER_STEP):
        ends |= {shard.id: shard.entries().next_offset for _, shard in some}
    return ends


def begin_positions(
    stores: Stores,
    start: Start,
    matching: Mapping[ShardId, Store],
    at_time: Mapping[ShardId, int],
    ends: Mapping[ShardId, int],
    chosen: Chosen = None,
) -> list[tuple[Store, OwnedShard, Position]]:
    """Where a reader begins each shard, as of now.

    A shard without a matching topic begins at its end from before the search, `ends`: a topic may have been created
    since. With starts that need no search it begins at its end.

    Not in steps: the reader would miss messages stored between reading a shard's end and adding the subscription.
    """
    given = {ShardId(place.journal, place.shard): place for place in start.shards}
    begins = []
    for log, shard in stores.shards():
        if chosen is not None and shard.id not in chosen:
            continue
        bounds = shard.entries()
        end = Position(shard.epoch, bounds.next_offset)
        first = Position(shard.epoch, bounds.first_offset)
        position = end
        if start.kind == "earliest" and shard.id in matching:
            position = first
        elif start.kind in ("earliest", "time"):
            entry = at_time.get(shard.id, ends.get(shard.id, 0))
            position = Position(shard.epoch, max(entry, bounds.first_offset))
        elif start.kind in RESUMING:
            place = given.get(shard.id)
            position = first if place is None else _given_position(log, place)
        begins.append((log, shard, position))
    return begins


def _given_position(log: Store, place: ShardPlace) -> Position:
    epoch = 0 if log.capabilities.keeps_positions else place.epoch
    return Position(epoch, max(1, place.entry), place.row)
