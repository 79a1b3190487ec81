"""Stores acknowledgements and failures in the state journal of the shard that they belong to.

Each shard has a table and notes. Notes gather while a write runs; then the table takes them, and one write stores them
together. So the table is ahead of the journal by the write in progress, and a snapshot, made from the table, misses
nothing. Notes that could not be stored are written again after a while, or at the next `wait_stored`, together with
later notes.

Table and notes belong to one term of ownership. Before a planned end every note is stored. With an end that comes
without warning, notes that are not stored are lost: who waits for them gets MovedError, and nothing more is written.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.broker.stores import Stores, moved, owned_shard
from runnel.errors import ClosedError, RunnelError, UnknownTopicError
from runnel.group_rules import records
from runnel.group_rules.records import AckedRecord, PartitionAcks, Record, StateTable
from runnel.log.log import OwnedShard, ShardId, StateStore
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.topics.names import TopicPartition

_RETRY_NS: Final = 1_000_000_000
# A flipped bit in a snapshot costs this many of its records, not all of them.
_RECORDS_TOGETHER: Final = 256


RetryLater = Callable[[Callable[[], None]], None]

logger = get_logger("runnel")


class StateTerm(Protocol):
    """The part of `OwnedShard` that the state needs."""

    @property
    def id(self) -> ShardId: ...
    @property
    def epoch(self) -> int: ...
    @property
    def state(self) -> StateStore: ...


class ShardAckJournal:
    """One shard's table of acknowledgements and failures, and the notes that wait to be stored."""

    def __init__(self, shard: StateTerm, retry: RetryLater, began_ns: int) -> None:
        self.epoch: Final = shard.epoch
        self.began_ns: Final = began_ns  # the term here, by the monotonic clock
        self.table: Final = StateTable()
        self.is_leaving = False
        """The term is about to end: no consumer group may cover a partition of the shard any more."""
        self._is_over = False
        self._shard = shard.id
        self._journal = journal = shard.state
        self._retry = retry
        self._acked: dict[tuple[int, str, TopicPartition], list[int]] = {}
        self._notes: list[Record] = []
        self._is_writing = False
        self._is_due = False
        self._is_backing_off = False  # the last write failed: further notes wait for the retry
        self._waiting: list[asyncio.Future[None]] = []  # for notes whose write has not begun
        self._under_way: list[asyncio.Future[None]] = []  # for notes that are being written
        self._letters = 0  # dead letters under way, of messages in this shard
        self._letters_done: asyncio.Future[None] | None = None
        self.version = 0  # rises whenever the table changes
        for content in journal.contents:
            for record in records.decode(content):
                self.table.apply(record)
        journal.contents = []
        journal.snapshot = self._snapshot

    # --- The end of the term ---

    @property
    def is_being_released(self) -> bool:
        """Whether the term is about to end, and notes are still stored."""
        return self.is_leaving and not self._is_over

    async def leave(self) -> None:
        """Wait until the dead letters under way are stored, and all notes. The groups have dropped the shard."""
        self.is_leaving = True
        if self._letters:
            if self._letters_done is None:
                self._letters_done = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._letters_done})
        try:
            await self.wait_stored()
        except RunnelError as error:
            logger.warning(
                "acknowledgements could not be stored before their shard was released",
                shard=str(self._shard),
                error=str(error),
            )

    def end(self) -> bool:
        """The term is over: nothing more is written. Returns whether notes are lost, or may be."""
        self.is_leaving = self._is_over = True
        has_lost = not self.is_stored
        self._acked, self._notes = {}, []
        waiting = self._waiting + self._under_way
        self._waiting, self._under_way = [], []
        _fail(waiting, moved(self._shard))
        return has_lost

    def letter_begins(self) -> None:
        """A dead letter of a message in this shard is being written, and its message acknowledged afterwards."""
        self._letters += 1

    def letter_ends(self) -> None:
        self._letters -= 1
        if not self._letters and self._letters_done is not None:
            self._letters_done.set_result(None)
            self._letters_done = None

    def check(self) -> None:
        """Raise MovedError if the term is over."""
        if self._is_over:
            raise moved(self._shard)

    # --- Notes ---

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
        """Note that a range is acknowledged. Hot: neighbouring ranges become one. MovedError if the term is over."""
        if self._is_over:
            raise moved(self._shard)
        ranges = self._acked.setdefault((subscription, member, key), [])
        if ranges and ranges[-1] == begin:
            ranges[-1] = end
        else:
            ranges += (begin, end)
        self._write_soon()

    def note(self, record: Record) -> None:
        """Note a record. MovedError if the term is over."""
        self.check()
        self._take_acked()  # earlier acknowledgements stay before this record
        self._notes.append(record)
        self._write_soon()

    def note_at_once(self, record: Record) -> None:
        """Like `note`, for a partition that its group does not cover: one that covers it next finds the record."""
        self.note(record)
        self.table.apply(record)
        self.version += 1

    def wait_stored(self) -> asyncio.Future[None]:
        """A future that is done once every note so far is stored. If it fails, the write is still tried again."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_over:
            _fail([future], moved(self._shard))
        elif self._acked or self._notes:
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
        if self._is_over:
            return
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
        if self._is_over:
            if not done.cancelled():
                done.exception()  # marks it as retrieved: those who waited have got MovedError
            return
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
            _fail(waiting, error)
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


def _fail(waiting: Iterable[asyncio.Future[None]], error: BaseException) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)
            future.exception()  # marks it as retrieved: its caller may have gone


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
        """The state of a term. MovedError if the term is over."""
        state = self._shards.get(shard)
        if state is None:
            state = self._shards[shard] = ShardAckJournal(
                shard, self._retry_later, self._clock.monotonic_ns()
            )
        return state

    def known(self, shard: OwnedShard) -> ShardAckJournal | None:
        """The state of a term, if it is kept here."""
        return self._shards.get(shard)

    def forget(self, shard: OwnedShard) -> None:
        """Forget the state of a shard whose term of ownership has ended. Another term reads it anew."""
        state = self._shards.pop(shard, None)
        if state is not None:
            self._changes += state.version + 1  # so that `version` does not fall

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

    async def close(self) -> None:
        """Store the notes. Messages whose notes cannot be stored are delivered again after the next start."""
        try:
            await wait_stored(self._shards.values())
        except RunnelError:
            return


async def wait_stored(states: Iterable[ShardAckJournal]) -> None:
    """Wait until every note so far is stored in these shards. Raises the first failure."""
    waiting = [state.wait_stored() for state in states]
    if waiting:
        await asyncio.gather(*waiting)
