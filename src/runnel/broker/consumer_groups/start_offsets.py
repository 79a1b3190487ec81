"""Resolves the `start` of a subscription, or of a member of one, to an offset in each partition."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from runnel.errors import ClientFault, UnknownTopicError
from runnel.formats.heads import Start
from runnel.log.log import MessageLog, OwnedShard
from runnel.topics.names import TopicPartition

_STARTS: Final = ("earliest", "latest", "time", "offsets")


class ServedPartition(NamedTuple):
    """A partition of a kept topic, with its log and its shard, which is served here."""

    key: TopicPartition
    log: MessageLog
    shard: OwnedShard


async def start_offsets(
    subscriber: str,
    partitions: AsyncIterator[ServedPartition],
    start: Start,
    *,
    is_elsewhere: Callable[[TopicPartition], bool] = lambda _: False,
) -> dict[TopicPartition, int]:
    """The first offset that is owed of each partition; with `offsets`, only of the partitions that it names.

    `offsets` may also name partitions that another node serves; that node looks at the offset.
    """
    if start.kind not in _STARTS:
        raise ClientFault(f"start {start.kind!r} is none of {', '.join(_STARTS)}")
    given = {(place.topic, place.partition): place.offset for place in start.partitions}
    begins: dict[TopicPartition, int] = {}
    async for key, log, shard in partitions:
        if start.kind == "offsets" and key not in given:
            continue  # unchanged: from the first message on, unless it has stored state
        with suppress(UnknownTopicError):  # deleted meanwhile
            begins[key] = await _begin_of(log, shard, key, start, given)
    unknown = [key for key in given if key not in begins and not is_elsewhere(key)]
    if unknown:
        topic, partition = unknown[0]
        raise UnknownTopicError(f"{topic}[{partition}] is no partition that {subscriber} covers")
    return begins


async def begin_of(log: MessageLog, shard: OwnedShard, key: TopicPartition, start: Start) -> int:
    """The first offset that is owed of one partition, after the start was accepted at another node.

    One that `offsets` leaves out begins with its first message, one that it puts beyond the end there.
    """
    end = shard.next_offset(*key)
    given = {
        (place.topic, place.partition): min(max(place.offset, 1), end) for place in start.partitions
    }
    return await _begin_of(log, shard, key, start, given)


async def _begin_of(
    log: MessageLog,
    shard: OwnedShard,
    key: TopicPartition,
    start: Start,
    given: Mapping[TopicPartition, int],
) -> int:
    match start.kind:
        case "latest":
            return shard.next_offset(*key)
        case "time":
            return await log.offset_at(*key, start.time_ns)
        case "offsets" if key in given:
            end = shard.next_offset(*key)
            if not 1 <= given[key] <= end:
                raise ClientFault(
                    f"offset {given[key]} of {key[0]}[{key[1]}] is not between 1 and {end}, the next "
                    "message's"
                )
            return given[key]
    return (await log.bounds(*key)).first_offset
