"""`LogTables`: what every store knows of its topics, cursors, subscriptions and terms, in memory. No files here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runnel.config import LimitSettings
from runnel.log.log import ShardId
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.definitions import DefinitionTable
from runnel.log.metadata.terms import TermTable
from runnel.log.metadata.topic_table import Partition, Topic, TopicTable
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies


class LogTables:
    """The tables of a store, and look-ups in them. The store's metadata changes them, its shards read them."""

    def __init__(
        self,
        limits: LimitSettings,
        policies: Policies,
        on_topic_made: Callable[[Topic], None],
        *,
        journal_shards: int = 1,
    ) -> None:
        self.topics = TopicTable(
            policies, limits.topics_max, on_topic_made, journal_shards=journal_shards
        )
        self.cursors = CursorTable(limits.cursors_max, self._shard_of)
        self.subscriptions = DefinitionTable(limits.durable_subscriptions_max)
        self.terms = TermTable()

    def find_partition(self, key: TopicPartition) -> Partition | None:
        topic = self.topics.find(key[0])
        if topic is None or key[1] >= len(topic.partitions):
            return None
        return topic.partitions[key[1]]

    def _shard_of(self, key: TopicPartition) -> ShardId | None:
        partition = self.find_partition(key)
        return None if partition is None else partition.shard

    def keeps_last_value(self, partition: Partition) -> bool:
        topic = self.topics.find(partition.key[0])
        return topic is not None and topic.policy.last_value

    def last_of(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, Partition]:
        """The partitions whose wanted message is the last one and is kept whatever its age."""
        return {
            key: partition
            for key, offset in wanted.items()
            if (partition := self.find_partition(key)) is not None
            and offset == partition.visible_next - 1
            and self.keeps_last_value(partition)
        }
