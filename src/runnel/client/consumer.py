"""A consumer: takes part in a subscription, hands out what is leased to it, and acknowledges it.

Iterating suspends only when nothing has arrived, acknowledging only when the connection is full. Acks gather and
leave together at the end of a wake-up: per message there is no task, no future and no frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from runnel.client.arrivals import Arrivals
from runnel.client.attached import Attached
from runnel.client.checking import milliseconds, reason_text
from runnel.client.connection import Connection, OnAnswer
from runnel.client.deliveries import Delivery, Leased, is_concerned
from runnel.client.holding import Holding
from runnel.client.leases import Leases
from runnel.client.ledger import (
    CONNECTION_LOST,
    CONSUMER_CLOSED,
    CONSUMER_ENDED,
    GATHERED_MIN,
    LEASE_OVER,
    ConsumerStatistics,
    Ledger,
)
from runnel.client.processing import (
    BatchFunction,
    BatchSource,
    MessageFunction,
    MessageSource,
    OnError,
    Processing,
)
from runnel.client.routing import Router
from runnel.client.subscription import unpack_blocks
from runnel.client.telling import Telling
from runnel.client.timers import Deadline, Timers
from runnel.client.work import LateWork, LeasedMessage, Work, WorkBatch
from runnel.errors import (
    ClientFault,
    ConnectionLostError,
    LateAckError,
    MalformedError,
    RunnelError,
)
from runnel.formats import wire, work_heads
from runnel.formats.work_heads import Lease, Part

_LATE_MAX: Final = 1000
# A reader that always finds something lets others run after so much.
_YIELD_BYTES: Final = 256 * 2**10
_CLOSE_TIMEOUT_S: Final = 2.0
_NS_PER_MS: Final = 1_000_000


class Consumer(Attached):
    """Iterate it for `Work`, `batches()` for `WorkBatch`, or give `process` a function. Use it in an `async with`.

    Leaving it waits until acks are stored; what was not acknowledged goes back, and does not count as failed.
    """

    def __init__(
        self,
        router: Router,
        timers: Timers,
        request: work_heads.Consume,
        *,
        on_late: Callable[[LateWork], object] | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Consumer], object] | None = None,
    ) -> None:
        what = f"consuming from {request.subscription!r}"
        super().__init__(
            router, timers, what=what, deadline_s=deadline_s, patterns=request.patterns
        )
        self.subscription: Final = request.subscription
        self.thread_id: Final = threading.get_ident()
        self.late: Final[deque[LateWork]] = deque(maxlen=_LATE_MAX)
        self.accepted: work_heads.Consuming | None = None  # how the broker understood it
        self._number = number = request.consumer
        self._request = request
        self._on_late = on_late
        self._on_close = on_close
        self._ledger = Ledger()
        self._arrivals = Arrivals(self._ledger, timers.monotonic_ns, self.wake)
        self._holding = Holding(self._arrivals)
        self._telling = Telling(self._ledger, lambda: self._link, number, self.told_late)
        self._leases = Leases(self._ledger, timers, self._telling.renew)
        self._may_have_lost_acks = False
        self._listening: list[
            list[Part]
        ] = []  # what is told late, for whoever waits until acks are stored

    def __repr__(self) -> str:
        return f"<Consumer of {self.subscription!r}, {self._state()}>"

    def _state(self) -> str:
        if self._is_closed:
            return "closed"
        if self._error is not None:
            return f"ended: {self._error}"
        return f"{self.statistics.leased} messages leased, {self._link.state}"

    @property
    def mode(self) -> str:
        """shared, key_shared or multicast; empty until the broker has accepted it."""
        return "" if self.accepted is None else self.accepted.mode

    @property
    def statistics(self) -> ConsumerStatistics:
        """What this consumer has received, acknowledged, given back and lost so far."""
        return self._ledger.statistics

    # --- Opening and closing ---

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self._leave(_unheard)  # nobody will leave what was not entered
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        else:  # its own trouble comes first: acks are sent, and not waited for
            self._leave(_unheard)

    async def close(self) -> None:
        """Wait until acks are stored, then leave: unfinished work goes back without counting as failed.

        Should the connection be lost, what was not stored comes again, as ever.
        """
        if self._is_closed:
            return
        done = asyncio.Event()
        is_heard = False
        try:
            with contextlib.suppress(ConnectionLostError):
                await self.flush()
        finally:
            is_heard = self._leave(lambda _answer, _tail: done.set())
        if is_heard:
            with contextlib.suppress(TimeoutError):  # the broker is slow; it will have heard
                await asyncio.wait_for(done.wait(), _CLOSE_TIMEOUT_S)

    def _leave(self, on_answer: OnAnswer) -> bool:
        """Leave, and tell the broker if it knows of the consumer. Whether there will be an answer."""
        self._telling.send()
        connection = self._link.connection
        is_known = (
            connection is not None and connection.consumers.pop(self._number, None) is not None
        )
        self._drop_everything(CONSUMER_CLOSED)
        self._detach()
        if self._on_close is not None:
            self._on_close(self)
        if connection is None or not is_known:
            return False
        number = self._link.next_number()
        connection.request(number, work_heads.Leave(number, self._number), on_answer)
        return True

    def abandon(self) -> None:
        """Close without waiting, because the connection ends anyway."""
        if not self._is_closed:
            self._leave(_unheard)

    # --- What the link and the connection tell ---

    def _ask(self, connection: Connection) -> None:
        if self._number in connection.consumers:
            return
        connection.consumers[self._number] = self
        number = self._link.next_number()
        head = msgspec.structs.replace(self._request, id=number)
        connection.request(number, head, lambda answer, _: self._answered(answer))

    def _answered(self, answer: wire.Answer | RunnelError) -> None:
        if isinstance(answer, work_heads.Consuming):
            self.accepted = answer
            options = answer.options
            self._leases.lease_ns = (options.lease_ms or 0) * _NS_PER_MS
            self._leases.processing_ns_max = (options.processing_ms_max or 0) * _NS_PER_MS
            self._accepted()
            return
        if connection := self._link.connection:
            connection.consumers.pop(self._number, None)
        if isinstance(answer, RunnelError):
            self._refused(answer)
        else:
            self._fail(MalformedError("answer", f"{answer!r:.200} to a consume"))

    def link_down(self) -> None:
        self._drop_everything(CONNECTION_LOST)
        super().link_down()
        self.wake()  # whoever waited for room

    def link_writable(self) -> None:
        self.wake()

    def leased(self, leases: Sequence[Lease], tail: memoryview) -> None:
        batches = unpack_blocks(tail)
        if len(batches) != len(leases):
            raise MalformedError("work", f"{len(leases)} leases, {len(batches)} blocks")
        now_ns = self._timers.monotonic_ns()
        time_ns = self._timers.time_ns()
        for lease, batch in zip(leases, batches, strict=True):
            delivery = Delivery(
                lease,
                batch,
                self,
                now_ns=now_ns,
                time_ns=time_ns,
                lease_ns=self._leases.lease_ns,
            )
            self._ledger.add(delivery)
            self._holding.add(delivery)
        self._leases.watch()

    def recalled(self, parts: Sequence[Part]) -> None:
        self._ledger.recall(parts)
        self._telling.send()

    def told_late(self, parts: Sequence[Part]) -> None:
        for told in self._listening:
            told += parts
        self._ledger.told_late(parts)
        self._tell_late()

    def ended(self, error: RunnelError) -> None:
        self._drop_everything(CONSUMER_ENDED)
        self._refused(error)
        self.wake()

    def _drop_everything(self, reason: str) -> None:
        self._arrivals.clear()
        self._holding.clear()
        self._leases.stop()
        self._ledger.lose(reason)
        self._may_have_lost_acks |= self._telling.forget()
        self._tell_late()

    def _tell_late(self) -> list[LateWork]:
        told = self._ledger.take_late()
        self.late.extend(told)
        if self._on_late is not None:
            for late in told:  # not from here: what it raises is no affair of the connection's
                self._loop.call_soon(self._on_late, late)
        return told

    # --- Handing out ---

    async def __aiter__(self) -> AsyncIterator[Work]:
        # A generator is quicker than __anext__. What it has not given yet stays in the arrivals: breaking off loses
        # nothing, another loop goes on, and several may share the work.
        arrivals = self._arrivals
        while True:
            for work in arrivals.begin_each():
                yield work
                if arrivals.taken_bytes >= _YIELD_BYTES:
                    await self._let_others_run()
            if not await self.wait_arrival():
                return

    async def __anext__(self) -> Work:
        """One message: `await anext(consumer)`."""
        while True:
            for work in self._arrivals.begin_each():
                return work
            if not await self.wait_arrival():
                raise StopAsyncIteration

    async def batches(self) -> AsyncIterator[WorkBatch]:
        """The same work, a delivery at a time."""
        arrivals = self._arrivals
        while True:
            while (delivery := arrivals.take_delivery_nowait()) is not None:
                if (batch := arrivals.begin_batch_nowait(delivery)) is not None:
                    yield batch
                if arrivals.taken_bytes >= _YIELD_BYTES:
                    await self._let_others_run()
            if not await self.wait_arrival():
                return

    async def wait_arrival(self) -> bool:
        """Until something may have arrived. False: the consumer is closed. Raises why it has ended, if it has."""
        if not self._is_begun and not self._is_closed:
            await self.open()
        elif self._error is not None:
            raise self._error.with_traceback(None)
        elif not self._is_closed:
            self._arrivals.taken_bytes = 0
            await self._wait()
        return not self._is_closed

    async def _let_others_run(self) -> None:
        self._arrivals.taken_bytes = 0
        await asyncio.sleep(0)

    # --- For a reader in another thread ---

    async def next_works(self) -> list[Work]:
        """Everything that waits, at least one message, none of it begun; empty once the consumer is closed."""
        while True:
            works = []
            while (work := self._arrivals.take_nowait()) is not None:
                works.append(work)
            if works or not await self.wait_arrival():
                return works

    async def next_batch(self) -> WorkBatch | None:
        """The next of `batches()`; None once the consumer is closed."""
        async for batch in self.batches():
            return batch
        return None

    async def put_back(self, works: Iterable[Work]) -> None:
        """What `next_works` gave and was not begun is to be handed out in another way."""
        self._arrivals.put_back(work.delivery for work in works)

    def begin_nowait(self, work: Work) -> bool:
        """Begin what `next_works` gave, from any thread; False: it was taken back meanwhile."""
        with self._ledger.lock:
            return self._arrivals.begin_nowait(work) is not None

    # --- Acknowledging ---

    def check_loop(self) -> None:
        """Refuse to make a coroutine where nobody could await it: dropped, it would do nothing, silently."""
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

    async def ack(self, *items: Leased, stored: bool = False) -> None:
        """These are done: messages, or batches whole. Waits only for room.

        With `stored` it waits until the broker has stored that; LateAckError, if some came too late.
        """
        # One message that this consumer works on is the usual case, and spared the longer way's calls.
        work = items[0] if len(items) == 1 and not stored else None
        if (
            work.__class__ is Work
            and (delivery := work.delivery).holder is self
            and self._ledger.ack_begun(delivery, work.message.offset)
        ):
            if not self._telling.is_gathering or self._ledger.unsent >= GATHERED_MIN:
                self._telling.gather()
        else:
            self.check_own(items)
            if stored:
                await self._ack_stored(items)
                return
            self.ack_nowait(items)
        connection = self._link.connection
        if connection is not None and not connection.is_writable:
            await self.wait_room()

    def check_own(self, items: Iterable[Leased]) -> None:
        """Refuse what this consumer did not hand out, before anything of the rest is done. From any thread."""
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

    def ack_nowait(self, items: Iterable[Leased]) -> list[LateWork]:
        """Own ones, without waiting for room. Those of them that are late, as far as can be known at once."""
        ledger = self._ledger
        telling = self._telling
        for item in items:
            item.ack_in(ledger)
        if not telling.is_gathering or ledger.is_much_unsent:
            telling.gather()
        return self._tell_late() if ledger.late else []

    async def _ack_stored(self, items: Sequence[Leased]) -> None:
        told: list[Part] = []
        self._listening.append(told)
        try:
            late = self.ack_nowait(items)
            await self._wait_stored()
        finally:
            self._listening.remove(told)
        for part in told:
            item = next((item for item in items if is_concerned(item, part)), None)
            if item is not None:
                place = item.delivery.topic, item.delivery.partition
                late.append(LateWork(*place, part.begin, part.end, part.delivery, LEASE_OVER))
        if late:
            raise LateAckError(
                f"acknowledged too late in {self.subscription!r}, {len(late)} of them: {late[0]}"
            )

    async def ack_up_to(self, item: LeasedMessage) -> None:
        """This message is done, and everything before it of its partition that is leased to this consumer."""
        self.check_own((item,))
        if item.delivery.loss:  # late, and everything before it is another delivery's by now
            item.ack_in(self._ledger)
        else:
            self._ledger.ack_up_to(item.topic, item.partition, item.offset)
        self._telling.gather()
        self._tell_late()
        await self.wait_room()

    async def nack(self, *items: Leased, delay_s: float | None = None, reason: str = "") -> None:
        """These failed, and come again after a delay: this one, or the subscription's."""
        # What cannot be told is refused before the ledger takes anything: nobody else would tell it.
        delay_ms = milliseconds("delay_s", delay_s)
        reason = reason_text(reason)
        self.check_own(items)
        parts: list[Part] = []
        places: set[tuple[str, int]] = set()
        for item in items:
            failed = self._ledger.nack(item)
            parts += failed
            if failed and self.mode == "key_shared":
                places.add((item.delivery.topic, item.delivery.partition))
                for first in item.first_of_keys():
                    self._ledger.drop_later(first)
        self._telling.nack(parts, delay_ms, reason)
        for place in places:
            self._holding.hold(place, self._link)
        await self.wait_room()

    async def extend(self, item: Leased, seconds: float) -> None:
        """Lease an item's delivery for so long from now on, up to the subscription's longest processing time."""
        self.check_own((item,))
        delivery = item.delivery
        lease_ms = milliseconds("seconds", seconds)
        if lease_ms is None:
            raise ClientFault("extend needs seconds")
        if not delivery.loss:
            lease_ns = min(lease_ms * _NS_PER_MS, self._leases.processing_ns_max)
            delivery.deadline_ns = self._timers.monotonic_ns() + lease_ns
            self._telling.renew((delivery.id,), lease_ms)
        await self.wait_room()

    async def flush(self) -> None:
        """Wait until everything acked so far is stored. Late acks are no error here: `late` has them.

        ConnectionLostError: one was lost, and acks with it perhaps. What was not stored comes again.
        """
        if not self._telling.is_stored:
            try:
                await self._wait_stored()
            except LateAckError:  # the broker has just ended the consumer
                self._may_have_lost_acks = True
        if self._may_have_lost_acks:
            self._may_have_lost_acks = False
            raise ConnectionLostError(
                f"the connection, or the consumer, was lost; acks in {self.subscription!r} that were "
                "on their way may have been stored or not"
            )

    async def _wait_stored(self) -> None:
        if self._is_attached:  # otherwise, whatever it was, it is late
            deadline = Deadline(self._timers, self._deadline_s)
            await self._telling.wait_stored(deadline, f"storing acks in {self.subscription!r}")

    @property
    def has_room(self) -> bool:
        """Whether the connection takes more. Without one nothing is there to wait for."""
        connection = self._link.connection
        return connection is None or connection.is_writable

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
        """Call a function for every message, so many at a time: acked when it returns, nacked when it raises.

        An `async def` runs in the loop, a plain function in threads. In key_shared mode messages of one key are
        processed one after the other. Goes on until `stop` is set or the caller is cancelled: then nothing new is
        begun, and what runs has `drain_s` to finish. What has not goes back when the consumer is left.
        """
        source = MessageSource(self._arrivals, self)
        await Processing(
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
        """The same for whole batches. In key_shared mode those of one partition come one after the other."""
        source = BatchSource(self._arrivals, self)
        await Processing(
            self, source, function, self._timers, concurrency=concurrency, on_error=on_error
        ).run(stop, drain_s)


def _unheard(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
    """For an answer that nobody waits for."""
