"""A live subscription: batches arrive, wait within its credit, and are iterated as messages.

The read position advances when a delivery arrives, and a new connection resumes from it: arrived messages are never
requested again. Iterating suspends only when nothing has arrived, never for a single message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from runnel.client.connection import BrokerConnection, OnAnswer, Router, Timers
from runnel.client.consumer.reconnecting_reader import ReconnectingReader
from runnel.client.consumer.subscription_parts import (
    PartDelivery,
    PartsRequest,
    SubscriptionParts,
)
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.client.results import Gap
from runnel.errors import ClientFault, MalformedError, RunnelError, TimeoutExpiredError
from runnel.formats import wire
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.message import Message

if TYPE_CHECKING:
    import pyarrow

OVERFLOWS: Final = ("drop_oldest", "newest_per_topic", "disconnect")
_GAPS_MAX: Final = 1000
# A reader that always finds messages lets other tasks run after this many bytes.
_YIELD_BYTES: Final = 256 * 2**10
_CLOSE_TIMEOUT_S: Final = 2.0


class _Arrived(msgspec.Struct, frozen=True):
    """The batches of one delivery, or a gap."""

    batches: Sequence[Batch]
    size: int
    gap: Gap | None = None
    part: int = 0  # that delivered it; 0: the broker has no other nodes


class Subscription(ReconnectingReader):
    """Iterate it for messages, `batches()` for batches, `to_arrow()` for record batches.

    Entering it in an `async with`, or the first step of an iteration, waits until the broker has accepted it.
    """

    def __init__(
        self,
        router: Router,
        timers: Timers,
        number: int,
        patterns: Sequence[str],
        start: wire.Start,
        *,
        overflow: str = "drop_oldest",
        buffer_bytes: int = 8 * 2**20,
        on_gap: Callable[[Gap], object] | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Subscription], object] | None = None,
    ) -> None:
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ClientFault(f"{patterns!r}: a subscription needs at least one pattern, as text")
        if overflow not in OVERFLOWS:
            raise ClientFault(f"overflow {overflow!r} is unknown: {', '.join(OVERFLOWS)}")
        if buffer_bytes < 1:
            raise ClientFault(f"buffer_bytes is {buffer_bytes}: at least 1 is needed")
        what = f"subscribing to {' '.join(patterns)}"
        super().__init__(router, timers, what=what, deadline_s=deadline_s, patterns=patterns)
        self.gaps: Final[deque[Gap]] = deque(maxlen=_GAPS_MAX)
        self._number = number
        self._overflow = overflow
        self._buffer_bytes = buffer_bytes
        self._on_gap = on_gap
        self._on_close = on_close
        self._position = SubscriptionPosition(self.patterns, start)
        self._parts: SubscriptionParts | None = None  # where the broker has several nodes
        self._is_read = False  # a reader waits for the next batch
        self._arrived: deque[_Arrived] = deque()
        self._gaps_arrived = 0
        self._held_bytes = 0  # arrived, and their credit is not returned yet
        self._consumed_bytes = 0  # of these: read
        self._unyielded_bytes = 0
        self._current: Iterator[Batch] = iter(())
        self._messages: Iterator[Message] = iter(())

    def __repr__(self) -> str:
        return f"<Subscription to {' '.join(self.patterns)}, {self._state()}>"

    def _state(self) -> str:
        if self._is_closed:
            return "closed"
        if self._error is not None:
            return f"ended: {self._error}"
        if self._parts is not None:
            held_bytes = self._parts.shares.held_bytes
            return f"{held_bytes} bytes waiting" + (
                "" if self._parts.is_covered else f", {self._parts.state}"
            )
        return f"{self._held_bytes} bytes waiting, {self._link.state}"

    # --- Opening and closing ---

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self._unsubscribe(lambda _answer, _tail: None)  # `__aexit__` will not run
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the iteration, and drop arrived messages that were not read."""
        done = asyncio.Event()
        if self._is_closed:
            return
        if self._parts is not None:
            left = 0

            def count() -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            self._leave()
            left = self._parts.close(count)
            is_asked = left > 0
        else:
            is_asked = self._unsubscribe(lambda _answer, _tail: done.set())
        if is_asked:
            with contextlib.suppress(TimeoutError):  # the broker is slow; the request is sent
                await asyncio.wait_for(done.wait(), _CLOSE_TIMEOUT_S)

    def _unsubscribe(self, on_answer: OnAnswer) -> bool:
        """Leave, and ask the broker to end the subscription if it has it. Returns whether an answer follows."""
        self._leave()
        if self._parts is not None:
            self._parts.close(lambda: None)
            return False
        connection = self._link.connection
        if connection is None or connection.receivers.pop(self._number, None) is None:
            return False
        number = self._link.next_number()
        connection.request(number, wire.Unsubscribe(number, self._number), on_answer)
        return True

    def abandon(self) -> None:
        """Close without a request to the broker, because the connection ends anyway."""
        if self._parts is not None:
            self._parts.abandon()
        elif connection := self._link.connection:
            connection.receivers.pop(self._number, None)
        self._leave()

    def _leave(self) -> None:
        self._arrived.clear()
        self._current = iter(())
        self._messages = iter(())
        self._detach()
        if self._on_close is not None:
            self._on_close(self)

    # --- Subscribing, and again after a lost connection ---

    def _ask(self, connection: BrokerConnection) -> None:
        if self._router.is_several:
            self._open_parts()
            return
        if self._parts is not None:  # the broker has been started again with one node
            self._parts.abandon()
            self._parts = None
        if self._number in connection.receivers:
            return
        connection.receivers[self._number] = self
        number = self._link.next_number()
        credit_bytes = max(0, self._buffer_bytes - self._held_bytes)
        head = wire.Subscribe(
            number,
            self._number,
            self.patterns,
            self._position.next_start(),
            credit_bytes,
            self._overflow,
        )
        connection.request(number, head, lambda answer, _: self._answered(answer))

    def _answered(self, answer: wire.Answer | RunnelError) -> None:
        if isinstance(answer, wire.Subscribed):
            self._position.begin(answer)
            self._accepted()
        elif isinstance(answer, RunnelError):
            if connection := self._link.connection:
                connection.receivers.pop(self._number, None)
            self._refused(answer)
        else:
            self._fail(MalformedError("answer", f"{answer!r:.200} to a subscribe"))

    # --- In parts ---

    def _open_parts(self) -> None:
        if self._parts is None:
            request = PartsRequest(
                self._number,
                self.patterns,
                self._position.next_start(),
                self._overflow,
                self._buffer_bytes,
            )
            self._parts = SubscriptionParts(
                self._router, self._timers, self, request, self._position
            )
            self._watch()
            self._parts.open()

    def part_delivered(self, part: int, delivery: PartDelivery) -> None:
        if not delivery.size:
            return  # it only moves the place
        self._arrived.append(_Arrived(delivery.batches, delivery.size, part=part))
        if self._waiting:
            self.wake()

    def part_missed(self, gap: wire.GapState) -> None:
        self._add_gap(gap)

    def parts_failed(self, error: RunnelError) -> None:
        if self._error is None:
            self._fail(error)

    def parts_changed(self) -> None:
        """Give up if shards are not read for too long."""
        if self._parts is None or self._is_closed:
            return
        if self._parts.is_covered:
            if not self._is_attached:
                self._accepted()
        elif self._is_attached or not self._was_attached:
            self._is_attached = False
            self._watch()

    def link_down(self) -> None:
        if self._parts is None:
            super().link_down()
        elif self._link.failure is not None:
            self.parts_failed(self._link.failure)

    def _give_up(self) -> None:
        if self._parts is None:
            super()._give_up()
        else:
            self._fail(
                TimeoutExpiredError(
                    f"{self._what}: not done within {self._deadline_s:g} s; {self._parts.state}"
                )
            )

    # --- Events of the link and the connection ---

    def link_writable(self) -> None:
        """Nothing waits for room: credit frames are small, and are sent whenever they are due."""

    def delivered(self, head: wire.Deliver, tail: memoryview) -> None:
        batches = self._position.delivered(head, unpack_blocks(tail))
        self._arrived.append(_Arrived(batches, len(tail)))
        self._held_bytes += len(tail)
        if self._waiting:
            self.wake()

    def missed(self, notice: wire.GapNotice) -> None:
        self._position.missed(notice.gap)
        self._add_gap(notice.gap)

    def _add_gap(self, gap: Gap) -> None:
        if self._gaps_arrived < _GAPS_MAX:
            self._gaps_arrived += 1
            self._arrived.append(_Arrived((), 0, gap))
        else:  # the reader does not read: further gaps are merged into one
            self._add_up(gap)
        self.wake()

    def _add_up(self, gap: Gap) -> None:
        last = self._arrived[-1].gap
        if last is not None and last.missed and gap.missed:
            missed = last.missed + gap.missed
        else:
            missed = 0
        text = "several gaps, added up because nobody read them"
        if last is not None:
            self._arrived.pop()
        self._arrived.append(_Arrived((), 0, Gap(gap.reason, missed or gap.missed, text=text)))

    def ended(self, error: RunnelError) -> None:
        self._refused(error)

    # --- Reading ---

    def _return_credit(self) -> None:
        """Return credit in steps of a quarter of the buffer, to avoid a frame for each batch."""
        if self._parts is not None:
            self._parts.grant()
            return
        if self._consumed_bytes * 4 >= self._buffer_bytes:
            credit_bytes, self._consumed_bytes = self._consumed_bytes, 0
            self._held_bytes -= credit_bytes
            if self._is_attached:
                self._link.tell(wire.Credit(self._number, credit_bytes))

    def _take(self) -> Sequence[Batch]:
        """The batches of the next delivery; empty if none has arrived. Reports gaps before it."""
        while self._arrived:
            arrived = self._arrived.popleft()
            if arrived.gap is not None:
                self._gaps_arrived = max(0, self._gaps_arrived - 1)
                self.gaps.append(arrived.gap)
                if self._on_gap is not None:
                    self._on_gap(arrived.gap)
                continue
            if self._parts is None:
                self._consumed_bytes += arrived.size
            else:
                self._parts.consumed(arrived.part, arrived.size)
            self._unyielded_bytes += arrived.size
            if arrived.batches:
                return arrived.batches
            self._return_credit()  # an empty delivery: the reader may wait next
        return ()

    async def _next_batch(self) -> Batch | None:
        """The next batch; None once the subscription is closed. The rest of its delivery stays in `_current`."""
        for batch in self._current:
            return batch
        if self._is_read:
            raise ClientFault("another reader waits for this subscription: one at a time can")
        self._is_read = True
        try:
            while not self._is_closed:
                self._return_credit()
                if not self._is_begun:
                    await self.open()
                if self._unyielded_bytes >= _YIELD_BYTES:
                    self._unyielded_bytes = 0
                    await asyncio.sleep(0)
                if batches := self._take():
                    self._current = iter(batches)
                    return next(self._current)
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if not self._is_closed:
                    self._unyielded_bytes = 0
                    await self._wait()
            return None
        finally:
            self._is_read = False

    async def next_batches(self) -> list[Batch]:
        """All arrived batches, at least one; empty once the subscription is closed."""
        batch = await self._next_batch()
        if batch is None:
            return []
        batches = [batch, *self._current]
        while more := self._take():
            batches += more
        return batches

    async def batches(self) -> AsyncIterator[Batch]:
        """The same messages, one batch at a time."""
        while (batch := await self._next_batch()) is not None:
            yield batch

    async def to_arrow(self) -> AsyncIterator[pyarrow.RecordBatch]:
        """The same messages, one pyarrow.RecordBatch at a time: `pip install '.[arrow]'`."""
        while (batch := await self._next_batch()) is not None:
            yield batch.to_arrow()

    async def __aiter__(self) -> AsyncIterator[Message]:
        # A generator is a quarter faster than __anext__. Messages that it has not yielded stay in the subscription, so
        # that leaving a loop loses nothing and another loop continues.
        while True:
            for message in self._messages:
                yield message
            batch = await self._next_batch()
            if batch is None:
                return
            self._messages = iter(batch)

    async def __anext__(self) -> Message:
        """One message: `await anext(subscription)`."""
        while True:
            for message in self._messages:
                return message
            batch = await self._next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._messages = iter(batch)
