"""Where a live reader stands: kept while it reads, told to it as opaque bytes, and read again when it comes back.

A reader of topics by name stands in their partitions; one of patterns with wildcards in shards. In the middle of a
stored batch a place in a shard says too little: then the messages of it that were sent are remembered by partition.
Until all last values have been sent a reader that comes back gets them all again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from runnel.broker.broker import Delivery, LiveSubscription
from runnel.errors import ClientFault, MalformedError
from runnel.formats.batch import Batch, Run
from runnel.formats.heads import Natural
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.topics.names import LIVE_JOURNAL

_VERSION: Final = 1


class Position(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the bytes hold. `partitions` of a reader in shards: what was sent of the batch that it is within."""

    version: int
    patterns: Natural  # a digest: a position fits the patterns that it was told for
    is_in_shards: bool
    has_last: bool  # all last values were sent, or none were asked for
    partitions: Sequence[PartitionPlace]
    shards: Sequence[ShardPlace]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Position)


def read_position(data: bytes, patterns: Sequence[str]) -> Position:
    try:
        position = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("position", f"none that this broker gave: {error}") from None
    if position.version != _VERSION:
        raise MalformedError("position", f"version {position.version} is unknown")
    if position.patterns != _digest(patterns):
        raise ClientFault("position: it was given to a subscription with other patterns")
    return position


def start_at(position: Position) -> Start:
    kind = "resume" if position.has_last else "resume_last"
    partitions = () if position.is_in_shards else position.partitions
    return Start(kind, partitions, 0, position.shards)


class Progress:
    """Moves on with everything that is sent."""

    def __init__(self, patterns: Sequence[str], start: Start, given: Position | None) -> None:
        self._digest = _digest(patterns)
        self._is_in_shards = False
        self._has_last = start.kind not in ("last", "resume_last")
        self._partitions: dict[tuple[str, int], PartitionPlace] = {}
        self._shards: dict[tuple[str, int], ShardPlace] = {}
        # Of a reader in shards: what it was sent of the batch that it is within, and of those that it was within
        # when it left, which come again.
        self._within: dict[tuple[str, int], PartitionPlace] = {}
        self._again: dict[tuple[str, int], PartitionPlace] = {}
        if given is not None:
            self._shards = {(place.journal, place.shard): place for place in given.shards}
            places = {(place.topic, place.partition): place for place in given.partitions}
            if given.is_in_shards:
                self._again = places
            else:
                self._partitions = places

    def begin(self, subscription: LiveSubscription) -> None:
        """Take over where the broker says that it begins."""
        self._is_in_shards = subscription.places is None
        for place in subscription.partitions:
            self._partitions[place.topic, place.partition] = place
        for shard in subscription.shards:
            if shard.journal != LIVE_JOURNAL:
                self._shards[shard.journal, shard.shard] = shard

    @property
    def looks_at_runs(self) -> bool:
        return not self._is_in_shards or bool(self._again)

    def unseen(self, batch: Batch) -> Batch | None:
        """Without what was sent before the reader left."""
        if not self._again:
            return batch
        rows: list[int] = []
        for run in batch.runs():
            key = (run.topic, run.partition)
            place = self._again.get(key)
            first = run.row
            if place is not None:
                if place.epoch == run.epoch:
                    first += min(max(place.offset - run.base_offset, 0), run.count)
                if place.epoch != run.epoch or run.base_offset + run.count >= place.offset:
                    del self._again[key]
            rows += range(first, run.row + run.count)
        return batch.take(rows) if rows else None

    def delivered(self, delivery: Delivery, batches: Iterable[Batch] = ()) -> None:
        """All of a delivery has been sent. Its batches need not be known where `looks_at_runs` is false."""
        if not self._is_in_shards:
            for batch in batches:
                for run in batch.runs():
                    self._move(run, run.count)
            return
        journal, shard = delivery.shard.journal, delivery.shard.shard
        if delivery.next_entry and journal != LIVE_JOURNAL:
            self._within.clear()
            place = ShardPlace(journal, shard, delivery.epoch, delivery.next_entry)
            self._shards[journal, shard] = place

    def delivered_rows(self, batch: Batch, end: int) -> None:
        """Of a batch, the rows before `end` have been sent."""
        if self._is_in_shards and not self._has_last:
            return  # last values come in no order
        for run in batch.runs():
            if run.row < end:
                self._move(run, min(run.count, end - run.row))

    def _move(self, run: Run, count: int) -> None:
        # A topic that was made later is not known yet. One of a new epoch counts from 1 again.
        places = self._within if self._is_in_shards else self._partitions
        key = (run.topic, run.partition)
        place = places.get(key)
        offset = run.base_offset + count
        if place is None or offset > place.offset or run.epoch != place.epoch:
            places[key] = PartitionPlace(run.topic, run.partition, offset, run.epoch)

    def missed(self, gap: GapState) -> None:
        """Move on behind what will not be sent."""
        place = self._partitions.get((gap.topic, gap.partition))
        if place is not None and gap.next_offset > place.offset:
            self._partitions[gap.topic, gap.partition] = PartitionPlace(
                gap.topic, gap.partition, gap.next_offset, place.epoch
            )

    def last_values_sent(self) -> None:
        self._has_last = True

    def told(self) -> bytes:
        """The position as it is now."""
        places = self._again | self._within if self._is_in_shards else self._partitions
        return _encoder.encode(
            Position(
                _VERSION,
                self._digest,
                self._is_in_shards,
                self._has_last,
                tuple(places.values()),
                tuple(self._shards.values()),
            )
        )


def _digest(patterns: Sequence[str]) -> int:
    return xxh3_64_intdigest("\n".join(sorted(set(patterns))).encode()) >> 1
