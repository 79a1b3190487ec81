"""`FormatOne`: what the one catalogue of a directory of format 1 says. No files here."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from runnel.log.log import ShardId
from runnel.log.metadata import records
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.metadata_state import MetadataState
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.records import Record, ShardAt
from runnel.topics.names import TopicPartition


class FormatOne:
    """Puts the records of an old catalogue into the tables, numbers of partitions included, in their order."""

    def __init__(self, state: MetadataState, tables: LogTables) -> None:
        self._state = state
        self._tables = tables
        self._checkpoints: dict[ShardId, list[ShardAt]] = {}
        self._last_values: dict[TopicPartition, bytes] = {}

    def apply_all(self, found: Iterable[Record]) -> None:
        topics = self._tables.topics
        for record in found:
            match record:
                case records.PartitionAt(topic, partition, next_offset, floor):
                    at = topics.recorded_partition(topic, partition)
                    if at is not None:
                        at.advance(next_offset)
                        at.floor = max(at.floor, floor)
                case records.ShardAt(journal, shard, offsets=offsets):
                    for topic, partition, next_offset in offsets:
                        at = topics.recorded_partition(topic, partition)
                        if at is not None:
                            at.advance(next_offset)
                    without = msgspec.structs.replace(record, offsets=[])
                    self._checkpoints.setdefault(ShardId(journal, shard), []).append(without)
                case records.LastValue(topic, partition, block):
                    self._last_values[topic, partition] = block
                case _:
                    if isinstance(record, records.TopicDeleted):
                        self._forget_last_values(record.name)
                    self._state.apply(record)
                    continue
            self._state.is_closed = False

    def _forget_last_values(self, topic: str) -> None:
        for key in [key for key in self._last_values if key[0] == topic]:
            del self._last_values[key]

    @property
    def shards(self) -> list[ShardId]:
        """The shards that the catalogue knows."""
        return list(self._checkpoints)

    def recorded(self, *, is_closed: bool) -> dict[ShardId, RecordedShard]:
        """Each shard with something to record, as its own catalogue will have it."""
        found: dict[ShardId, RecordedShard] = {}

        def of(shard: ShardId) -> RecordedShard:
            known = found.get(shard)
            if known is None:
                known = found[shard] = RecordedShard(self._state.epoch, is_closed)
            return known

        for shard, checkpoints in self._checkpoints.items():
            of(shard).checkpoints += checkpoints
        for key, block in self._last_values.items():
            partition = self._tables.topics.recorded_partition(*key)
            if partition is not None:
                of(partition.shard).last_values[key] = block
        return found

    def take_terms(self) -> None:
        """Let the terms of named publishers begin at the highest that any shard has seen."""
        for checkpoints in self._checkpoints.values():
            for checkpoint in checkpoints:
                for producer in checkpoint.producers:
                    self._tables.terms.put(producer.producer, producer.term)
