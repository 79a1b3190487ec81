"""The state that the records of metadata add up to, and its snapshot as records. No files here."""

from __future__ import annotations

from collections.abc import Iterable

from runnel.log.metadata import records
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.records import MetadataRecord
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.topics.policies import FixedPolicy, Policies


class MetadataState:
    """Puts records of metadata into the tables of a log. The tables' numbers of partitions belong to the shards."""

    def __init__(self, policies: Policies, tables: LogTables) -> None:
        self._policies = policies
        self._tables = tables
        self.epoch = 0  # the epochs of all shards are above it
        self.is_closed = False  # closed in good order, with no record since
        self.has_marks = False  # the file of synced marks must exist

    def apply_all(self, found: Iterable[MetadataRecord]) -> None:
        for record in found:
            self.apply(record)

    def apply(self, record: MetadataRecord) -> None:
        self.is_closed = isinstance(record, records.Closed)
        tables = self._tables
        match record:
            case records.JournalMade(name, _, shards):
                tables.topics.restore_journal(name, shards)
            case records.TopicMade(name, keep, partitions, journal, owner, generation):
                fixed = FixedPolicy(keep=keep, partitions=partitions, journal=journal)
                policy = self._policies.for_recorded(name, fixed)
                tables.topics.restore(name, policy, owner, generation)
            case records.TopicDeleted(name):
                tables.topics.delete(name)
            case records.CursorSet(cursor):
                tables.cursors.put(cursor)
            case records.CursorRemoved(name):
                tables.cursors.remove(name)
            case records.SubscriptionSet(name, content):
                tables.subscriptions.put(name, content)
            case records.SubscriptionRemoved(name):
                tables.subscriptions.remove(name)
            case records.TermTaken(producer, term):
                tables.terms.put(producer, term)
            case records.Opened(epoch, _, has_marks):
                self.epoch = max(self.epoch, epoch)
                self.has_marks = has_marks  # an older Runnel may have run since
            case records.Closed():
                pass

    def snapshot(self, now_ns: int) -> list[MetadataRecord]:
        """Records of everything that the metadata must have now.

        Runs in a worker beside the loop: each table is copied in one step before it is read.
        """
        tables = self._tables
        found: list[MetadataRecord] = [records.Opened(self.epoch, now_ns, self.has_marks)]
        topics = list(tables.topics)
        found += journal_records(tables.topics, topics)
        for topic in topics:
            found.append(topic_record(topic))
            if topic.is_deleted:
                found.append(records.TopicDeleted(topic.name))
        found += [records.TermTaken(*item) for item in tables.terms.items()]
        found += [records.CursorSet(cursor) for cursor in tables.cursors.all()]
        found += [records.SubscriptionSet(*item) for item in tables.subscriptions.all().items()]
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
    return records.TopicMade(
        topic.name, fixed.keep, fixed.partitions, fixed.journal, topic.owner, topic.generation
    )
