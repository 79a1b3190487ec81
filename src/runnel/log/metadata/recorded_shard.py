"""`RecordedShard`: what the catalogue of a shard says of it, and its snapshot as records. No files here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from runnel.log.metadata import records
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.records import PartitionAt, ShardAt, ShardRecord
from runnel.log.metadata.topic_table import Partition, Topic
from runnel.topics.names import TopicPartition


class RecordedShard(msgspec.Struct):
    """A shard by its catalogue: what was recorded before its last segments."""

    epoch: int = 0
    is_closed: bool = True  # in good order, with no record since; or nothing was ever recorded
    checkpoints: list[ShardAt] = []
    partitions: list[PartitionAt] = []
    generations: dict[TopicPartition, int] = {}  # the newest; 1 is left out
    last_values: dict[TopicPartition, bytes] = {}

    @classmethod
    def of(cls, found: Iterable[ShardRecord]) -> RecordedShard:
        shard = cls()
        for record in found:
            shard.apply(record)
        return shard

    def apply(self, record: ShardRecord) -> None:
        self.is_closed = isinstance(record, records.Closed)
        match record:
            case records.Opened(epoch) | records.Closed(epoch):
                self.epoch = max(self.epoch, epoch)
            case records.PartitionAt(topic, partition, _, _, generation):
                self.partitions.append(record)
                if generation > self.generations.get((topic, partition), 1):
                    self.generations[topic, partition] = generation
            case records.ShardAt():
                self.checkpoints.append(record)
            case records.LastValue(topic, partition, block):
                self.last_values[topic, partition] = block

    @property
    def next_entry(self) -> int:
        """Behind the last entry that the catalogue knows."""
        return max([checkpoint.next_entry for checkpoint in self.checkpoints], default=1)

    def apply_numbers(self, find: Callable[[TopicPartition], Partition]) -> None:
        """Put the recorded next offsets and floors into the partitions."""
        for at in self.partitions:
            partition = find((at.topic, at.partition))
            # The deletion of a topic also hides batches that are being stored, and may be lost then.
            partition.advance(max(at.next_offset, at.floor))
            partition.floor = max(partition.floor, at.floor)
        for checkpoint in self.checkpoints:
            for topic, number, next_offset in checkpoint.offsets:
                find((topic, number)).advance(next_offset)


def shard_snapshot(
    epoch: int,
    now_ns: int,
    at: ShardAt,
    partitions: Iterable[tuple[Topic, Partition]],
    last_values: LastValues,
) -> list[ShardRecord]:
    """Records of everything that the catalogue of a shard must know now. Only stored messages count.

    Runs in a worker beside the loop: each table is copied in one step before it is read.
    """
    found: list[ShardRecord] = [records.Opened(epoch, now_ns)] if epoch else []
    found += [
        PartitionAt(*part.key, part.visible_next, part.floor, topic.generation)
        for topic, part in partitions
        if part.visible_next > 1 or part.floor > 1 or topic.generation > 1
    ]
    found.append(at)
    found += [records.LastValue(*key, value) for key, value in last_values.items()]
    return found
