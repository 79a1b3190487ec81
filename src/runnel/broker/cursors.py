"""Named cursors as clients see them: checked places, and how far each is behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from runnel.broker.feeds import KeptLog
from runnel.broker.stores import Stores
from runnel.config import LimitSettings
from runnel.errors import ClientFault, LimitExceededError, UnknownTopicError
from runnel.formats.wire import CursorPlace, CursorState
from runnel.log.log import Cursor, CursorPosition, Position, ShardId
from runnel.topics.patterns import Pattern

# As many as a subscription may have.
_PATTERNS_PER_PLACE_MAX: Final = 1024
# Of all places together: each shard of a pipeline has the same few.
_PATTERNS_MAX: Final = 100_000


class Cursors:
    """Positions that outlive their readers, each in the log that has its topics."""

    def __init__(self, stores: Stores, limits: LimitSettings) -> None:
        self._stores = stores
        self._limits = limits

    async def set(self, name: str, places: Sequence[CursorPlace]) -> None:
        if not places:
            raise ClientFault(f"cursor {name!r}: at least one position is needed")
        self._check_counts(name, places)
        _check_distinct(name, places)
        shards = {shard: log for log, shard in self._stores.shards()}
        log = self._log_of(name, places[0], shards)
        for place in places[1:]:
            if self._log_of(name, place, shards) is not log:
                raise ClientFault(
                    f"cursor {name!r}: a cursor stands in topics on disk or in memory, not in both"
                )
        for pattern in dict.fromkeys(text for place in places for text in place.patterns):
            Pattern(pattern)
        positions = [_position(name, log, place) for place in places]
        for other in self._stores.kept:
            if other is not log and any(known.name == name for known in other.cursors()):
                await other.remove_cursor(name)
        await log.set_cursor(name, positions)

    async def remove(self, name: str) -> None:
        found = [
            log for log in self._stores.kept if any(known.name == name for known in log.cursors())
        ]
        if not found:
            raise UnknownTopicError(f"cursor {name!r} does not exist")
        for log in found:
            await log.remove_cursor(name)

    def list(self, name: str | None = None) -> list[CursorState]:
        return sorted(
            (
                _state(log, cursor)
                for log in self._stores.kept
                for cursor in log.cursors()
                if name is None or cursor.name == name
            ),
            key=lambda state: state.name,
        )

    def _check_counts(self, name: str, places: Sequence[CursorPlace]) -> None:
        if len(places) > self._limits.cursor_places_max:
            raise LimitExceededError(
                f"cursor {name!r}: {len(places)} positions; limits.cursor_places_max allows "
                f"{self._limits.cursor_places_max}"
            )
        counts = [len(place.patterns) for place in places]
        if max(counts) > _PATTERNS_PER_PLACE_MAX:
            raise LimitExceededError(
                f"cursor {name!r}: {max(counts)} patterns of one position; at most "
                f"{_PATTERNS_PER_PLACE_MAX} are allowed"
            )
        if sum(counts) > _PATTERNS_MAX:
            raise LimitExceededError(
                f"cursor {name!r}: {sum(counts)} patterns of all positions together; at most "
                f"{_PATTERNS_MAX} are allowed"
            )

    def _log_of(self, name: str, place: CursorPlace, shards: Mapping[ShardId, KeptLog]) -> KeptLog:
        if (place.topic is None) == (place.journal is None):
            raise ClientFault(
                f"cursor {name!r}: a position names either a topic with partition and offset, or a "
                "journal with shard, entry and patterns"
            )
        if place.topic is not None:
            return self._stores.existing(place.topic)
        assert place.journal is not None
        shard = ShardId(place.journal, place.shard)
        log = shards.get(shard)
        if log is None:
            raise UnknownTopicError(f"cursor {name!r}: there is no shard {shard}")
        return log


def _check_distinct(name: str, places: Sequence[CursorPlace]) -> None:
    """A cursor has one position in a partition, and one in a shard for the same patterns."""
    known: set[object] = set()
    for place in places:
        key = (
            (place.topic, place.partition)
            if place.topic is not None
            else (place.journal, place.shard, frozenset(place.patterns))
        )
        if key in known:
            of = place.topic if place.topic is not None else place.journal
            number = place.partition if place.topic is not None else place.shard
            raise ClientFault(f"cursor {name!r}: {of}[{number}] is given twice")
        known.add(key)


def _position(name: str, log: KeptLog, place: CursorPlace) -> CursorPosition:
    if place.topic is not None:
        end = log.next_offset(place.topic, place.partition)
        if not 1 <= place.offset <= end:
            raise ClientFault(
                f"cursor {name!r}: offset {place.offset} of {place.topic}[{place.partition}] is not "
                f"between 1 and {end}, the next message's"
            )
        return CursorPosition(topic=place.topic, partition=place.partition, offset=place.offset)
    assert place.journal is not None
    shard = ShardId(place.journal, place.shard)
    end = log.entries(shard).next_offset
    if not 1 <= place.entry <= end:
        raise ClientFault(
            f"cursor {name!r}: entry {place.entry} of shard {shard} is not between 1 and {end}"
        )
    return CursorPosition(
        shard=shard,
        position=Position(place.epoch, place.entry, place.row),
        patterns=tuple(place.patterns),
    )


def _state(log: KeptLog, cursor: Cursor) -> CursorState:
    return CursorState(
        cursor.name, [_place(log, position) for position in cursor.positions], cursor.updated_ns
    )


def _place(log: KeptLog, at: CursorPosition) -> CursorPlace:
    if at.topic is not None:
        try:
            lag = log.next_offset(at.topic, at.partition) - at.offset
        except UnknownTopicError:
            lag = 0  # its topic was deleted
        return CursorPlace(at.topic, at.partition, at.offset, lag=max(0, lag))
    assert at.shard is not None
    assert at.position is not None
    try:
        lag = log.entries(at.shard).next_offset - at.position.entry
    except UnknownTopicError:
        lag = 0
    return CursorPlace(
        journal=at.shard.journal,
        shard=at.shard.shard,
        epoch=at.position.epoch,
        entry=at.position.entry,
        row=at.position.row,
        patterns=at.patterns,
        lag=max(0, lag),
    )
