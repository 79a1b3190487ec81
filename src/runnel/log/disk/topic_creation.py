"""Records new topics in the metadata. A batch is written only after its topics are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from runnel.config import Keep
from runnel.errors import ClientFault
from runnel.log.disk.shard import DiskShard
from runnel.log.log import LogListener, ShardId
from runnel.log.metadata.metadata_state import journal_records, topic_record
from runnel.log.metadata.records import JournalMade, MetadataRecord, PartitionAt, TopicMade
from runnel.log.metadata.topic_table import Topic, TopicTable, kept_elsewhere
from runnel.platform.tasks import OwnedTasks

AddMade = Callable[[Callable[[], Sequence[MetadataRecord]]], asyncio.Future[None]]


class TopicCreation:
    """Holds new topics until they are recorded. `find_shard` returns a shard unless another log may serve it."""

    def __init__(
        self,
        topics: TopicTable,
        add_made: AddMade,
        find_shard: Callable[[ShardId], DiskShard | None],
        tasks: OwnedTasks,
        listener: LogListener,
    ) -> None:
        self._topics = topics
        self._add_made = add_made
        self._find_shard = find_shard
        self._tasks = tasks
        self._listener = listener
        self._made: list[Topic] = []  # by the current call
        self._unrecorded: dict[str, asyncio.Future[None]] = {}  # on their way to the metadata
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
        journals = [
            journal
            for journal in journal_records(self._topics, topics)
            if journal.name not in self._recorded_journals
        ]
        again = [topic for topic in topics if topic.generation > 1]
        recorded: asyncio.Future[None]
        if again:
            recorded = self._tasks.start_awaited(self._record_again(again, topics, journals))
        else:
            recorded = self._record(topics, journals)
        self._hold(recorded, topics)

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._recorded_journals.update(journal.name for journal in journals)
                return
            for topic in topics:
                self._forget(topic)

        recorded.add_done_callback(done)

    def _record(
        self, topics: Sequence[Topic], journals: Sequence[JournalMade]
    ) -> asyncio.Future[None]:
        return self._add_made(lambda: [*journals, *map(topic_record, topics)])

    def give_way(self, record: TopicMade) -> None:
        """Forget a topic on its way to the metadata if another log has recorded it first, with another policy."""
        topic = self._topics.recorded(record.name)
        if topic is None or topic.generation != record.generation:
            return
        mine = topic_record(topic)
        if (mine.keep, mine.partitions, mine.journal) != (
            record.keep,
            record.partitions,
            record.journal,
        ):
            self._forget(topic)

    def _forget(self, topic: Topic) -> None:
        if self._topics.recorded(topic.name) is topic:  # it has not given way before
            self._topics.forget(topic)
            self._listener.on_topic_deleted(topic.name)

    def follow(self, topic: Topic) -> None:
        """Another log of the directory has recorded this topic, which is in the table now."""
        if topic.generation > 1:
            self._hold(self._tasks.start_awaited(self.record_generations([topic])), [topic])
        self._listener.on_topic_made(topic.info())

    def _hold(self, recorded: asyncio.Future[None], topics: Sequence[Topic]) -> None:
        """Keep batches of these topics waiting until this is done."""
        self._unrecorded.update(dict.fromkeys((topic.name for topic in topics), recorded))

        def done(future: asyncio.Future[None]) -> None:
            for topic in topics:
                if self._unrecorded.get(topic.name) is future:
                    del self._unrecorded[topic.name]

        recorded.add_done_callback(done)

    async def _record_again(
        self, again: Sequence[Topic], topics: Sequence[Topic], journals: Sequence[JournalMade]
    ) -> None:
        await self.record_generations(again)
        await self._record(topics, journals)

    async def record_generations(self, again: Iterable[Topic]) -> None:
        """First the shards: once they know the generation, messages of the topic before it stay below the floor.

        A shard that is elsewhere learns it from the log that serves it, or when it is loaded.
        """
        floors: dict[DiskShard, list[PartitionAt]] = {}
        for topic in again:
            for part in topic.partitions:
                shard = self._find_shard(part.shard)
                if shard is not None:
                    # Only what is stored: batches of the new topic wait for this record, and may be lost.
                    at = PartitionAt(*part.key, part.visible_next, part.floor, topic.generation)
                    floors.setdefault(shard, []).append(at)
        waiting = [shard.catalogue.add(*records) for shard, records in floors.items()]
        for recorded in waiting:
            await recorded

    def unrecorded(self, names: Iterable[str]) -> list[asyncio.Future[None]]:
        """Futures that are done when these topics are recorded; none for topics recorded already."""
        if not self._unrecorded:
            return []
        waiting = map(self._unrecorded.get, names)
        return [future for future in dict.fromkeys(waiting) if future is not None]
