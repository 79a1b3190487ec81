"""A consumer: joins a subscription, hands out the messages leased to it, and acknowledges them.

Iterating suspends only when nothing has arrived, acknowledging only when the connection is full. Acks are collected
and sent together at the end of a wake-up: per message there is no task, no future and no frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from runnel.client.arguments import milliseconds, reason_text
from runnel.client.consumer.consumer_session import ConsumerSession
from runnel.client.consumer.deliveries import LeasedItem, LeaseHolder, is_concerned
from runnel.client.consumer.ledger import EARLY_ACKS_MIN, LEASE_OVER, Ledger
from runnel.client.consumer.part import LeasePart
from runnel.client.consumer.work import LateWork, Work, WorkBatch, WorkItem
from runnel.client.consumer.worker_pool import (
    BatchFunction,
    BatchSource,
    MessageFunction,
    MessageSource,
    OnError,
    WorkerPool,
)
from runnel.errors import ClientFault, LateAckError
from runnel.formats.work_heads import DeliveryPart
from runnel.topics.names import TopicPartition

# A reader that always finds messages lets other tasks run after this many bytes.
_YIELD_BYTES: Final = 256 * 2**10
_NS_PER_MS: Final = 1_000_000


class Consumer(ConsumerSession):
    """Iterate it for `Work`, `batches()` for `WorkBatch`, or give `process` a function. Use it in an `async with`.

    Leaving it waits until acks are stored. Unacknowledged messages go back and do not count as failed.
    """

    @property
    def holder(self) -> LeaseHolder:
        return self

    # --- Handing out ---

    async def __aiter__(self) -> AsyncIterator[Work]:
        # A generator is faster than __anext__. Messages that it has not yielded stay in the queue: leaving a loop
        # loses nothing, another loop continues, and several loops may share the work.
        queue = self.queue
        while True:
            for work in queue.begin_each():
                yield work
                if queue.taken_bytes >= _YIELD_BYTES:
                    await self._let_others_run()
            if not await self.wait_arrival():
                return

    async def __anext__(self) -> Work:
        """One message: `await anext(consumer)`."""
        while True:
            for work in self.queue.begin_each():
                return work
            if not await self.wait_arrival():
                raise StopAsyncIteration

    async def batches(self) -> AsyncIterator[WorkBatch]:
        """The same messages, one delivery at a time."""
        queue = self.queue
        while True:
            while (delivery := queue.take_delivery_nowait()) is not None:
                if (batch := queue.begin_batch_nowait(delivery)) is not None:
                    yield batch
                if queue.taken_bytes >= _YIELD_BYTES:
                    await self._let_others_run()
            if not await self.wait_arrival():
                return

    async def wait_arrival(self) -> bool:
        """Wait until something may have arrived. False: the consumer is closed. Raises the error that ended it."""
        if not self._is_begun and not self._is_closed:
            await self.open()
        elif self._error is not None:
            raise self._error.with_traceback(None)
        elif not self._is_closed:
            self.queue.taken_bytes = 0
            await self._wait()
        return not self._is_closed

    async def _let_others_run(self) -> None:
        self.queue.taken_bytes = 0
        await asyncio.sleep(0)

    # --- For a reader in another thread ---

    async def next_works(self) -> list[Work]:
        """All waiting messages, at least one, none of them begun; empty once the consumer is closed."""
        while True:
            works = []
            while (work := self.queue.take_nowait()) is not None:
                works.append(work)
            if works or not await self.wait_arrival():
                return works

    async def next_batch(self) -> WorkBatch | None:
        """The next of `batches()`; None once the consumer is closed."""
        async for batch in self.batches():
            return batch
        return None

    async def put_back(self, works: Iterable[Work]) -> None:
        """Return messages of `next_works` to the queue; those not begun are handed out again."""
        self.queue.put_back(work.delivery for work in works)

    def begin_nowait(self, work: Work) -> bool:
        """Begin a message of `next_works`, from any thread. False: it was recalled or lost meanwhile."""
        with self.begun.lock:
            return self.queue.begin_nowait(work) is not None

    # --- Acknowledging ---

    def check_loop(self) -> None:
        """Refuse to create a coroutine in a thread that cannot await it: it would be dropped without an error."""
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if not is_here:
            raise ClientFault(
                "the consumer's event loop does not run in this thread. `process` acknowledges by itself, when the "
                "function returns or raises; to do it before that, make the function an `async def`, or hand "
                "consumer.ack(work) to asyncio.run_coroutine_threadsafe"
            )

    async def ack(self, *items: LeasedItem, stored: bool = False) -> None:
        """Acknowledge messages or whole batches. Waits only while the connection is full.

        With `stored` it waits until the broker has stored the acks, and raises LateAckError if some came too late.
        """
        part: LeasePart
        # The usual case is one begun message of this consumer: it skips the calls of the general case.
        work = items[0] if len(items) == 1 and not stored else None
        if (
            work.__class__ is Work
            and (delivery := work.delivery).holder is self
            and (part := delivery.part).ledger.ack_begun(delivery, work.message.offset)
        ):
            if not part.ack_sender.is_scheduled or part.ledger.unsent >= EARLY_ACKS_MIN:
                part.ack_sender.schedule()
            connection = part.link.connection
            if connection is not None and not connection.is_writable:
                await self.wait_room()
        else:
            self.check_own(items)
            if stored:
                await self._ack_stored(items)
                return
            self.ack_nowait(items)
            if not self.has_room:
                await self.wait_room()

    def check_own(self, items: Iterable[LeasedItem]) -> None:
        """Refuse items that this consumer did not hand out, before any of the others is processed. From any thread."""
        for item in items:
            try:
                holder = item.delivery.holder
            except AttributeError:
                raise ClientFault(
                    f"{item!r:.200} is no work: give messages or batches as this consumer handed them out"
                ) from None
            if holder is not self:
                raise ClientFault(
                    f"{item!r:.200} was given by another consumer: acknowledge it there"
                )

    def ack_nowait(self, items: Iterable[LeasedItem]) -> list[LateWork]:
        """Acknowledge own items, even if the connection is full. Returns the late ones, as far as known at once."""
        late: list[LateWork] = []
        parts: dict[LeasePart, None] = {}
        for item in items:
            part: LeasePart = item.delivery.part
            item.ack_in(part.ledger)
            parts[part] = None
        for part in parts:
            if not part.ack_sender.is_scheduled or part.ledger.is_send_due:
                part.ack_sender.schedule()
            if part.ledger.late:
                late += self.report_late(part.ledger)
        return late

    async def _ack_stored(self, items: Sequence[LeasedItem]) -> None:
        reported: list[tuple[Ledger, DeliveryPart]] = []
        self._late_listeners.append(reported)
        try:
            late = self.ack_nowait(items)
            await self._wait_stored()
        finally:
            self._late_listeners.remove(reported)
        for ledger, part in reported:
            concerned = (
                item
                for item in items
                if item.delivery.part.ledger is ledger and is_concerned(item, part)
            )
            item = next(concerned, None)
            if item is not None:
                partition = item.delivery.topic, item.delivery.partition
                late.append(LateWork(*partition, part.begin, part.end, part.delivery, LEASE_OVER))
        if late:
            raise LateAckError(
                f"acknowledged too late in {self.subscription!r}, {len(late)} of them: {late[0]}"
            )

    async def ack_up_to(self, item: WorkItem) -> None:
        """Acknowledge this message, and all earlier messages of its partition that are leased to this consumer."""
        self.check_own((item,))
        part: LeasePart = item.delivery.part
        if item.delivery.loss:  # late, and earlier messages belong to other deliveries by now
            item.ack_in(part.ledger)
        else:
            part.ledger.ack_up_to(item.topic, item.partition, item.offset)
        part.ack_sender.schedule()
        self.report_late(part.ledger)
        await self.wait_room()

    async def nack(
        self, *items: LeasedItem, delay_s: float | None = None, reason: str = ""
    ) -> None:
        """Report messages as failed: they come again after `delay_s`, by default the subscription's delay."""
        # Invalid values are refused before the ledger marks anything as nacked: those nacks would never be sent.
        delay_ms = milliseconds("delay_s", delay_s)
        reason = reason_text(reason)
        self.check_own(items)
        failed: dict[LeasePart, list[DeliveryPart]] = {}
        held_back: dict[tuple[LeasePart, TopicPartition], None] = {}
        for item in items:
            part: LeasePart = item.delivery.part
            parts = part.ledger.nack(item, delay_ms, reason)
            failed.setdefault(part, []).extend(parts)
            if parts and self.mode == "key_shared":
                held_back[part, (item.delivery.topic, item.delivery.partition)] = None
                for first in item.first_of_keys():
                    part.ledger.drop_later(first)
        for part, parts in failed.items():
            part.ack_sender.nack(parts, delay_ms, reason)
        for part, partition in held_back:
            part.hold_back(partition)
        await self.wait_room()

    async def extend(self, item: LeasedItem, seconds: float) -> None:
        """Lease an item's delivery for `seconds` from now, at most the subscription's longest processing time."""
        self.check_own((item,))
        delivery = item.delivery
        lease_ms = milliseconds("seconds", seconds)
        if lease_ms is None:
            raise ClientFault("extend needs seconds")
        if not delivery.loss:
            part: LeasePart = delivery.part
            lease_ns = min(lease_ms * _NS_PER_MS, part.processing_ns_max)
            delivery.deadline_ns = self._timers.monotonic_ns() + lease_ns
            part.ack_sender.renew((delivery.id,), lease_ms)
        await self.wait_room()

    @property
    def has_room(self) -> bool:
        """Whether every connection accepts more frames. Without a connection there is nothing to wait for."""
        for part in self._parts.values():
            connection = part.link.connection
            if connection is not None and not connection.is_writable:
                return False
        return True

    async def wait_room(self) -> None:
        while not self.has_room:
            await self._wait()

    # --- Processing ---

    async def process(
        self,
        function: MessageFunction,
        *,
        concurrency: int = 8,
        stop: asyncio.Event | None = None,
        drain_s: float = 30,
        on_error: OnError[Work] | None = None,
    ) -> None:
        """Call a function for every message, `concurrency` at a time: acked when it returns, nacked when it raises.

        An `async def` runs in the loop, a plain function in threads. In key_shared mode messages of one key are
        processed one after the other. When `stop` is set or the caller is cancelled, no new call begins, and running
        calls have `drain_s` to finish. Messages of unfinished calls go back when the consumer is closed.
        """
        source = MessageSource(self.queue, self)
        await WorkerPool(
            self, source, function, self._timers, concurrency=concurrency, on_error=on_error
        ).run(stop, drain_s)

    async def process_batches(
        self,
        function: BatchFunction,
        *,
        concurrency: int = 8,
        stop: asyncio.Event | None = None,
        drain_s: float = 30,
        on_error: OnError[WorkBatch] | None = None,
    ) -> None:
        """`process` for whole batches. In key_shared mode batches of one partition come one after the other."""
        source = BatchSource(self.queue, self)
        await WorkerPool(
            self, source, function, self._timers, concurrency=concurrency, on_error=on_error
        ).run(stop, drain_s)
