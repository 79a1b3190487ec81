"""Limits the rows or bytes of a micro-batch, in whole entries.

The size of an entry is known only after reading it. So the planning process reads ahead of the query, a page at a time,
and keeps only the sizes until the query has passed them. Each entry is then read twice: once here and once by its task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from runnel.errors import OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.wire import ShardState
from runnel.spark.connections import BrokerLogin, connection
from runnel.spark.read.stream_offset import Positions, ShardReadPosition, StreamShard

_PAGE_BYTES: Final = 2**20


class TriggerLimit(NamedTuple):
    """The limits of a micro-batch, which has at least one entry; None: no limit."""

    rows_max: int | None
    bytes_max: int | None


class _Entry(NamedTuple):
    """The size of one entry."""

    number: int
    rows: int
    bytes: int


class _Room:
    """The part of a limit that is not used yet."""

    def __init__(self, limit: TriggerLimit) -> None:
        self.rows = limit.rows_max
        self.bytes = limit.bytes_max

    def share(self, parts: int) -> _Room:
        return _Room(
            TriggerLimit(
                None if self.rows is None else self.rows // parts,
                None if self.bytes is None else self.bytes // parts,
            )
        )

    def has(self, entry: _Entry) -> bool:
        return (self.rows is None or entry.rows <= self.rows) and (
            self.bytes is None or entry.bytes <= self.bytes
        )

    def use(self, entry: _Entry) -> None:
        if self.rows is not None:
            self.rows -= entry.rows
        if self.bytes is not None:
            self.bytes -= entry.bytes


class _KnownEntries:
    """The known entries of one shard with matching messages, from the query's position on, up to `known_to`."""

    def __init__(self, epoch: int, begin: int) -> None:
        self.epoch = epoch
        self.entries: deque[_Entry] = deque()
        self.known_to = begin

    def forget_before(self, entry: int) -> None:
        while self.entries and self.entries[0].number < entry:
            self.entries.popleft()


class Lookahead:
    """Decides where the next micro-batch ends in each shard."""

    def __init__(self, address: BrokerLogin, patterns: tuple[str, ...]) -> None:
        self._address = address
        self._patterns = patterns
        self._ahead: dict[StreamShard, _KnownEntries] = {}
        self._turn = 0

    def ends(
        self, places: Positions, backlog: Mapping[StreamShard, ShardState], limit: TriggerLimit
    ) -> dict[StreamShard, ShardReadPosition]:
        """The end of the micro-batch in each shard of the backlog: an equal share for all, then the rest in turn.

        The first shard changes each time, so that no shard waits for ever behind others that are always full.
        """
        self._turn += 1
        keys = sorted(backlog)
        if not keys:
            return {}
        keys = [*keys[self._turn % len(keys) :], *keys[: self._turn % len(keys)]]
        for key in keys:
            self._begin(key, places[key], backlog[key])
        room = _Room(limit)
        taken: dict[StreamShard, int] = dict.fromkeys(keys, 0)
        for key in keys:
            share = room.share(len(keys)) if len(keys) > 1 else room
            self._take(key, backlog[key], taken, share)
        room = self._left(limit, taken)
        for key in keys:
            self._take(key, backlog[key], taken, room)
        if not any(taken.values()):
            self._take_one(keys, backlog, taken)
        return {
            key: places[key].moved(backlog[key].epoch, self._end(key, backlog[key], taken[key]))
            for key in keys
        }

    def _begin(self, key: StreamShard, place: ShardReadPosition, state: ShardState) -> None:
        ahead = self._ahead.get(key)
        begin = max(place.entry, state.first_entry)
        if begin > state.next_entry:  # the shard was recreated
            begin = state.first_entry
        if ahead is None or ahead.epoch != state.epoch or not begin <= ahead.known_to:
            ahead = self._ahead[key] = _KnownEntries(state.epoch, begin)
        ahead.forget_before(begin)

    def _entry(self, key: StreamShard, state: ShardState, number: int) -> _Entry | None:
        """The known entry with this index, reading ahead if necessary; None if the shard has no more."""
        ahead = self._ahead[key]
        while len(ahead.entries) <= number and ahead.known_to < state.next_entry:
            self._read(key, ahead, state)
        if len(ahead.entries) <= number:
            return None
        entry = ahead.entries[number]
        return entry if entry.number < state.next_entry else None

    def _read(self, key: StreamShard, ahead: _KnownEntries, state: ShardState) -> None:
        try:
            page = connection(self._address).fetch_shard(
                key.journal,
                key.shard,
                ahead.known_to,
                end_entry=state.next_entry,
                patterns=self._patterns,
                bytes_max=_PAGE_BYTES,
            )
        except OffsetGoneError as gone:
            # The task that reads it reports the loss; only the size of the rest matters here.
            ahead.known_to = min(gone.first_offset, state.next_entry)
            return
        except (
            OffsetAheadError,
            UnknownTopicError,
        ):  # the shard was recreated, or its last topic was deleted
            ahead.known_to = state.next_entry
            return
        for batch in page.batches:
            head = batch.envelope
            ahead.entries.append(
                _Entry(head.column64(head.entries)[-1], len(batch), len(batch.body))
            )
        ahead.known_to = max(page.next_entry, ahead.known_to + 1)

    def _take(
        self, key: StreamShard, state: ShardState, taken: dict[StreamShard, int], room: _Room
    ) -> None:
        while (entry := self._entry(key, state, taken[key])) is not None and room.has(entry):
            room.use(entry)
            taken[key] += 1

    def _left(self, limit: TriggerLimit, taken: Mapping[StreamShard, int]) -> _Room:
        room = _Room(limit)
        for key, count in taken.items():
            for number in range(count):
                room.use(self._ahead[key].entries[number])
        return room

    def _take_one(
        self,
        keys: list[StreamShard],
        backlog: Mapping[StreamShard, ShardState],
        taken: dict[StreamShard, int],
    ) -> None:
        for key in keys:
            if self._entry(key, backlog[key], 0) is not None:
                taken[key] = 1
                return

    def _end(self, key: StreamShard, state: ShardState, taken: int) -> int:
        """The number of the first entry that was not taken; entries between match no pattern."""
        entry = self._entry(key, state, taken)
        return state.next_entry if entry is None else entry.number
