"""The position of a live stream as opaque bytes, which the client keeps and gives back to resume there.

In the middle of a stored batch, the position of a shard says too little. The position of a reader with wildcards then
also says, for each partition, where the sent part of the batch ends. Until all last values have been sent, a reader
that comes back gets them all again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from runnel.broker.broker import LiveDelivery
from runnel.broker.live.subscription import OpenSubscription
from runnel.errors import ClientFault, MalformedError
from runnel.formats.batch import Batch, Run
from runnel.formats.heads import Natural
from runnel.formats.wire import GapState, PartitionPlace, ShardPlace, Start
from runnel.topics.names import LIVE_JOURNAL
from runnel.topics.read_position import (
    PartitionOffsets,
    ReadPosition,
    advance,
    places_of,
    resume_at,
)

_VERSION: Final = 1


class PackedPosition(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The content of the bytes.

    `partitions` of a reader in shards: where the sent part of its current batch ends.
    """

    version: int
    patterns: Natural  # a digest: a position fits only the patterns that it was made for
    is_in_shards: bool
    has_last: bool  # all last values were sent, or none were asked for
    partitions: Sequence[PartitionPlace]
    shards: Sequence[ShardPlace]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PackedPosition)


def read_position(data: bytes, patterns: Sequence[str]) -> PackedPosition:
    try:
        position = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("position", f"none that this broker gave: {error}") from None
    if position.version != _VERSION:
        raise MalformedError("position", f"version {position.version} is unknown")
    if position.patterns != _digest(patterns):
        raise ClientFault("position: it was given to a subscription with other patterns")
    return position


def start_at(position: PackedPosition) -> Start:
    partitions = () if position.is_in_shards else position.partitions
    return resume_at(partitions, position.shards, awaits_last_values=not position.has_last)


class StreamPosition:
    """The `ReadPosition` of one stream, and the part of a stored batch that a reader with wildcards has been sent."""

    def __init__(self, patterns: Sequence[str], start: Start, given: PackedPosition | None) -> None:
        self._digest: Final = _digest(patterns)
        self._position: Final = ReadPosition(patterns, start)
        # Of a reader with wildcards: where the sent part of its current batch ends, and where the parts ended that an
        # earlier stream sent. Those batches come again.
        self._within: Final[PartitionOffsets] = {}
        self._sent_before: Final[PartitionOffsets] = {}
        if given is not None and given.is_in_shards:
            for place in given.partitions:
                self._sent_before[place.topic, place.partition] = place.offset, place.epoch

    def begin(self, subscription: OpenSubscription) -> None:
        """Take over where the broker begins."""
        self._position.begin(subscription.partitions, subscription.shards)

    @property
    def looks_at_runs(self) -> bool:
        return self._position.is_by_partition or bool(self._sent_before)

    def unsent(self, batch: Batch) -> Batch | None:
        """The batch without the messages that an earlier stream sent. None: it sent them all."""
        if not self._sent_before:
            return batch
        rows: list[int] = []
        for run in batch.runs():
            key = (run.topic, run.partition)
            place = self._sent_before.get(key)
            first = run.row
            if place is not None:
                offset, epoch = place
                if epoch == run.epoch:
                    first += min(max(offset - run.base_offset, 0), run.count)
                if epoch != run.epoch or run.base_offset + run.count >= offset:
                    del self._sent_before[key]
            rows += range(first, run.row + run.count)
        return batch.take(rows) if rows else None

    def delivered(self, delivery: LiveDelivery, batches: Iterable[Batch] = ()) -> None:
        """Move behind a delivery that has been sent. Its batches are needed only where `looks_at_runs` is true."""
        journal, shard = delivery.shard.journal, delivery.shard.shard
        position = self._position
        if not position.is_by_partition:
            if not delivery.next_entry or journal == LIVE_JOURNAL:
                return
            self._within.clear()
        position.delivered(journal, shard, delivery.epoch, delivery.next_entry, batches)

    def delivered_rows(self, batch: Batch, end: int) -> None:
        """Move behind the rows before `end` of a batch: they have been sent."""
        position = self._position
        if position.is_by_partition:
            advance(position.partitions, _runs_before(batch, end))
        elif not position.awaits_last_values:  # last values come in no order
            advance(self._within, _runs_before(batch, end))

    def missed(self, gap: GapState) -> None:
        """Move behind messages that will not be sent."""
        self._position.missed(gap)

    def last_values_sent(self) -> None:
        self._position.awaits_last_values = False

    def pack(self) -> bytes:
        """The position as it is now."""
        position = self._position
        is_in_shards = not position.is_by_partition
        partitions = self._sent_before | self._within if is_in_shards else position.partitions
        return _encoder.encode(
            PackedPosition(
                _VERSION,
                self._digest,
                is_in_shards,
                not position.awaits_last_values,
                places_of(partitions),
                tuple(position.shards.values()),
            )
        )


def _runs_before(batch: Batch, end: int) -> Iterator[Run]:
    for run in batch.runs():
        if run.row + run.count <= end:
            yield run
        elif run.row < end:
            yield msgspec.structs.replace(run, count=end - run.row)


def _digest(patterns: Sequence[str]) -> int:
    return xxh3_64_intdigest("\n".join(sorted(set(patterns))).encode()) >> 1
