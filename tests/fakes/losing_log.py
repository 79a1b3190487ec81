"""A log on disk that can lose its shards and get them back, within one process and without the cost of recovery.

It is the real one, but for this: a shard that is lost stays open and hidden. Nobody is told what is stored in it, and
`append_elsewhere` stores messages there, as another owner does. State journals are closed and read anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from runnel.broker import opening
from runnel.errors import ClosedError, MovedError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.shard import DiskShard
from runnel.log.log import (
    Appended,
    Level,
    LogListener,
    LogTopic,
    OwnedShard,
    ShardId,
    VisibleBatch,
)
from runnel.log.metadata.catalogue import Record
from runnel.log.metadata.state_journal import StateJournal
from runnel.log.shard_view import ShardView, moved
from runnel.topics.names import TopicPartition


class _Listener:
    """Passes on what happens in shards that are here."""

    def __init__(self, listener: LogListener, hidden: dict[ShardId, DiskShard]) -> None:
        self._listener = listener
        self._hidden = hidden

    def on_stored(self, shard: ShardId, batches: Sequence[VisibleBatch]) -> None:
        if shard not in self._hidden:
            self._listener.on_stored(shard, batches)

    def on_synced(self, shard: ShardId, took_ns: int) -> None:
        self._listener.on_synced(shard, took_ns)

    def on_topic_made(self, topic: LogTopic) -> None:
        self._listener.on_topic_made(topic)

    def on_topic_deleted(self, name: str) -> None:
        self._listener.on_topic_deleted(name)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        self._listener.on_shard_acquired(shard)

    async def before_release(self, shard: OwnedShard) -> None:
        await self._listener.before_release(shard)

    def on_shard_released(self, shard: OwnedShard) -> None:
        self._listener.on_shard_released(shard)


class LosingDiskLog(DiskLog):
    """A `DiskLog` with the methods of `ShardOwnership`."""

    def __init__(self, *parts: Any) -> None:
        self._hidden: dict[ShardId, DiskShard] = {}
        super().__init__(*parts)
        self._listener = _Listener(self._listener, self._hidden)  # of the shards, made later

    # --- Ownership ---

    async def acquire(self, shard: ShardId) -> ShardView:
        self._check_open()
        if shard in self._hidden:
            journal = self._states.of(shard)
            if self._states._was_made(self._states._folder(shard)):
                await self._workers.submit(journal.open)
            self._shards[shard] = self._hidden.pop(shard)
            self._listener.on_shard_acquired(self.shard(shard))
        return self.shard(shard)

    async def release(self, shard: ShardId) -> None:
        view = self.shard(shard)
        await self._listener.before_release(view)
        journal = await self._end(shard, view)
        if journal is not None:
            await journal.close()

    async def drop(self, shard: ShardId) -> None:
        journal = await self._end(shard, self.shard(shard))
        if journal is not None:  # a write that has begun may end
            await journal.pause()
            journal.release()

    async def _end(self, shard: ShardId, view: ShardView) -> StateJournal | None:
        known = self._shards[shard]
        while known.statistics().queued_batches:
            with suppress(RunnelError):
                await known.writer.sync()
        if self._shards.get(shard) is not known:
            raise ClosedError("the log is closed")
        del self._shards[shard], self._views[shard]
        self._hidden[shard] = known
        view.end()
        journal = self._states._journals.pop(shard, None)
        self._listener.on_shard_released(view)
        return journal

    def append_elsewhere(self, batch: Batch) -> asyncio.Future[Appended]:
        """What the shard's other owner stores. The topics exist."""
        partitions = self._topics.resolve(batch.envelope, None, None)
        return self._hidden[partitions[0].shard].append(batch, partitions, Level.STORED, ())

    # --- What is hidden ---

    def _shard(self, shard_id: ShardId) -> DiskShard:
        if shard_id in self._hidden:
            raise moved(shard_id)
        return super()._shard(shard_id)

    async def wait_room(self, shard: ShardId) -> None:
        if shard in self._hidden:
            raise moved(shard)
        await super().wait_room(shard)

    async def is_still_mine(self, shard: ShardId) -> bool:
        return shard not in self._hidden and await super().is_still_mine(shard)

    def _snapshot(self) -> list[Record]:
        shown = self._shards
        self._shards = shown | self._hidden
        try:
            return super()._snapshot()
        finally:
            self._shards = shown

    async def close(self) -> None:
        self._shards |= self._hidden
        self._hidden.clear()
        await super().close()


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
