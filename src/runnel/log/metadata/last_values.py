"""Last messages that are kept beyond retention, by partition, each a block of its own. No files here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing

from runnel.config import LogSettings
from runnel.formats.batch import Batch
from runnel.log.log import Chosen
from runnel.log.metadata.topic_table import Partition
from runnel.topics.names import TopicPartition


class LastValues:
    """At most one message a partition; whoever adds one has looked at its size."""

    def __init__(self) -> None:
        self._blocks: dict[TopicPartition, bytes] = {}

    def put(self, key: TopicPartition, block: bytes) -> None:
        self._blocks[key] = block

    def at(self, partition: Partition, offset: int) -> Batch | None:
        """The partition's message with this offset, unless it was purged, or another one is kept.

        The one that is kept need not be the last: a later one may have been too large, or be damaged.
        """
        block = self._blocks.get(partition.key)
        if not block or offset < partition.floor:
            return None
        batch = Batch.unpack(block)
        return batch if batch.runs()[0].base_offset == offset else None

    def forget(self, topic: str) -> None:
        for key in [key for key in self._blocks if key[0] == topic]:
            del self._blocks[key]

    def items(self) -> Iterator[tuple[TopicPartition, bytes]]:
        return iter(list(self._blocks.items()))


def fits(message: Batch, settings: LogSettings) -> bool:
    """Whether a message is small enough to be kept beyond retention."""
    return message.envelope.body_bytes <= settings.last_value_bytes_max


def singles(batch: Batch) -> Iterator[Batch]:
    """Each message as a batch of its own. By halves: a cut costs as much as the runs of what it is cut from."""
    if len(batch) == 1:
        yield batch
    else:
        half = len(batch) // 2
        yield from singles(batch.slice(0, half))
        yield from singles(batch.slice(half))


async def only(found: AsyncGenerator[Sequence[Chosen], None]) -> Batch | None:
    """The message, where a single one was asked for; None if it is not there."""
    async with aclosing(found):
        async for chosen in found:
            for each in chosen:
                return each.taken()
    return None


def messages_of(
    batch: Batch, wanted: Mapping[TopicPartition, int]
) -> Iterator[tuple[TopicPartition, Batch]]:
    """One message a partition, by its offset, each as a batch of its own; without those that are not in this one."""
    rows: dict[int, TopicPartition] = {}
    begin = 0
    for run in batch.runs():
        key = (run.topic, run.partition)
        row = wanted.get(key, -1) - run.base_offset
        if 0 <= row < run.count:
            rows[begin + row] = key
        begin += run.count
    if rows:
        yield from zip(rows.values(), singles(batch.take(list(rows))), strict=True)
