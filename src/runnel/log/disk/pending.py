"""`PendingBatch`, a batch between `append` and its sync, and the counters of a shard's writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from runnel.formats import block
from runnel.formats.envelope import Envelope
from runnel.log.log import Appended, Level
from runnel.log.metadata.topic_table import Partition


class PendingBatch:
    """A batch between `append` and its sync."""

    __slots__ = ("answers", "body", "encoded", "envelope", "partitions", "size", "unrecorded")

    def __init__(
        self,
        envelope: Envelope,
        encoded: bytes,
        body: bytes | memoryview,
        partitions: Sequence[Partition],
        unrecorded: Sequence[asyncio.Future[None]],
    ) -> None:
        self.envelope = envelope
        self.encoded = encoded
        self.body = body
        self.partitions = partitions
        self.unrecorded = unrecorded  # futures, done when its new topics are in the catalogue
        self.size = (
            block.HEADER_BYTES + len(encoded) + -len(encoded) % 8 + len(body) + -len(body) % 8
        )
        # Futures, and whether each answers a repetition. Empty: no publisher waits for the sync.
        self.answers: list[tuple[asyncio.Future[Appended], bool]] = []

    def answer(self, level: Level, *, is_repeated: bool) -> Appended:
        head = self.envelope
        return Appended(
            base_offsets=head.column64(head.base_offsets),
            entry=head.entry,
            epoch=int.from_bytes(head.epochs, "little"),
            receive_time_ns=int.from_bytes(head.receive_times, "little", signed=True),
            level=level,
            is_repeated=is_repeated,
        )


class WriteCounters:
    """Counts a shard's writes since it was opened."""

    __slots__ = (
        "bytes",
        "entries",
        "failed_batches",
        "messages",
        "sync_time_max_ns",
        "sync_time_ns",
        "syncs",
        "unknown_outcomes",
    )

    def __init__(self) -> None:
        self.entries = self.messages = self.bytes = self.failed_batches = 0
        self.syncs = self.sync_time_ns = self.sync_time_max_ns = 0
        self.unknown_outcomes = 0
