"""A consumer's session with the broker: joining the subscription, taking leases, and leaving."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from runnel.client.connection import BrokerConnection, Deadline, OnAnswer, Router, Timers
from runnel.client.consumer.ack_sender import AckSender
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.client.consumer.lease_renewer import LeaseRenewer
from runnel.client.consumer.ledger import (
    CONNECTION_LOST,
    CONSUMER_CLOSED,
    CONSUMER_ENDED,
    ConsumerStatistics,
    Ledger,
)
from runnel.client.consumer.nack_barrier import NackBarrier
from runnel.client.consumer.reconnecting_reader import ReconnectingReader
from runnel.client.consumer.work import LateWork
from runnel.errors import ConnectionLostError, LateAckError, MalformedError, RunnelError
from runnel.formats import wire, work_heads
from runnel.formats.work_heads import DeliveryPart, Lease

_LATE_MAX: Final = 1000
_CLOSE_TIMEOUT_S: Final = 2.0
_NS_PER_MS: Final = 1_000_000


class ConsumerSession(ReconnectingReader):
    """The part of `Consumer` that speaks with the broker. `Consumer` adds what programs call."""

    def __init__(
        self,
        router: Router,
        timers: Timers,
        request: work_heads.Consume,
        *,
        on_late: Callable[[LateWork], object] | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Any], object] | None = None,
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
        self._queue = DeliveryQueue(self._ledger, timers.monotonic_ns, self.wake)
        self._barrier = NackBarrier(self._queue)
        self._ack_sender = AckSender(self._ledger, lambda: self._link, number, self.reported_late)
        self._renewer = LeaseRenewer(self._ledger, timers, self._ack_sender.renew)
        self._may_have_lost_acks = False
        self._late_listeners: list[
            list[DeliveryPart]
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
        self._ack_sender.send()
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

    def _ask(self, connection: BrokerConnection) -> None:
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
            self._renewer.lease_ns = (options.lease_ms or 0) * _NS_PER_MS
            self._renewer.processing_ns_max = (options.processing_ms_max or 0) * _NS_PER_MS
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

    @abstractmethod
    def leased(self, leases: Sequence[Lease], tail: memoryview) -> None:
        """Take what the broker has leased to this consumer."""

    def recalled(self, parts: Sequence[DeliveryPart]) -> None:
        self._ledger.recall(parts)
        self._ack_sender.send()

    def reported_late(self, parts: Sequence[DeliveryPart]) -> None:
        for told in self._late_listeners:
            told += parts
        self._ledger.reported_late(parts)
        self._report_late()

    def ended(self, error: RunnelError) -> None:
        self._drop_everything(CONSUMER_ENDED)
        self._refused(error)
        self.wake()

    def _drop_everything(self, reason: str) -> None:
        self._queue.clear()
        self._barrier.clear()
        self._renewer.stop()
        self._ledger.lose(reason)
        self._may_have_lost_acks |= self._ack_sender.forget()
        self._report_late()

    def _report_late(self) -> list[LateWork]:
        told = self._ledger.take_late()
        self.late.extend(told)
        if self._on_late is not None:
            for late in told:  # not from here: what it raises is no affair of the connection's
                self._loop.call_soon(self._on_late, late)
        return told

    # --- Acks that are stored ---

    async def flush(self) -> None:
        """Wait until everything acked so far is stored. Late acks are no error here: `late` has them.

        ConnectionLostError: one was lost, and acks with it perhaps. What was not stored comes again.
        """
        if not self._ack_sender.is_stored:
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
            await self._ack_sender.wait_stored(deadline, f"storing acks in {self.subscription!r}")


def _unheard(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
    """For an answer that nobody waits for."""
