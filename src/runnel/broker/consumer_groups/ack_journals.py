"""Stores acknowledgements and failures in the state journal of the shard that they belong to.

Each shard has a table and notes. Notes gather while a write runs; then the table takes them, and one write stores them
together. So the table is ahead of the journal by the write in progress, and a snapshot, made from the table, misses
nothing. Notes that could not be stored are written again after a while, or at the next `wait_stored`, together with
later notes.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Final

from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.broker.stores import Stores, owned_shard
from runnel.errors import ClosedError, RunnelError, UnknownTopicError
from runnel.group_rules import records
from runnel.group_rules.records import AckedRecord, PartitionAcks, Record, StateTable
from runnel.log.log import OwnedShard, StateStore
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition

_RETRY_NS: Final = 1_000_000_000
# A flipped bit in a snapshot costs this many of its records, not all of them.
_RECORDS_TOGETHER: Final = 256


RetryLater = Callable[[Callable[[], None]], None]


class ShardAckJournal:
    """One shard's table of acknowledgements and failures, and the notes that wait to be stored."""

    def __init__(self, journal: StateStore, retry: RetryLater) -> None:
        self.table: Final = StateTable()
        self._journal = journal
        self._retry = retry
        self._acked: dict[tuple[int, str, TopicPartition], list[int]] = {}
        self._notes: list[Record] = []
        self._is_writing = False
        self._is_due = False
        self._is_backing_off = False  # the last write failed: further notes wait for the retry
        self._waiting: list[asyncio.Future[None]] = []  # for notes whose write has not begun
        self._under_way: list[asyncio.Future[None]] = []  # for notes that are being written
        self.version = 0  # rises whenever the table changes
        for content in journal.contents:
            for record in records.decode(content):
                self.table.apply(record)
        journal.contents = []
        journal.snapshot = self._snapshot

    def _snapshot(self) -> Iterable[bytes]:
        """The table as it is now. A worker iterates over it, and so encodes it."""
        known = self.table.snapshot()
        return (
            records.encode(known[begin : begin + _RECORDS_TOGETHER])
            for begin in range(0, len(known), _RECORDS_TOGETHER)
        )

    @property
    def is_stored(self) -> bool:
        """Whether every note is stored."""
        return not self._acked and not self._notes and not self._is_writing

    def note_acked(
        self, subscription: int, member: str, key: TopicPartition, begin: int, end: int
    ) -> None:
        """Note that a range is acknowledged. Hot: neighbouring ranges become one."""
        ranges = self._acked.setdefault((subscription, member, key), [])
        if ranges and ranges[-1] == begin:
            ranges[-1] = end
        else:
            ranges += (begin, end)
        self._write_soon()

    def note(self, record: Record) -> None:
        self._take_acked()  # earlier acknowledgements stay before this record
        self._notes.append(record)
        self._write_soon()

    def wait_stored(self) -> asyncio.Future[None]:
        """A future that is done once every note so far is stored. If it fails, the write is still tried again."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._acked or self._notes:
            self._waiting.append(future)
            self._begin_soon()  # also after a failure: the caller gets the outcome of a new attempt
        elif self._is_writing:
            self._under_way.append(future)
        else:
            future.set_result(None)
        return future

    def _take_acked(self) -> None:
        for (subscription, member, key), ranges in self._acked.items():
            packed = array("q", ranges).tobytes()
            self._notes.append(AckedRecord(subscription, member, *key, packed))
        self._acked = {}

    def _write_soon(self) -> None:
        if not self._is_backing_off:
            self._begin_soon()

    def _begin_soon(self) -> None:
        if not self._is_due and not self._is_writing:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._is_due = False
        self._take_acked()
        written, self._notes = self._notes, []
        if not written or self._is_writing:
            self._notes = written
            return
        self._is_writing = True
        for record in written:
            self.table.apply(record)
        self.version += 1
        self._under_way, self._waiting = self._waiting, []
        self._journal.add(records.encode(written)).add_done_callback(
            lambda done: self._written(written, done)
        )

    def _written(self, written: list[Record], done: asyncio.Future[None]) -> None:
        self._is_writing = False
        waiting, self._under_way = self._under_way, []
        if done.cancelled():
            error: BaseException | None = ClosedError("the state journal was closed")
        else:
            error = done.exception()
        if error is not None:
            self._notes = written + self._notes
            if not self._is_backing_off:
                self._is_backing_off = True
                self._retry(self._try_again)
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # marks it as retrieved: its caller may have gone
            if self._waiting:  # added during the failed write
                self._begin_soon()
            return
        self._is_backing_off = False
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._write()

    def _try_again(self) -> None:
        self._is_backing_off = False
        self._write_soon()


class AckJournals:
    """The stored state of all subscriptions, by the shard that a partition lies in, and its term of ownership."""

    def __init__(self, stores: Stores, clock: Clock, timers: TimerQueue) -> None:
        self._stores = stores
        self._clock = clock
        self._timers = timers
        self._shards: dict[OwnedShard, ShardAckJournal] = {}
        self._changes = 0

    def open(self) -> None:
        """Read the state journals of all shards."""
        for _, shard in self._stores.shards():
            self.of_shard(shard)

    def of_shard(self, shard: OwnedShard) -> ShardAckJournal:
        state = self._shards.get(shard)
        if state is None:
            state = self._shards[shard] = ShardAckJournal(shard.state, self._retry_later)
        return state

    def forget(self, shard: OwnedShard) -> None:
        """Forget the state of a shard whose term of ownership has ended. Another term reads it anew."""
        self._shards.pop(shard, None)

    def _retry_later(self, write: Callable[[], None]) -> None:
        self._timers.set(self._clock.monotonic_ns() + _RETRY_NS, write)

    def of(self, key: TopicPartition) -> ShardAckJournal:
        """The state of the shard that a partition lies in. Raises UnknownTopicError if its topic is gone."""
        log = self._stores.log_of(key[0])
        if log is None:
            raise UnknownTopicError(f"topic {key[0]!r} does not exist")
        return self.of_shard(owned_shard(log, key))

    def find(self, subscription: int, member: str, key: TopicPartition) -> PartitionAcks | None:
        """The stored state of a partition; None if nothing was ever noted of it."""
        return self.of(key).table.get(subscription, member, key)

    def all(self) -> Collection[ShardAckJournal]:
        return self._shards.values()

    @property
    def version(self) -> int:
        """Rises whenever a subscription may be owed less or more than before."""
        return self._changes + sum(state.version for state in self._shards.values())

    def change(self) -> None:
        """Raise `version` after an acknowledgement that is not stored."""
        self._changes += 1

    async def wait_stored(self) -> None:
        """Wait until every note so far is stored in all shards. Raises the first failure."""
        waiting = [state.wait_stored() for state in self._shards.values()]
        if waiting:
            await asyncio.gather(*waiting)

    async def close(self) -> None:
        """Store the notes. Messages whose notes cannot be stored are delivered again after the next start."""
        try:
            await self.wait_stored()
        except RunnelError:
            return
