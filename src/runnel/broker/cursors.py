"""Sets, removes and lists named cursors, with the lag of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.limits.quotas import Account
from runnel.broker.pages import Listed, ListRequest, PageBuilder
from runnel.broker.stores import Stores, owned_shard
from runnel.config import LimitSettings
from runnel.errors import ClientFault, LimitExceededError, MovedError, UnknownTopicError
from runnel.formats.wire import CursorPlace, CursorState
from runnel.log.log import Cursor, CursorPosition, Position, ShardId, Store
from runnel.topics.patterns import Pattern

# The same as for a subscription.
_PATTERNS_PER_PLACE_MAX: Final = 1024
# Of all places of a cursor together: each shard of a pipeline has the same few patterns.
_PATTERNS_MAX: Final = 100_000
_CURSORS_PER_STEP: Final = 32
_PLACES_PER_STEP: Final = 256
# The lag of a place whose shard is not served here.
_ELSEWHERE: Final = -1
# Shard places whose message count is cached.
_COUNTED_MAX: Final = 10_000

_ShardPlace: TypeAlias = tuple[ShardId, int, tuple[str, ...]]
PlaceEnds: TypeAlias = Mapping[tuple[str, int], int]
"""What follows the last message: by topic and partition the next offset, by journal and shard the next entry."""

_Known: TypeAlias = list[tuple[Cursor, Store]]


class CursorStore:
    """The named cursors of a broker. Each is stored in the log that has its topics."""

    def __init__(self, stores: Stores, limits: LimitSettings, share: LoopShare) -> None:
        self._stores = stores
        self._limits = limits
        self._share = share
        # For a place in a shard: the shard's epoch and stamp, and how many messages followed the place at that stamp.
        self._counted: dict[_ShardPlace, tuple[tuple[int, int, int], int]] = {}
        # The last lag of each place, for the time in which its shard is away.
        self._last_lags: dict[CursorPosition, int] = {}
        self._under_way: Counter[str] = Counter()  # cursors being created, by token

    async def set(
        self,
        name: str,
        places: Sequence[CursorPlace],
        account: Account | None = None,
        *,
        ends: PlaceEnds | None = None,
    ) -> None:
        """Create or move a cursor. It stays on the account that created it.

        `ends`: what their owners say of the places that are not served here.
        """
        if not places:
            raise ClientFault(f"cursor {name!r}: at least one position is needed")
        self._check_counts(name, places)
        _check_distinct(name, places)
        log = self._log_of(name, places[0])
        for place in places[1:]:
            if self._log_of(name, place) is not log:
                raise ClientFault(
                    f"cursor {name!r}: a cursor stands in topics on disk or in memory, not in both"
                )
        for pattern in dict.fromkeys(text for place in places for text in place.patterns):
            Pattern(pattern)
        positions = [_position(name, log, place, ends or {}) for place in places]
        known = [kept.metadata.cursors.find(name) for kept in self._stores.kept]
        owner = next((cursor.owner for cursor in known if cursor is not None), None)
        if owner is None and account is not None:
            account.check_cursor(name, self._under_way[account.name])
            self._under_way[account.name] += 1
            try:
                await log.metadata.set_cursor(name, positions, account.name)
            finally:
                self._under_way[account.name] -= 1
            return
        for other in self._stores.kept:
            if other is not log and other.metadata.cursors.find(name) is not None:
                await other.metadata.remove_cursor(name)
        await log.metadata.set_cursor(name, positions, owner or "")

    def owned_by(self, owner: str) -> int:
        return sum(log.metadata.cursors.owned_by(owner) for log in self._stores.kept)

    async def remove(self, name: str) -> None:
        found = [log for log in self._stores.kept if log.metadata.cursors.find(name) is not None]
        if not found:
            raise UnknownTopicError(f"cursor {name!r} does not exist")
        for log in found:
            await log.metadata.remove_cursor(name)

    def known(self, name: str) -> list[CursorState]:
        """The cursor of this name, if it exists, without its lag."""
        found = [log.metadata.cursors.find(name) for log in self._stores.kept]
        return [_state(cursor) for cursor in found if cursor is not None]

    async def list(
        self,
        name: str | None = None,
        *,
        is_visible: Callable[[CursorState], bool] | None = None,
        owner: Hashable = None,
        part_only: bool = False,
    ) -> list[CursorState]:
        """Cursors in order of their names, with their lag. `part_only`: -1 where another node knows it."""
        known = self._ordered(lambda cursor: name is None or cursor.name == name)
        found = []
        async for some in self._share.steps(known, owner, _CURSORS_PER_STEP):
            for cursor, log in some:
                state = _state(cursor)
                if is_visible is None or is_visible(state):
                    found.append(
                        await self._with_lag(log, cursor, state, owner, part_only=part_only)
                    )
        return found

    async def page(
        self, request: ListRequest[CursorState], *, part_only: bool = False
    ) -> Listed[CursorState]:
        """Cursors with their lag, and whether these are all that remain. `part_only` as for `list`."""
        owner, is_visible = request.owner, request.is_visible
        page: PageBuilder[CursorState] = PageBuilder(request.limit, "cursors")
        known = self._ordered(lambda each: each.name > request.after)
        for number, (cursor, log) in enumerate(known):
            if number % _CURSORS_PER_STEP == 0:
                await self._share.turn(owner)
            state = _state(cursor)
            if is_visible is None or is_visible(state):
                if page.is_full():
                    return page.items, False
                lagging = await self._with_lag(log, cursor, state, owner, part_only=part_only)
                page.add(lagging, len(state.places))
        return page.items, True

    def _ordered(self, is_wanted: Callable[[Cursor], bool]) -> _Known:
        """The wanted cursors in order of their names."""
        known = [
            (cursor, log)
            for log in self._stores.kept
            for cursor in log.metadata.cursors.all()
            if is_wanted(cursor)
        ]
        known.sort(key=lambda each: each[0].name)
        return known

    async def _with_lag(
        self,
        log: Store,
        cursor: Cursor,
        state: CursorState,
        owner: Hashable,
        *,
        part_only: bool,
    ) -> CursorState:
        places = []
        for number, (at, place) in enumerate(zip(cursor.positions, state.places, strict=True), 1):
            if number % _PLACES_PER_STEP == 0:
                await self._share.turn(owner)
            try:
                lag = max(0, await self._lag(log, at, owner))
            except UnknownTopicError:
                lag = 0  # its topic was deleted
            except MovedError:
                lag = _ELSEWHERE if part_only else self._last_lags.get(at, 0)  # its owner knows
            else:
                if len(self._last_lags) >= _COUNTED_MAX:
                    self._last_lags.clear()
                self._last_lags[at] = lag
            places.append(msgspec.structs.replace(place, lag=lag))
        return msgspec.structs.replace(state, places=places)

    async def _lag(self, log: Store, at: CursorPosition, owner: Hashable) -> int:
        """How many matching messages follow the place; never an underestimate."""
        if at.topic is not None:
            key = (at.topic, at.partition)
            return owned_shard(log, key).next_offset(*key) - at.offset
        assert at.shard is not None
        assert at.position is not None
        shard = log.shard(at.shard)
        stamp = (shard.epoch, *shard.count_stamp())
        place = (at.shard, at.position.entry, at.patterns)
        known = self._counted.get(place)
        if known is not None and known[0] == stamp:
            return known[1]
        count = await log.count(
            at.shard, at.position.entry, at.patterns, lambda: self._share.turn(owner)
        )
        if len(self._counted) >= _COUNTED_MAX:
            self._counted.clear()
        self._counted[place] = (stamp, count)
        return count

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

    def _log_of(self, name: str, place: CursorPlace) -> Store:
        if (place.topic is None) == (place.journal is None):
            raise ClientFault(
                f"cursor {name!r}: a position names either a topic with partition and offset, or a "
                "journal with shard, entry and patterns"
            )
        if place.topic is not None:
            return self._stores.existing(place.topic)
        assert place.journal is not None
        try:
            return self._stores.log_of_shard(ShardId(place.journal, place.shard))
        except UnknownTopicError as error:
            raise UnknownTopicError(f"cursor {name!r}: {error}") from None


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


def _position(name: str, log: Store, place: CursorPlace, ends: PlaceEnds) -> CursorPosition:
    if place.topic is not None:
        key = (place.topic, place.partition)
        end = ends.get(key) or owned_shard(log, key).next_offset(*key)
        if not 1 <= place.offset <= end:
            raise ClientFault(
                f"cursor {name!r}: offset {place.offset} of {place.topic}[{place.partition}] is not "
                f"between 1 and {end}, the next message's"
            )
        return CursorPosition(topic=place.topic, partition=place.partition, offset=place.offset)
    assert place.journal is not None
    shard = ShardId(place.journal, place.shard)
    end = ends.get((shard.journal, shard.shard)) or log.shard(shard).entries().next_offset
    if not 1 <= place.entry <= end:
        raise ClientFault(
            f"cursor {name!r}: entry {place.entry} of shard {shard} is not between 1 and {end}"
        )
    return CursorPosition(
        shard=shard,
        position=Position(place.epoch, place.entry, place.row),
        patterns=tuple(place.patterns),
    )


def _state(cursor: Cursor) -> CursorState:
    return CursorState(cursor.name, list(map(_place, cursor.positions)), cursor.updated_ns)


def _place(at: CursorPosition) -> CursorPlace:
    if at.topic is not None:
        return CursorPlace(at.topic, at.partition, at.offset)
    assert at.shard is not None
    assert at.position is not None
    return CursorPlace(
        journal=at.shard.journal,
        shard=at.shard.shard,
        epoch=at.position.epoch,
        entry=at.position.entry,
        row=at.position.row,
        patterns=at.patterns,
    )
