"""Where a live subscription begins: from `start` to a place in every partition or shard that it may read."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.loop_share import LoopShare
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
    """Whether a start makes sense with these patterns; an error says what would."""
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
    """The partitions of those topics that exist and are kept, and the log that has them."""
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
    """The first offset of each partition at a time, or that there is, where `start` does not say it.

    Looks again until no topic was made while it looked: then nothing can have been stored that it does not know of.
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
                else:  # what is lost was stored, too: whoever begins there is told of it
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
    """The shards in which any topic lies that matches."""
    found: dict[ShardId, KeptLog] = {}
    for pattern in patterns:
        walk = index.walk(pattern)
        comparisons = _FIRST_COMPARISONS  # often the first topics tell
        while not walk.done:
            await share.turn(owner)
            for topic in walk.step(comparisons, found_max=_TOPICS_PER_STEP):
                log = stores.log_of(topic)
                if log is not None:
                    found.update(dict.fromkeys(log.topic(topic).shards, log))
            comparisons = min(2 * comparisons, SLICE_COMPARISONS)
            shard_count = sum(len(log.shards()) for log in stores.kept)
            if len(found) >= shard_count and all(shard in found for _, shard in stores.shards()):
                return found  # the other topics can add nothing
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
    """Where a partition begins. `gap`: what to tell the reader before."""

    log: KeptLog
    offset: int
    gap: GapState | None = None


def begin_offsets(
    stores: Stores, patterns: Sequence[Pattern], start: Start, found: Mapping[TopicPartition, int]
) -> dict[TopicPartition, Begin]:
    """Where each existing partition of literal topics begins, as things stand now."""
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
    """What to tell of places in topics that were in memory and have not been made again.

    The reader is given no other place, so that it is told again until something comes.
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
    """The same for shards, none of whose topics has been made again."""
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
        return Begin(log, found[key])  # made since
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
    """The next entry of each shard, none later than when this returns; a shard made meanwhile has none."""
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
    """Where each shard begins, as things stand now.

    Those that held nothing wanted when somebody looked begin where they ended before that, `ends`: a topic may have
    been made since. With starts that need no looking they begin at their end.

    Not in steps: what is stored after a shard's end was read, and before the subscription is pushed to, it would miss.
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
    # A shard on disk goes on in a new epoch; one in memory began anew.
    epoch = place.epoch if isinstance(log, MemoryLog) else 0
    return Position(epoch, max(1, place.entry), place.row)
