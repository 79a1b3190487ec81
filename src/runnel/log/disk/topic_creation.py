"""Records new topics in the catalogue. A batch is written only after its topics are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from runnel.config import Keep
from runnel.errors import ClientFault
from runnel.log.log import LogListener
from runnel.log.metadata.catalogue import Catalogue, PartitionAt
from runnel.log.metadata.catalogue_state import journal_records, topic_record
from runnel.log.metadata.topic_table import Topic, TopicTable, kept_elsewhere


class TopicCreation:
    """Holds new topics until they are in the catalogue."""

    def __init__(self, topics: TopicTable, catalogue: Catalogue, listener: LogListener) -> None:
        self._topics = topics
        self._catalogue = catalogue
        self._listener = listener
        self._made: list[Topic] = []  # by the current call
        self._unrecorded: dict[str, asyncio.Future[None]] = {}  # on their way to the catalogue
        self._recorded_journals: set[str] = (
            set()
        )  # in this process; a journal may be recorded again

    def on_made(self, topic: Topic) -> None:
        """Take a new topic of the topic table. ClientFault if its policy does not keep it on disk."""
        if topic.policy.keep is not Keep.DISK:
            self._topics.forget(topic)
            raise ClientFault(kept_elsewhere(topic, "on disk"))
        self._made.append(topic)
        self._listener.on_topic_made(topic.info())

    def record(self) -> None:
        """Record the topics of one call together: a batch may make thousands."""
        if not self._made:
            return
        topics, self._made = self._made, []
        # A topic that is made again hides messages under way to its predecessor. No other record says so.
        floors = [
            PartitionAt(*part.key, part.next_offset, part.floor)
            for topic in topics
            for part in topic.partitions
            if part.floor > 1
        ]
        journals = [
            journal
            for journal in journal_records(self._topics, topics)
            if journal.name not in self._recorded_journals
        ]
        recorded = self._catalogue.add_made(
            lambda: [*journals, *map(topic_record, topics), *floors]
        )
        self._unrecorded.update(dict.fromkeys((topic.name for topic in topics), recorded))

        def done(future: asyncio.Future[None]) -> None:
            for topic in topics:
                if self._unrecorded.get(topic.name) is future:
                    del self._unrecorded[topic.name]
                if future.exception() is not None:
                    self._topics.forget(topic)
                    self._listener.on_topic_deleted(topic.name)
            if future.exception() is None:
                self._recorded_journals.update(journal.name for journal in journals)

        recorded.add_done_callback(done)

    def unrecorded(self, names: Iterable[str]) -> list[asyncio.Future[None]]:
        """Futures that are done when these topics are recorded; none for topics recorded already."""
        if not self._unrecorded:
            return []
        waiting = map(self._unrecorded.get, names)
        return [future for future in dict.fromkeys(waiting) if future is not None]
