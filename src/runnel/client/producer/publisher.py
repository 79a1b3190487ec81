"""The publisher: it takes messages without waiting, and sends them as batches, shard by shard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import msgspec

from runnel.client.connection import Deadline, Router, Timers, UnreachableError
from runnel.client.producer.batch_builder import PendingRows, codec_of
from runnel.client.producer.row_distributor import RowDistributor
from runnel.client.producer.send_buffer import SendBuffer
from runnel.client.producer.shard_sender import Flush, PublisherOptions, ShardSender
from runnel.client.results import Receipt
from runnel.errors import (
    BusyError,
    ClientFault,
    ClosedError,
    LimitExceededError,
    RunnelError,
    Unavailable,
)
from runnel.formats import wire
from runnel.formats.envelope import RUNS_MAX
from runnel.topics.hints import level_meant

# The defaults. With a quarter of them, one publisher reached one subscriber at four fifths of the rate (bench/live.py).
BATCH_MESSAGES_MAX: Final = 4000
BATCH_BYTES_MAX: Final = 2**20

LEVELS: Final = ("stored", "received", "none")
# `send` refuses when the buffer is exceeded by this factor: a loop that never waits for room gets an error.
_BUFFER_FACTOR_MAX: Final = 2
# Looking up an enum's member takes several times as long.
_FULL: Final = Flush.FULL
_DUE: Final = Flush.DUE


class Publisher(SendBuffer):
    """Publishes many messages. `send` never waits; `ready` waits for room; `flush` for acknowledgements.

    Use it in an `async with`, which flushes at its end.
    """

    def __init__(
        self,
        router: Router,
        timers: Timers,
        topic: str | None = None,
        *,
        name: str | None = None,
        level: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
        compression: str | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Publisher], object] | None = None,
        on_room: Callable[[], object] | None = None,
    ) -> None:
        if not 1 <= batch_messages_max <= RUNS_MAX:
            raise ClientFault(f"batch_messages_max is {batch_messages_max}: 1 to {RUNS_MAX}")
        if batch_bytes_max < 1 or buffer_bytes_max < 1 or linger_ms < 0:
            raise ClientFault("batch_bytes_max and buffer_bytes_max begin at 1, linger_ms at 0")
        self.chunk_bytes_max: Final = min(batch_bytes_max, buffer_bytes_max)
        super().__init__(
            topic,
            timers.time_ns,
            chunk_messages=batch_messages_max,
            chunk_bytes_max=self.chunk_bytes_max,
        )
        self._options = PublisherOptions(
            name=name,
            term=0,
            level=_level_of(level, name),
            batch_messages_max=batch_messages_max,
            batch_bytes_max=batch_bytes_max,
            linger_s=linger_ms / 1000,
            deadline_s=deadline_s,
            codec=codec_of(compression),
        )
        self.batches_in_flight = 0
        self.buffer_bytes_max: Final = buffer_bytes_max
        self._router = router
        self._timers = timers
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._on_room = on_room
        self._is_open = name is None
        self._is_waking = False
        self._has_handed_over = False
        self._buffered_bytes = 0
        self._generation = 0
        self._unsettled: dict[int, int] = {}  # messages by generation
        self._flushing: dict[asyncio.Future[None], int] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._distributor: Final = RowDistributor(
            router, timers, self, topic, self._options, lambda: bool(self._flushing)
        )
        self._failure: RunnelError | None = None  # the first since the last flush
        self._failures = 0
        self._end: RunnelError | None = None  # nothing can be sent any more

    def __repr__(self) -> str:
        name = f" {self._options.name!r}" if self._options.name is not None else ""
        return f"<Publisher{name} to {self._topic or 'any topic'}, {self._buffered_bytes} bytes under way>"

    @property
    def buffered_bytes(self) -> int:
        """The size of all messages that are handed over and not acknowledged."""
        return self._buffered_bytes

    @property
    def now_ns(self) -> Callable[[], int]:
        return self._timers.time_ns

    @property
    def batch_messages_max(self) -> int:
        return self._options.batch_messages_max

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    def check_open(self) -> None:
        """Raise the reason why nothing can be sent, if there is one."""
        if self._end is not None:
            raise self._end.with_traceback(None)
        if not self._is_open:
            raise ClientFault("a named publisher is used in an `async with`, which gets its term")

    # --- Opening and closing ---

    async def open(self) -> None:
        """Get a term, if the publisher is named. The broker then refuses earlier publishers of the same name."""
        name = self._options.name
        if self._is_open or name is None:
            return
        answer, _ = await self._router.home.ask(
            wire.Term,
            lambda number: wire.Producer(number, name),
            deadline=Deadline(self._timers, self._options.deadline_s),
            what=f"opening publisher {name!r}",
        )
        self._options = msgspec.structs.replace(self._options, term=answer.term)
        self._distributor.options = self._options
        self._is_open = True

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, RunnelError):
            await self.close()
        else:  # the program's error comes first: send what is buffered, and do not wait
            self._hand_over(Flush.ALL)
            self.end(ClosedError("the publisher was left with an error"))

    async def close(self) -> None:
        """Flush, then refuse further messages. Raises what `flush` raises."""
        if self._end is None:
            try:
                await self.flush()
            finally:
                self.end(ClosedError("the publisher has been closed"))
        elif not isinstance(self._end, ClosedError):
            self._raise_failure()

    def end(self, error: RunnelError) -> None:
        """Give up all messages that are not acknowledged, and refuse further ones."""
        if self._end is not None:
            return
        self._end = error
        if rows := self._take():
            self._count_in(rows)
            self.settled(rows, error)
        self._room_bytes = 0
        self._distributor.close(error)
        self._wake_waiting()
        if self._on_room is not None:
            self._on_room()
        if self._on_close is not None:
            self._on_close(self)

    # --- Sending ---

    def submit(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
    ) -> asyncio.Future[Receipt]:
        """Like `send`. Returns a future of the receipt, which says where the message is stored."""
        self.send(payload, topic, key, tags, event_time_ns, partition_key, uid)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._rows.futures[len(self._payloads) - 1] = future
        return future

    async def ready(self) -> None:
        """Wait until the buffer has room. Now and then it lets other tasks run although there is room."""
        if self._has_handed_over:
            self._has_handed_over = False
            await asyncio.sleep(0)
        while self._end is None and self._buffered_bytes > self.buffer_bytes_max:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        self.check_open()

    async def flush(self) -> None:
        """Wait until everything sent so far is acknowledged. Raises the first failure since the last flush.

        At level none: until the broker has it.
        """
        self._hand_over(Flush.ALL)
        generation = self._generation
        self._generation += 1
        if self._unsettled:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._flushing[waiter] = generation
            try:
                await waiter
            finally:
                self._flushing.pop(waiter, None)
        if self._options.level == "none" and self._end is None:
            await self._reach_brokers()
        self._raise_failure()

    async def _reach_brokers(self) -> None:
        """Ping each broker. It takes frames in order: when it answers, it has taken or refused everything before."""
        deadline = Deadline(self._timers, self._options.deadline_s)
        for link in self._distributor.links:
            with suppress(UnreachableError):  # a node that is lost takes nothing any more
                await link.ask(
                    wire.Pong,
                    wire.Ping,
                    deadline=deadline,
                    what="flushing",
                    is_patient=not self._router.is_several,
                )

    def _raise_failure(self) -> None:
        failure, count = self._failure, self._failures
        self._failure, self._failures = None, 0
        if failure is not None:
            if count > 1:
                failure.add_note(
                    f"{count} batches were not published; this is why the first was not"
                )
            raise failure.with_traceback(None)

    # --- From the send buffer to the shard senders ---

    def _make_room(self) -> None:
        if self._end is not None or not self._is_open:
            self.check_open()
        if self._payloads:
            self._hand_over(_FULL)
        if self._buffered_bytes > _BUFFER_FACTOR_MAX * self.buffer_bytes_max:
            raise BusyError(
                f"{self._buffered_bytes} bytes are not acknowledged, where the buffer is to hold "
                f"{self.buffer_bytes_max}: await publisher.ready() between sends"
            )
        self._open()
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Hand over everything that was sent in this wake-up of the loop."""
        self._is_waking = False
        self._hand_over(_DUE)

    def _hand_over(self, flush: Flush) -> None:
        rows = self._take()
        if rows is not None:
            self._has_handed_over = flush is _FULL
            self.accept(rows, flush)
        elif flush is not _FULL:
            self._distributor.pump(flush)

    def accept(self, rows: PendingRows, flush: Flush = Flush.DUE) -> None:
        """Take rows from the send buffer of this thread, or of another one."""
        self._count_in(rows)
        if self._end is not None:
            self.settled(rows, self._end)
            return
        welcome = self._router.home.welcome
        if welcome is not None and rows.size > welcome.message_bytes_max:
            rows = self._without_oversize(rows, welcome.message_bytes_max)
        if rows.payloads:
            self._distributor.add(rows)
            self._distributor.pump(flush)

    def _count_in(self, rows: PendingRows) -> None:
        generation = rows.generation = self._generation
        self._unsettled[generation] = self._unsettled.get(generation, 0) + len(rows.payloads)
        self._buffered_bytes += rows.size

    def _without_oversize(self, rows: PendingRows, message_bytes_max: int) -> PendingRows:
        """Refuse the messages that are too large, rather than their whole batch."""
        large = [
            row for row, payload in enumerate(rows.payloads) if len(payload) > message_bytes_max
        ]
        if not large:
            return rows
        refused = rows.select(large)
        kept = rows.select(sorted(set(range(len(rows))).difference(large)))
        error = LimitExceededError(
            f"a payload of {max(map(len, refused.payloads))} bytes; the broker takes "
            f"{message_bytes_max} in one message"
        )
        self.settled(refused, error)
        return kept

    # --- What shard senders report (SenderOwner) ---

    def seek_owner(self, sender: ShardSender) -> None:
        """The link of a sender is lost: find out who owns its shard now."""
        self._distributor.seek_owner(sender)

    def settled(self, rows: PendingRows, error: RunnelError | None) -> None:
        """These messages are acknowledged (no error), or given up."""
        self._buffered_bytes -= rows.size
        if error is not None:
            if rows.fail(error):
                self.refused_late(error)
            if not isinstance(error, Unavailable):
                self._distributor.forget(rows.distinct_topics())
        left = self._unsettled[rows.generation] - len(rows.payloads)
        if left:
            self._unsettled[rows.generation] = left
        else:
            del self._unsettled[rows.generation]
            if self._flushing:
                self._wake_flushing()
        if self._buffered_bytes <= self.buffer_bytes_max:
            if self._waiting:
                self._wake_waiting()
            if self._on_room is not None:
                self._on_room()

    def refused_late(self, error: RunnelError) -> None:
        """Keep a failure for the next flush: no caller waits for the receipts of these messages."""
        self._failure = self._failure or error
        self._failures += 1

    def batch_answered(self) -> None:
        if self._buffered_bytes:  # otherwise no sender has anything left
            self._distributor.pump(_DUE)

    def sender_broken(self, error: RunnelError) -> None:
        """End a named publisher: its sequence of batches cannot continue."""
        error.add_note(f"publisher {self._options.name!r} has ended; open it again to go on")
        self.end(error)

    def _wake_flushing(self) -> None:
        oldest = min(self._unsettled, default=None)
        for waiter, generation in self._flushing.items():
            if not waiter.done() and (oldest is None or oldest > generation):
                waiter.set_result(None)

    def _wake_waiting(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


def checked_level(level: str | None) -> str | None:
    if level is not None and level not in LEVELS:
        meant = level_meant(level)
        raise ClientFault(
            f"level {level!r} is unknown: {', '.join(LEVELS)}, or None for the topic's own"
            + ("" if meant is None else f"; did you mean {meant!r}?")
        )
    return level


def _level_of(level: str | None, name: str | None) -> str | None:
    if name is None:
        return checked_level(level)
    if level not in (None, "stored"):
        raise ClientFault(f"a named publisher always has its batches stored, not {level!r}")
    return "stored"
