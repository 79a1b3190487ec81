"""The state that the catalogue's records add up to, and its snapshot as records. No files here."""

from __future__ import annotations

from collections.abc import Iterable

from runnel.log.log import ShardId
from runnel.log.metadata import catalogue as records
from runnel.log.metadata.catalogue import Record, ShardAt
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.definitions import DefinitionTable
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.topics.policies import FixedPolicy, Policies


class CatalogueState:
    """The recorded topics, cursors, subscriptions, last values and shard checkpoints, and the newest epoch."""

    def __init__(
        self,
        policies: Policies,
        topics: TopicTable,
        cursors: CursorTable,
        last_values: LastValues,
        subscriptions: DefinitionTable,
    ) -> None:
        self._policies = policies
        self.topics = topics
        self.cursors = cursors
        self.last_values = last_values
        self.subscriptions = subscriptions
        self.epoch = 0
        self.is_closed = False  # closed in good order, with no record since
        self.has_marks = False  # the file of synced marks must exist
        self.checkpoints: dict[ShardId, list[ShardAt]] = {}

    def apply_all(self, found: Iterable[Record]) -> None:
        for record in found:
            self.is_closed = isinstance(record, records.Closed)
            self._apply(record)

    def _apply(self, record: Record) -> None:
        match record:
            case records.JournalMade(name, _, shards):
                self.topics.restore_journal(name, shards)
            case records.TopicMade(name, keep, partitions, journal, owner):
                fixed = FixedPolicy(keep=keep, partitions=partitions, journal=journal)
                self.topics.restore(name, self._policies.for_recorded(name, fixed), owner)
            case records.TopicDeleted(name):
                self.topics.delete(name)
                self.last_values.forget(name)
            case records.PartitionAt(topic, partition, next_offset, floor):
                at = self.topics.recorded_partition(topic, partition)
                if at is not None:
                    at.advance(next_offset)
                    at.floor = max(at.floor, floor)
            case records.Opened(epoch, _, has_marks):
                self.epoch = max(self.epoch, epoch)
                self.has_marks = has_marks  # an older Runnel may have run since
            case records.ShardAt(journal, shard):
                self.checkpoints.setdefault(ShardId(journal, shard), []).append(record)
                for topic, partition, next_offset in record.offsets:
                    at = self.topics.recorded_partition(topic, partition)
                    if at is not None:
                        at.advance(next_offset)
            case records.CursorSet(cursor):
                self.cursors.put(cursor)
            case records.CursorRemoved(name):
                self.cursors.remove(name)
            case records.SubscriptionSet(name, content):
                self.subscriptions.put(name, content)
            case records.SubscriptionRemoved(name):
                self.subscriptions.remove(name)
            case records.LastValue(topic, partition, block):
                self.last_values.put((topic, partition), block)
            case records.Closed():
                pass

    def snapshot(self, now_ns: int, shards: Iterable[ShardAt]) -> list[Record]:
        """Records of everything that the catalogue must know now. Only stored messages count.

        Runs in a worker beside the loop: each table is copied in one step before it is read.
        """
        found: list[Record] = [records.Opened(self.epoch, now_ns, self.has_marks)]
        topics = list(self.topics)
        found += journal_records(self.topics, topics)
        for topic in topics:
            found.append(topic_record(topic))
            found += [
                records.PartitionAt(*part.key, part.visible_next, part.floor)
                for part in topic.partitions
                if part.visible_next > 1 or part.floor > 1
            ]
            if topic.is_deleted:
                found.append(records.TopicDeleted(topic.name))
        found += shards
        found += [records.CursorSet(cursor) for cursor in self.cursors.all()]
        found += [records.SubscriptionSet(*item) for item in self.subscriptions.all().items()]
        found += [records.LastValue(*key, value) for key, value in self.last_values.items()]
        return found


def journal_records(table: TopicTable, topics: Iterable[Topic]) -> list[records.JournalMade]:
    """The records of the journals of these topics, which come before them. A journal with one shard needs none."""
    keeps = {topic.policy.journal: topic.policy.keep for topic in topics}
    return [
        records.JournalMade(journal, keep, count)
        for journal, keep in keeps.items()
        if (count := table.shard_count(journal)) is not None and count > 1
    ]


def topic_record(topic: Topic) -> records.TopicMade:
    """The record of a topic's fixed policy."""
    fixed = topic.policy.fixed
    return records.TopicMade(topic.name, fixed.keep, fixed.partitions, fixed.journal, topic.owner)
