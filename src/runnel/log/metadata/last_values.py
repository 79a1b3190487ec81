"""Last messages that are kept beyond retention, by partition, each as its own block. No files here."""

from __future__ import annotations

from collections.abc import Iterator

from runnel.config import LogSettings
from runnel.formats.batch import Batch
from runnel.log.metadata.topic_table import Partition
from runnel.topics.names import TopicPartition


class LastValues:
    """At most one message per partition. The caller of `put` has checked its size."""

    def __init__(self) -> None:
        self._blocks: dict[TopicPartition, bytes] = {}

    def put(self, key: TopicPartition, block: bytes) -> None:
        self._blocks[key] = block

    def at(self, partition: Partition, offset: int) -> Batch | None:
        """The partition's message with this offset, unless it was purged or another message is kept.

        The kept message need not be the last one: a later message may be too large or damaged.
        """
        block = self._blocks.get(partition.key)
        if not block or offset < partition.floor:
            return None
        batch = Batch.unpack(block)
        return batch if batch.runs()[0].base_offset == offset else None

    def drop(self, key: TopicPartition) -> None:
        self._blocks.pop(key, None)

    def forget(self, topic: str) -> None:
        for key in [key for key in self._blocks if key[0] == topic]:
            del self._blocks[key]

    def items(self) -> Iterator[tuple[TopicPartition, bytes]]:
        return iter(list(self._blocks.items()))


def fits(message: Batch, settings: LogSettings) -> bool:
    """Whether a message is small enough to be kept beyond retention."""
    return message.envelope.body_bytes <= settings.last_value_bytes_max
