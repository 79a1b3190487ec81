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
    """The part of `Consumer` that talks to the broker. `Consumer` adds the methods that programs call."""

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
        self.accepted: work_heads.Consuming | None = None  # the broker's answer
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
        # For each call that waits until acks are stored: the late parts reported meanwhile.
        self._late_listeners: list[list[DeliveryPart]] = []

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
        """shared, key_shared or multicast; empty until the broker has accepted the consumer."""
        return "" if self.accepted is None else self.accepted.mode

    @property
    def statistics(self) -> ConsumerStatistics:
        """Counts of the messages received, acknowledged, given back and lost so far."""
        return self._ledger.statistics

    # --- Opening and closing ---

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self._leave(_ignore_answer)  # `__aexit__` will not run
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
        else:  # the caller's error comes first: acks are sent, without waiting until they are stored
            self._leave(_ignore_answer)

    async def close(self) -> None:
        """Wait until acks are stored, then leave. Unfinished messages go back and do not count as failed.

        If the connection is lost, messages whose acks were not stored come again.
        """
        if self._is_closed:
            return
        done = asyncio.Event()
        has_answer = False
        try:
            with contextlib.suppress(ConnectionLostError):
                await self.flush()
        finally:
            has_answer = self._leave(lambda _answer, _tail: done.set())
        if has_answer:
            with contextlib.suppress(TimeoutError):  # the broker is slow; the request is sent
                await asyncio.wait_for(done.wait(), _CLOSE_TIMEOUT_S)

    def _leave(self, on_answer: OnAnswer) -> bool:
        """Leave, and ask the broker to remove the consumer if it has it. Returns whether an answer follows."""
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
            self._leave(_ignore_answer)

    # --- Events of the link and the connection ---

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
        self.wake()  # also calls that wait for room

    def link_writable(self) -> None:
        self.wake()

    @abstractmethod
    def leased(self, leases: Sequence[Lease], tail: memoryview) -> None:
        """Take messages that the broker has leased to this consumer."""

    def recalled(self, parts: Sequence[DeliveryPart]) -> None:
        self._ledger.recall(parts)
        self._ack_sender.send()

    def reported_late(self, parts: Sequence[DeliveryPart]) -> None:
        for reported in self._late_listeners:
            reported += parts
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
        found = self._ledger.take_late()
        self.late.extend(found)
        if self._on_late is not None:
            for late in (
                found
            ):  # called by the loop: an error of the callback must not reach the connection
                self._loop.call_soon(self._on_late, late)
        return found

    # --- Stored acks ---

    async def flush(self) -> None:
        """Wait until everything acked so far is stored. Late acks raise no error here: they are in `late`.

        ConnectionLostError: a connection was lost, and perhaps acks with it. Messages whose acks were not stored come
        again.
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
        if self._is_attached:  # otherwise every ack is late
            deadline = Deadline(self._timers, self._deadline_s)
            await self._ack_sender.wait_stored(deadline, f"storing acks in {self.subscription!r}")


def _ignore_answer(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
    """The callback of a request whose answer is not awaited."""
