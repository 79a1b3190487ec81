"""The read position of a live reader, from which it resumes. The client and every listener use the same class.

Each protocol only encodes it: the client as the `Start` of a subscription, the HTTP listener as the id of an event, the
gRPC listener as opaque bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from runnel.formats.batch import Batch, Run
from runnel.formats.heads import PartitionPlace, ShardPlace, Start
from runnel.formats.wire import GapState
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern

PartitionOffsets: TypeAlias = dict[TopicPartition, tuple[int, int]]
"""The next offset of each topic-partition, and the epoch of that offset."""

_RESUME: Final = "resume"
_RESUME_LAST: Final = "resume_last"


class ReadPosition:
    """The position of the next message of everything that a reader's patterns match.

    A reader without wildcards has a position in each partition of its topics. A reader with wildcards has a position in
    each shard, because topics that its patterns match may still be created.
    """

    __slots__ = ("awaits_last_values", "is_by_partition", "partitions", "shards")

    def __init__(self, patterns: Iterable[str], start: Start) -> None:
        """A `start` that resumes contains the position. With other starts only the broker knows it: see `begin`."""
        self.is_by_partition: Final = all(Pattern(pattern).is_literal for pattern in patterns)
        self.awaits_last_values = start.kind in ("last", _RESUME_LAST)
        self.partitions: Final[PartitionOffsets] = {}
        self.shards: Final[dict[tuple[str, int], ShardPlace]] = {}
        if start.kind in (_RESUME, _RESUME_LAST):
            self.begin(start.partitions, start.shards)

    def begin(self, partitions: Iterable[PartitionPlace], shards: Iterable[ShardPlace]) -> None:
        """Take over the positions where the broker begins. Other partitions and shards stay unchanged."""
        for place in partitions:
            self.partitions[place.topic, place.partition] = place.offset, place.epoch
        for shard in shards:
            self.shards[shard.journal, shard.shard] = shard

    def delivered(
        self, journal: str, shard: int, epoch: int, next_entry: int, batches: Iterable[Batch]
    ) -> None:
        """Move past a delivery: by partition past its batches, or by shard to `next_entry` unless that is 0."""
        if self.is_by_partition:
            for batch in batches:
                advance(self.partitions, batch.runs())
        elif next_entry:
            self.shards[journal, shard] = ShardPlace(journal, shard, epoch, next_entry)

    def missed(self, gap: GapState) -> bool:
        """Move past messages that will not come. False: no position lies before the end of the gap."""
        key = (gap.topic, gap.partition)
        place = self.partitions.get(key)
        if place is None or gap.next_offset <= place[0]:
            return False
        self.partitions[key] = gap.next_offset, place[1]
        return True

    def resume(self) -> Start:
        """The `Start` of a subscription that continues from here."""
        return resume_at(
            places_of(self.partitions),
            tuple(self.shards.values()),
            awaits_last_values=self.awaits_last_values,
        )


def resume_at(
    partitions: Sequence[PartitionPlace], shards: Sequence[ShardPlace], *, awaits_last_values: bool
) -> Start:
    return Start(_RESUME_LAST if awaits_last_values else _RESUME, partitions, 0, shards)


def advance(partitions: PartitionOffsets, runs: Iterable[Run]) -> None:
    """Move past these runs.

    Adds partitions of topics that were created later. A partition of a new epoch counts from 1 again.
    """
    for run in runs:
        key, offset = (run.topic, run.partition), run.base_offset + run.count
        place = partitions.get(key)
        if place is None or offset > place[0] or run.epoch != place[1]:
            partitions[key] = offset, run.epoch


def places_of(partitions: PartitionOffsets) -> tuple[PartitionPlace, ...]:
    return tuple(
        PartitionPlace(topic, partition, offset, epoch)
        for (topic, partition), (offset, epoch) in partitions.items()
    )
