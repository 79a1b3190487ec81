"""Purges and deletes topics: once recorded, readers see no more of them, and retention frees the room later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from runnel.errors import UnknownTopicError
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.topic_creation import TopicCreation
from runnel.log.log import LogListener, ShardId
from runnel.log.metadata.records import PartitionAt, TopicDeleted
from runnel.log.metadata.shared_metadata import MetadataRecords
from runnel.log.metadata.topic_table import Partition, Topic, TopicTable


class TopicRemoval:
    """Hides messages by raising floors: readers get no message below its partition's floor.

    `shard` returns the shard that is served here, and raises MovedError if it is elsewhere; `find_shard` returns None.
    """

    def __init__(
        self,
        topics: TopicTable,
        metadata: MetadataRecords,
        creation: TopicCreation,
        shard: Callable[[ShardId], DiskShard],
        find_shard: Callable[[ShardId], DiskShard | None],
        listener: LogListener,
    ) -> None:
        self._topics = topics
        self._metadata = metadata
        self._creation = creation
        self._shard = shard
        self._find_shard = find_shard
        self._listener = listener

    async def purge(self, name: str, *, part_only: bool = False) -> None:
        """Hide all messages that are stored now. Each shard records it; a crash may leave it done in some of them.

        `part_only`: in the shards that are served here.
        """
        topic, shards = self._parts_of(name, part_only=part_only)
        floors: dict[DiskShard, list[tuple[Partition, int]]] = {}
        for partition, shard in zip(topic.partitions, shards, strict=True):
            if shard is None:
                continue
            floors.setdefault(shard, []).append((partition, partition.visible_next))
        waiting = [
            shard.catalogue.add(
                *(
                    PartitionAt(*part.key, floor, floor, topic.generation)
                    for part, floor in of_shard
                ),
                apply=partial(_hide, shard, of_shard),
            )
            for shard, of_shard in floors.items()
        ]
        for recorded in waiting:
            await recorded

    async def delete(self, name: str, *, part_only: bool = False) -> None:
        """Hide the topic and its messages, also those that are stored meanwhile: a new topic has another generation.

        `part_only`: some of its shards are served elsewhere. Their owners follow the record.
        """
        self._parts_of(name, part_only=part_only)
        for recorded in self._creation.unrecorded((name,)):  # the topic's own record comes first
            await asyncio.shield(recorded)
        self._parts_of(name, part_only=part_only)
        await self._metadata.add(TopicDeleted(name), apply=partial(self.apply_deletion, name))

    def apply_deletion(self, name: str) -> None:
        """The deletion of a topic has been recorded, here or by another log of the directory."""
        for partition in self._topics.delete(name):
            shard = self._find_shard(partition.shard)
            if shard is not None:
                shard.last_values.drop(partition.key)
                shard.hide()
        self._listener.on_topic_deleted(name)

    def _parts_of(self, name: str, *, part_only: bool) -> tuple[Topic, Sequence[DiskShard | None]]:
        """The topic, and the shard of each of its partitions; None if it is elsewhere, with `part_only`."""
        topic = self._topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        find = self._find_shard if part_only else self._shard
        return topic, [find(partition.shard) for partition in topic.partitions]


def _hide(shard: DiskShard, floors: Sequence[tuple[Partition, int]]) -> None:
    for partition, floor in floors:
        partition.floor = max(partition.floor, floor)
        shard.last_values.drop(partition.key)
    shard.hide()
