"""Fetches stored messages of one partition from an offset or a time on, and waits for the first if asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from runnel.broker.live.feeds import damage_gap, wanted_from
from runnel.broker.stores import Stores, moved, owned_shard
from runnel.config import BrokerSettings
from runnel.errors import BusyError, ClientFault, MovedError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.formats.wire import GapState
from runnel.log.log import OwnedShard, Store
from runnel.platform.clock import Clock
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition


class FetchRequest(msgspec.Struct, frozen=True):
    """Asks for messages of one partition from an offset or a time on; without either, from the first one stored."""

    topic: str
    partition: int | None = None  # may be left out if the topic has one partition
    offset: int | None = None
    time_ns: int | None = None
    messages_max: int = 0  # 0: as many as fit into `bytes_max`
    bytes_max: int = 2**20
    wait_ns: int = 0
    """How long to wait for a message if there is none."""
    while_waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """The fetch waits within this context, and holds nothing meanwhile."""


class FetchResult(msgspec.Struct, frozen=True):
    """Batches of one partition in order, exactly from the requested offset on, and the next offset to fetch."""

    batches: Sequence[Batch]
    next_offset: int
    first_offset: int
    end_offset: int
    gaps: Sequence[GapState] = ()

    @property
    def messages(self) -> int:
        return sum(map(len, self.batches))


class Fetcher:
    """Answers fetches, and keeps the fetches that wait for a message."""

    def __init__(
        self,
        stores: Stores,
        settings: BrokerSettings,
        clock: Clock,
        workers: Workers,
        bytes_max: int,
    ) -> None:
        self._stores = stores
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._bytes_max = bytes_max
        self._waiting: dict[TopicPartition, set[asyncio.Future[MovedError | None]]] = {}
        self._waiting_count = 0

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    def on_stored(self, envelope: Envelope) -> None:
        """Messages have become visible: wake the fetches that wait for them."""
        if not self._waiting:
            return
        for key in zip(envelope.topics, envelope.column32(envelope.partitions), strict=True):
            for future in self._waiting.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    def on_shard_released(self, shard: OwnedShard) -> None:
        """The shard has gone: fetches that wait for its messages fail as MovedError."""
        for key in [key for key in self._waiting if self._stores.has_away(key[0], shard.id)]:
            log = self._stores.log_of(key[0])
            if log is not None and log.metadata.topics.shard_of(*key) == shard.id:
                for future in self._waiting.pop(key):
                    if not future.done():
                        future.set_result(moved(shard.id))

    async def fetch(self, request: FetchRequest) -> FetchResult:
        log = self._stores.existing(request.topic)
        key = (request.topic, _partition(log, request.topic, request.partition))
        offset = request.offset
        if offset is not None and request.time_ns is not None:
            raise ClientFault("a fetch begins at an offset or at a time, not at both")
        if offset is None:
            offset = (
                (await log.bounds(*key)).first_offset
                if request.time_ns is None
                else await log.offset_at(*key, request.time_ns)
            )
        messages_max = request.messages_max
        bytes_max = max(1, min(request.bytes_max, self._bytes_max))
        fetched = await self._read(log, key, offset, messages_max, bytes_max)
        if not fetched.batches and request.wait_ns > 0:
            async with request.while_waiting():
                wait_ns = min(request.wait_ns, self._settings.fetch_wait_max_ns)
                await self._wait(log, key, fetched.next_offset, wait_ns)
            fetched = await self._read(log, key, fetched.next_offset, messages_max, bytes_max)
        return fetched

    async def _read(
        self, log: Store, key: TopicPartition, offset: int, messages_max: int, bytes_max: int
    ) -> FetchResult:
        batches: list[Batch] = []
        gaps: list[GapState] = []
        while True:  # a page may be empty, because its messages are not served any more, and still not be the last
            page = await log.read(*key, offset, bytes_max=bytes_max)
            batches += [await wanted_from(found, offset, self._workers) for found in page.found]
            gaps += [damage_gap(gap, key, gap.first_offset, gap.next_offset) for gap in page.gaps]
            if batches or page.next_offset == offset:
                break
            offset = page.next_offset
        bounds = await log.bounds(*key)
        next_offset = page.next_offset
        if messages_max:
            batches = _first(batches, messages_max)
            if batches:
                last = batches[-1].runs()[-1]
                next_offset = min(next_offset, last.base_offset + last.count)
                gaps = [gap for gap in gaps if gap.first_offset < next_offset]
        return FetchResult(batches, next_offset, bounds.first_offset, bounds.next_offset, gaps)

    async def _wait(self, log: Store, key: TopicPartition, offset: int, wait_ns: int) -> None:
        """Wait until a message of the partition is stored, or the time is over. MovedError if its shard goes."""
        # The shard may have gone, or have another message, since the partition was read.
        if owned_shard(log, key).next_offset(*key) > offset:
            return
        if self._waiting_count >= self._settings.fetches_waiting_max:
            raise BusyError(
                f"{self._waiting_count} fetches wait for messages already, as many as "
                "broker.fetches_waiting_max allows"
            )
        arrival: asyncio.Future[MovedError | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(arrival)
        self._waiting_count += 1
        timeout = asyncio.ensure_future(self._clock.sleep(wait_ns / 1e9))
        try:
            await asyncio.wait((arrival, timeout), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timeout.cancel()
            self._waiting_count -= 1
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(arrival)
                if not waiting:
                    del self._waiting[key]
        if arrival.done() and (error := arrival.result()) is not None:
            raise error


def _partition(log: Store, topic: str, partition: int | None) -> int:
    if partition is not None:
        return partition
    count = log.metadata.topics.policy(topic).partitions
    if count > 1:
        raise ClientFault(f"topic {topic!r} has {count} partitions: name one of 0 to {count - 1}")
    return 0


def _first(batches: Sequence[Batch], messages_max: int) -> list[Batch]:
    first: list[Batch] = []
    left = messages_max
    for batch in batches:
        if left <= 0:
            break
        first.append(batch if len(batch) <= left else batch.slice(0, left))
        left -= len(batch)
    return first
