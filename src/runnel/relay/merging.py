"""Merges what the nodes of a cluster answer for their own parts into the answer for all of it. Pure.

Each answer is in order of names. Of several pages the merged one ends where the first of them ends, so that nothing is
left out in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from runnel.broker.pages import PAGE_MAX, PARTS_MAX, Listed
from runnel.config import Keep
from runnel.errors import LimitExceededError
from runnel.formats.wire import CursorPlace, CursorState, PartitionState, ShardState, TopicState
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState

_T = TypeVar("_T")

_PARTITIONS_LISTED_MAX: Final = 10_000


def merged_page(
    pages: Sequence[Listed[_T]],
    name_of: Callable[[_T], str],
    merge: Callable[[Sequence[_T]], _T | None],
    limit: int,
    parts_of: Callable[[_T], int] = lambda _: 1,
) -> Listed[_T]:
    """One page of the items of all pages. `merge` makes one of those with the same name; None: leave it out.

    With limit 0 the caller does not page: it gets everything, or LimitExceededError.
    """
    ends = [name_of(items[-1]) for items, is_complete in pages if not is_complete and items]
    end = min(ends) if ends else None
    by_name: dict[str, list[_T]] = {}
    for items, _ in pages:
        for item in items:
            by_name.setdefault(name_of(item), []).append(item)
    found: list[_T] = []
    parts = 0
    for name in sorted(by_name):
        if end is not None and name > end:
            return found, False
        merged = merge(by_name[name])
        if merged is None:
            continue
        if limit and (len(found) >= min(limit, PAGE_MAX) or parts >= PARTS_MAX):
            return found, False
        if not limit and parts >= PARTS_MAX:
            raise LimitExceededError(
                f"there is too much for one answer, which has at most {PARTS_MAX:,} parts: ask in pages, with a limit"
            )
        found.append(merged)
        parts += max(1, parts_of(merged))
    return found, all(is_complete for _, is_complete in pages)


# --- Topics ---


def merged_topic(parts: Sequence[TopicState]) -> TopicState:
    """A topic whose messages were counted where they are. The first part is this node's own."""
    return replace(
        parts[0],
        messages=sum(each.messages for each in parts),
        subscribers=max(each.subscribers for each in parts),  # each has a part at every node
        partitions=_merged_partitions([each.partitions for each in parts if each.partitions]),
    )


def is_shared_topic(topic: TopicState) -> bool:
    """Whether every node knows of the topic. Of others only those that serve them."""
    return topic.keep == Keep.DISK


def _merged_partitions(parts: Sequence[Sequence[PartitionState]]) -> Sequence[PartitionState]:
    """Each partition as its owner describes it. The others say offset 0."""
    return [max(of_one, key=lambda each: each.next_offset) for of_one in zip(*parts, strict=False)]


def missing_partitions(topic: TopicState) -> list[int]:
    """The partitions that no node has described."""
    return [number for number, each in enumerate(topic.partitions) if not each.next_offset]


# --- Shards ---


def merged_shards(parts: Iterable[Sequence[ShardState]]) -> list[ShardState]:
    """All shards, in order of their names. Of one that two nodes name, the later term counts."""
    found: dict[tuple[str, int], ShardState] = {}
    for part in parts:
        for each in part:
            known = found.get((each.journal, each.shard))
            if known is None or known.epoch < each.epoch:
                found[each.journal, each.shard] = each
    return [found[key] for key in sorted(found)]


# --- Cursors ---


def merged_cursor(parts: Sequence[CursorState]) -> CursorState:
    """A cursor with the lag of each place as the owner of its shard counts it; -1: none has. The first part's count."""
    first = parts[0]
    lags: dict[object, int] = {}
    for part in parts:
        for place in part.places:
            key = _place_key(place)
            lags[key] = max(place.lag, lags.get(key, -1))
    return replace(
        first, places=[replace(each, lag=lags[_place_key(each)]) for each in first.places]
    )


def without_marks(cursor: CursorState) -> CursorState:
    """The cursor for its caller: nothing lags in a shard that nobody has used."""
    return replace(cursor, places=[replace(each, lag=max(0, each.lag)) for each in cursor.places])


def _place_key(place: CursorPlace) -> object:
    if place.topic is not None:
        return (place.topic, place.partition)
    return (place.journal, place.shard, tuple(place.patterns))


# --- Subscriptions ---


def merged_subscription(parts: Sequence[SubscriptionState]) -> SubscriptionState:
    """A subscription whose members were counted at every node. The first part is this node's own."""
    members: dict[str, list[MemberState]] = {}
    for part in parts:
        for member in part.members:
            members.setdefault(member.name, []).append(member)
    partitions: dict[tuple[str, str, int], PartitionWork] = {}
    for part in parts:
        for each in part.partitions:
            partitions[each.member, each.topic, each.partition] = each
    return replace(
        parts[0],
        members=[_merged_member(of_one) for of_one in members.values()],
        redelivered=sum(each.redelivered for each in parts),
        dead=sum(each.dead for each in parts),
        partitions=[partitions[key] for key in sorted(partitions)][:_PARTITIONS_LISTED_MAX],
    )


def _merged_member(parts: Sequence[MemberState]) -> MemberState:
    consumers = max(each.consumers for each in parts)  # each consumer has a part at every node
    oldest = [each.oldest_ns for each in parts if each.oldest_ns]
    return MemberState(
        parts[0].name,
        consumers,
        sum(each.backlog for each in parts),
        sum(each.in_flight for each in parts),
        sum(each.delayed for each in parts),
        min(oldest, default=0),
        0 if consumers else max(each.absent_ns for each in parts),
    )
