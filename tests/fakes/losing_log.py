"""Brokers whose log on disk loses shards and gets them back while another log of the directory serves them.

What goes and comes is the log's own `release`, `drop` and `acquire`, files and all. The other owner is a second log
object on the same directory, with a copy of the broker's metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from runnel.broker import opening
from runnel.errors import MovedError, ReadOnlyError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Appended, NullListener, ShardId
from runnel.log.metadata.records import MetadataRecord
from runnel.log.metadata.shared_metadata import Apply, Follow
from runnel.topics.names import TopicPartition


class LosingDiskLog(DiskLog):
    """A `DiskLog` whose shards go without warning only when nothing is queued, so that models know what is stored.

    A shard in which a sync has failed does not go at all: nobody knows what is stored there until it was reopened.
    """

    @property
    def away(self) -> Collection[ShardId]:
        """The shards that are not served here."""
        return list(self._owned._given_up)

    async def drop(self, shard: ShardId) -> None:
        known = self._owned.find(shard)
        while known is not None and known.statistics().queued_batches:
            with suppress(RunnelError):
                await known.writer.sync()
        if known is not None and known.writer.is_read_only:
            raise ReadOnlyError(f"shard {shard} has to be reopened before it goes")
        await super().drop(shard)

    async def store_elsewhere(self, batch: Batch) -> Appended:
        """What the shard's other owner stores during a term of its own. The topics exist."""
        topic, partition = (
            batch.envelope.topics[0],
            batch.envelope.column32(batch.envelope.partitions)[0],
        )
        shard = self.metadata.topics.shard_of(topic, partition)
        async with self._other() as other:
            await other.acquire(shard)
            stored = await other.append(batch)
            await other.release(shard)
        return stored

    @asynccontextmanager
    async def _other(self) -> AsyncIterator[DiskLog]:
        other = await DiskLog.open(
            self._directory,
            settings=self._settings,
            policies=self._policies,
            disk=self._disk,
            clock=self._clock,
            workers=self._workers,
            listener=NullListener(),
            shared=MetadataCopy(self._state.snapshot(self._clock.time_ns())),
        )
        try:
            yield other
        finally:
            await other.close()


class MetadataCopy:
    """A `SharedMetadata` for a log that changes no metadata: what another log knew when it was opened."""

    member = "other"

    def __init__(self, records: Sequence[MetadataRecord]) -> None:
        self._records = records

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        return self._records

    def add(
        self,
        *records: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,
    ) -> asyncio.Future[None]:
        raise AssertionError(f"the other owner changes metadata: {records}")

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        return self.add(*make())

    async def take_term(self, producer: str, term: int) -> int:
        raise AssertionError(f"{producer} takes a term at the other owner")

    async def pause(self) -> None:
        """Nothing is written."""

    def resume(self) -> None:
        """Nothing is written."""

    async def close(self, *records: MetadataRecord) -> None:
        """Nothing is written."""

    def release(self) -> None:
        """Nothing is held."""


@contextmanager
def losing_logs() -> Iterator[None]:
    """Brokers that are opened meanwhile have logs on disk that can lose their shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "DiskLog", LosingDiskLog)
        yield


def is_away(log: Any, key: TopicPartition) -> bool:
    """Whether the shard of a topic-partition was lost."""
    try:
        log.shard(log.metadata.topics.shard_of(*key))
    except MovedError:
        return True
    except UnknownTopicError:
        pass
    return False
