"""Purges and deletes topics: once recorded, readers see no more of them, and retention frees the room later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from runnel.errors import Unavailable, UnknownTopicError
from runnel.log.disk.shard import DiskShard
from runnel.log.log import LogListener, ShardId
from runnel.log.metadata.catalogue import Catalogue, PartitionAt, TopicDeleted
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.topic_table import Partition, TopicTable


class TopicRemoval:
    """Hides messages by raising floors: readers get no message below its partition's floor."""

    def __init__(
        self,
        topics: TopicTable,
        last_values: LastValues,
        catalogue: Catalogue,
        shard: Callable[[ShardId], DiskShard],
        listener: LogListener,
    ) -> None:
        self._topics = topics
        self._last_values = last_values
        self._catalogue = catalogue
        self._shard = shard
        self._listener = listener

    def hide_again(self, shards: Mapping[ShardId, DiskShard]) -> None:
        """After opening: notify the shards in which the catalogue says that messages are hidden."""
        for topic in self._topics:
            for partition in topic.partitions:
                if topic.is_deleted or partition.floor > 1:
                    shard = shards.get(partition.shard)
                    if shard is not None:
                        shard.hide()

    async def purge(self, name: str) -> None:
        """Hide all messages that are stored now."""
        floors, hide = self._prepare_hiding(name)
        await self._catalogue.add(*floors, apply=hide)

    async def delete(self, name: str) -> None:
        """Hide the topic and its messages."""
        floors, hide = self._prepare_hiding(name)
        deleted: Sequence[Partition] = ()

        def apply() -> None:
            nonlocal deleted
            hide()
            deleted = self._topics.delete(name)
            self._listener.on_topic_deleted(name)

        await self._catalogue.add(*floors, TopicDeleted(name), apply=apply)
        # Messages stored meanwhile belong to the deleted topic too. Only its floors say so.
        ends = [PartitionAt(*part.key, part.floor, part.floor) for part in deleted]
        late = [end for end in ends if end not in floors]
        if late:
            with suppress(Unavailable):  # the topic is deleted; a snapshot records the floors again
                await self._catalogue.add(*late)

    def _prepare_hiding(self, name: str) -> tuple[list[PartitionAt], Callable[[], None]]:
        """The records that hide a topic's visible messages, and the function that applies them once stored."""
        topic = self._topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        floors = [(partition, partition.visible_next) for partition in topic.partitions]

        def apply() -> None:
            for partition, floor in floors:
                partition.floor = max(partition.floor, floor)
                self._shard(partition.shard).hide()
            self._last_values.forget(name)

        return [PartitionAt(*part.key, floor, floor) for part, floor in floors], apply
