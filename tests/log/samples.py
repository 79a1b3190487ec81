"""Small batches to publish, and what was read of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.log import EntryPage, MessageLog, PartitionPage, Store, Trimmed


def batch(
    *runs: tuple[str, Sequence[bytes]] | tuple[str, Sequence[bytes], int],
    producer: str | None = None,
    term: int = 0,
    number: int = 0,
) -> Batch:
    """Runs of a topic, its payloads, and a partition if it is not 0."""
    messages = [
        Message(topic, payload, partition=partition[0] if partition else 0)
        for topic, payloads, *partition in runs
        for payload in payloads
    ]
    return Batch.from_messages(messages, producer=producer, term=term, number=number)


def one(topic: str, *payloads: bytes, partition: int = 0) -> Batch:
    return batch((topic, payloads, partition))


def numbered(
    producer: str, number: int, *, term: int = 0, topic: str = "a", payload: bytes = b"x"
) -> Batch:
    """A named publisher's batch of one message."""
    return batch((topic, [payload]), producer=producer, term=term, number=number)


def read_payloads(page: PartitionPage | EntryPage) -> list[bytes]:
    return [message.payload for found in page.found for message in found.wanted()]


def read_offsets(page: PartitionPage | EntryPage) -> list[int]:
    return [message.offset for found in page.found for message in found.wanted()]


def read_topics(page: PartitionPage | EntryPage) -> list[str]:
    return [message.topic for found in page.found for message in found.wanted()]


async def read_all(log: MessageLog, topic: str, offset: int = 1) -> list[Message]:
    """Everything that a partition has from an offset on."""
    messages: list[Message] = []
    while (page := await log.read(topic, 0, offset)).found or page.gaps:
        messages += [message for found in page.found for message in found.wanted()]
        offset = page.next_offset
    return messages


async def trim_log(log: Store) -> Trimmed:
    """One round of retention over all shards."""
    return Trimmed.of([await log.trim_shard(shard) for shard in log.shards()])


async def last_message(log: Store, topic: str, partition: int) -> Batch | None:
    """The last message of a partition, if the log still holds it or its topic keeps last values."""
    shard = log.metadata.topics.shard_of(topic, partition)
    offset = (await log.bounds(topic, partition)).next_offset - 1
    async with aclosing(log.messages_at(shard, {(topic, partition): offset})) as found:
        async for chosen in found:
            for each in chosen:
                return each.taken()
    return None
