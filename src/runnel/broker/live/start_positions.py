"""Computes where a live subscription begins: a place in every partition or shard, given its `start`."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.stores import KeptLog, Stores
from runnel.errors import ClientFault, OffsetAheadError, UnknownTopicError
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.log.log import Position, ShardId
from runnel.log.memory import MemoryLog
from runnel.topics.names import LIVE_JOURNAL, TopicPartition
from runnel.topics.pattern_index import SLICE_COMPARISONS, PatternIndex
from runnel.topics.patterns import Pattern

_FIRST_COMPARISONS: Final = 64
_TOPICS_PER_STEP: Final = 256
SHARDS_PER_STEP: Final = 256
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


def literal_keys(stores: Stores, patterns: Sequence[Pattern]) -> dict[TopicPartition, KeptLog]:
    """The topic-partitions of literal patterns whose topics exist and are kept, and the log that has each."""
    found: dict[TopicPartition, KeptLog] = {}
    for pattern in patterns:
        log = stores.log_of(pattern.prefix)
        if log is not None:
            for number in range(len(log.topic(pattern.prefix).shards)):
                found[pattern.prefix, number] = log
    return found


async def offsets_at(
    stores: Stores, patterns: Sequence[Pattern], start: Start
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
        for key, log in literal_keys(stores, patterns).items()
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
) -> dict[ShardId, KeptLog]:
    """The shards that have a matching topic."""
    found: dict[ShardId, KeptLog] = {}
    for pattern in patterns:
        walk = index.walk(pattern)
        comparisons = _FIRST_COMPARISONS  # often the first topics suffice
        while not walk.done:
            await share.turn(owner)
            for topic in walk.step(comparisons, found_max=_TOPICS_PER_STEP):
                log = stores.log_of(topic)
                if log is not None:
                    found.update(dict.fromkeys(log.topic(topic).shards, log))
            comparisons = min(2 * comparisons, SLICE_COMPARISONS)
            shard_count = sum(len(log.shards()) for log in stores.kept)
            if len(found) >= shard_count and all(shard in found for _, shard in stores.shards()):
                return found  # all shards: other topics add none
    return found


async def entries_at(
    shards: Mapping[ShardId, KeptLog], time_ns: int, share: LoopShare, owner: Hashable
) -> dict[ShardId, int]:
    """The first entry of each shard at a time."""
    entries: dict[ShardId, int] = {}
    async for some in share.steps(shards.items(), owner, SHARDS_PER_STEP):
        for shard, log in some:
            entries[shard] = await log.entry_at(shard, time_ns)
    return entries


class Begin(NamedTuple):
    """The offset at which a reader begins a partition, and the gap that it gets before, if any."""

    log: KeptLog
    offset: int
    gap: GapState | None = None


def begin_offsets(
    stores: Stores, patterns: Sequence[Pattern], start: Start, found: Mapping[TopicPartition, int]
) -> dict[TopicPartition, Begin]:
    """Where a reader begins each existing partition of literal topics, as of now."""
    given = {(place.topic, place.partition): place for place in start.partitions}
    begins: dict[TopicPartition, Begin] = {}
    for key, log in literal_keys(stores, patterns).items():
        end = log.next_offset(*key)
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
        if log is not None and not log.has_topic(place.topic) and _is_of_older_epoch(log, place):
            key = (place.topic, place.partition)
            lost.append(GapState("restart", 0, *key, place.offset, 1, _LOST))
    return lost


def lost_shards(stores: Stores, start: Start) -> list[GapState]:
    """The gaps for places in shards none of whose topics has been created again."""
    if start.kind not in RESUMING:
        return []
    known = {shard for _, shard in stores.shards()}
    return [
        GapState("restart", 0, text=f"shard {place.journal}/{place.shard}: {_LOST}")
        for place in start.shards
        if place.journal != LIVE_JOURNAL
        and ShardId(place.journal, place.shard) not in known
        and place.entry > 1
    ]


def _resumed(
    log: KeptLog,
    key: TopicPartition,
    place: PartitionPlace | None,
    found: Mapping[TopicPartition, int],
) -> Begin:
    if place is None:
        return Begin(log, found[key])  # created since
    if key not in found:
        return Begin(log, max(1, place.offset))
    if _is_of_older_epoch(log, place):
        text = _LOST
    else:
        text = f"offset {place.offset} is beyond the next message's, {log.next_offset(*key)}"
    return Begin(log, found[key], GapState("restart", 0, *key, place.offset, found[key], text))


def _is_resumable(log: KeptLog, key: TopicPartition, place: PartitionPlace) -> bool:
    return not _is_of_older_epoch(log, place) and place.offset <= log.next_offset(*key)


def _is_of_older_epoch(log: KeptLog, place: PartitionPlace) -> bool:
    return isinstance(log, MemoryLog) and place.epoch not in (0, log.epoch)


async def ends_before(stores: Stores, share: LoopShare, owner: Hashable) -> dict[ShardId, int]:
    """The next entry of each shard, as of this call or earlier; a shard created meanwhile has none."""
    ends: dict[ShardId, int] = {}
    async for some in share.steps(stores.shards(), owner, SHARDS_PER_STEP):
        ends |= {shard: log.entries(shard).next_offset for log, shard in some}
    return ends


def begin_positions(
    stores: Stores,
    start: Start,
    matching: Mapping[ShardId, KeptLog],
    at_time: Mapping[ShardId, int],
    ends: Mapping[ShardId, int],
) -> list[tuple[KeptLog, ShardId, Position]]:
    """Where a reader begins each shard, as of now.

    A shard without a matching topic begins at its end from before the search, `ends`: a topic may have been created
    since. With starts that need no search it begins at its end.

    Not in steps: the reader would miss messages stored between reading a shard's end and adding the subscription.
    """
    given = {ShardId(place.journal, place.shard): place for place in start.shards}
    begins = []
    for log, shard in stores.shards():
        bounds = log.entries(shard)
        end = Position(log.epoch, bounds.next_offset)
        first = Position(log.epoch, bounds.first_offset)
        position = end
        if start.kind == "earliest" and shard in matching:
            position = first
        elif start.kind in ("earliest", "time"):
            entry = at_time.get(shard, ends.get(shard, 0))
            position = Position(log.epoch, max(entry, bounds.first_offset))
        elif start.kind in RESUMING:
            place = given.get(shard)
            position = first if place is None else _given_position(log, place)
        begins.append((log, shard, position))
    return begins


def _given_position(log: KeptLog, place: ShardPlace) -> Position:
    # A shard on disk continues in a new epoch; a shard in memory begins again.
    epoch = place.epoch if isinstance(log, MemoryLog) else 0
    return Position(epoch, max(1, place.entry), place.row)
