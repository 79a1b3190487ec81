"""Last messages that are kept beyond retention, by partition, each a block of its own. No files here."""

from __future__ import annotations

from collections.abc import Iterator

from runnel.config import LogSettings
from runnel.formats.batch import Batch
from runnel.log.index import Key
from runnel.log.topic_table import Partition


class LastValues:
    """At most one message a partition; whoever adds one has looked at its size."""

    def __init__(self) -> None:
        self._blocks: dict[Key, bytes] = {}

    def put(self, key: Key, block: bytes) -> None:
        self._blocks[key] = block

    def of(self, partition: Partition) -> Batch | None:
        """The partition's last message, unless it was purged or is not the last any more.

        A later one may have been too large to be kept, or be damaged: then nothing is known of it, and
        an earlier message is not an answer.
        """
        block = self._blocks.get(partition.key)
        if not block:
            return None
        batch = Batch.unpack(block)
        offset = batch.runs()[0].base_offset
        is_last = offset == partition.visible_next - 1 and offset >= partition.floor
        return batch if is_last else None

    def forget(self, topic: str) -> None:
        for key in [key for key in self._blocks if key[0] == topic]:
            del self._blocks[key]

    def items(self) -> Iterator[tuple[Key, bytes]]:
        return iter(list(self._blocks.items()))


def fits(message: Batch, settings: LogSettings) -> bool:
    """Whether a message is small enough to be kept beyond retention."""
    return message.envelope.body_bytes <= settings.last_value_bytes_max


def one_message(batch: Batch, key: Key, offset: int) -> Batch | None:
    """The message with this offset as a batch of its own; None if the batch does not have it."""
    begin = 0
    for run in batch.runs():
        row = offset - run.base_offset
        if (run.topic, run.partition) == key and 0 <= row < run.count:
            return batch.slice(begin + row, begin + row + 1)
        begin += run.count
    return None
