"""A consumer's parts as one: joining the subscription at every node, dividing the window, and leaving."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from runnel.client.connection import (
    Deadline,
    Link,
    OnAnswer,
    Timers,
    warn_of_habits,
)
from runnel.client.consumer.deliveries import ACKED, HeldDelivery, LeaseHolder
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.client.consumer.handover import Handover
from runnel.client.consumer.ledger import (
    CONNECTION_LOST,
    CONSUMER_CLOSED,
    BegunWork,
    ConsumerStatistics,
    Ledger,
)
from runnel.client.consumer.part import ConsumerPart
from runnel.client.consumer.reconnecting_reader import ReaderLinks
from runnel.client.consumer.window_shares import WindowShares
from runnel.client.consumer.work import LateWork
from runnel.errors import ConnectionLostError, RunnelError
from runnel.formats import wire, work_heads
from runnel.formats.work_heads import DeliveryPart, HeldLease

_LATE_MAX: Final = 1000
_CLOSE_TIMEOUT_S: Final = 2.0


class ConsumerSession(ABC):
    """The part of `Consumer` that talks to the nodes. `Consumer` adds the methods that programs call."""

    renews_leases = True

    def __init__(
        self,
        router: ReaderLinks,
        timers: Timers,
        request: work_heads.Consume,
        *,
        on_late: Callable[[LateWork], object] | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Any], object] | None = None,
    ) -> None:
        self.patterns: Final = tuple(request.patterns)
        self.subscription: Final = request.subscription
        self.thread_id: Final = threading.get_ident()
        self.late: Final[deque[LateWork]] = deque(maxlen=_LATE_MAX)
        self.accepted: work_heads.Consuming | None = None  # the first node's answer
        self.begun: Final = BegunWork()
        self.queue: Final = DeliveryQueue(self.begun, timers.monotonic_ns, self.wake)
        self._router = router
        self._timers = timers
        self._request = request
        self._what = f"consuming from {request.subscription!r}"
        self._deadline_s = deadline_s
        self._on_late = on_late
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._holder = token_hex(12)
        self._orders = itertools.count(1)
        self._parts: dict[Link, ConsumerPart] = {}
        # Several nodes divide the window. One broker has all of it, and nothing is counted.
        self._shares: WindowShares[ConsumerPart] | None = None
        self._handover = Handover(self, timers, request.consumer)
        self._is_begun = False
        self._is_closed = False
        self._error: RunnelError | None = None
        self._may_have_lost_acks = False
        self._former = _NO_STATISTICS  # of parts at nodes that are gone
        self._waiting: set[asyncio.Future[None]] = set()
        # For each call that waits until acks are stored: the late parts reported meanwhile.
        self._late_listeners: list[list[tuple[Ledger, DeliveryPart]]] = []

    def __repr__(self) -> str:
        return f"<Consumer of {self.subscription!r}, {self._state()}>"

    def _state(self) -> str:
        if self._is_closed:
            return "closed"
        if self._error is not None:
            return f"ended: {self._error}"
        links = list(self._parts) or [self._router.home]
        return (
            f"{self.statistics.leased} messages leased, {', '.join(link.state for link in links)}"
        )

    @property
    @abstractmethod
    def holder(self) -> LeaseHolder:
        """The consumer, as its messages see it."""

    @property
    def mode(self) -> str:
        """shared, key_shared or multicast; empty until the broker has accepted the consumer."""
        return "" if self.accepted is None else self.accepted.mode

    @property
    def statistics(self) -> ConsumerStatistics:
        """Counts of the messages received, acknowledged, given back and lost so far."""
        total = self._former
        for ledger in [part.ledger for part in list(self._parts.values())]:
            total = total.plus(ledger.statistics)
        return total.plus(self._handover.parked.ledger.statistics)

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

    async def open(self) -> None:
        """Wait until every node has accepted it."""
        self._begin()
        deadline = Deadline(self._timers, self._deadline_s)
        while not self._is_open and self._error is None and not self._is_closed:
            await self._wait(deadline)
        if self._error is not None:
            await self.close()
            raise self._error
        if not self._is_closed:
            await warn_of_habits(self._router, self.patterns, deadline)

    @property
    def _is_open(self) -> bool:
        return bool(self._parts) and all(part.was_attached for part in self._parts.values())

    def _begin(self) -> None:
        if not self._is_begun and not self._is_closed:
            self._is_begun = True
            self._router.watch_nodes(self._follow_nodes)
            self._follow_nodes()

    async def close(self) -> None:
        """Wait until acks are stored, then leave. Unfinished messages go back and do not count as failed.

        If a connection is lost, messages whose acks were not stored come again.
        """
        if self._is_closed:
            return
        done = asyncio.Event()
        unanswered = 0

        def answered(_answer: wire.Answer | RunnelError, _tail: memoryview) -> None:
            nonlocal unanswered
            unanswered -= 1
            if not unanswered:
                done.set()

        try:
            with contextlib.suppress(ConnectionLostError):
                await self.flush()
        finally:
            unanswered = self._leave(answered)
        if unanswered:
            with contextlib.suppress(TimeoutError):  # the broker is slow; the request is sent
                await asyncio.wait_for(done.wait(), _CLOSE_TIMEOUT_S)

    def _leave(self, on_answer: OnAnswer) -> int:
        """Leave, and ask the nodes that have the consumer to remove it. Returns how many answers follow."""
        unanswered = sum(part.leave(on_answer) for part in self._parts.values())
        self._handover.close(CONSUMER_CLOSED)
        self._router.unwatch_nodes(self._follow_nodes)
        self._is_closed = True
        self.wake()
        if self._on_close is not None:
            self._on_close(self)
        return unanswered

    def abandon(self) -> None:
        """Close without waiting, because the connection ends anyway."""
        if not self._is_closed:
            self._leave(_ignore_answer)

    # --- Nodes ---

    def _follow_nodes(self) -> None:
        """Have a part at each living node; one broker is its own node."""
        if self._is_closed or self._error is not None:
            return
        router = self._router
        is_alone = not router.is_several
        links = dict.fromkeys(router.link(address) for address in router.node_addresses())
        for link, part in list(self._parts.items()):
            if link not in links or part.is_at_home != is_alone:
                self._end_part(link)
        new = [link for link in links if link not in self._parts]
        if not is_alone and self._shares is None:
            window = self._request.window_messages, self._request.window_bytes
            self._shares = WindowShares(*window)
        for link in new:
            self._parts[link] = self._new_part(link, is_alone=is_alone)
        self._divide_window()
        for link in new:
            if link in self._parts:  # no part before it has failed
                self._parts[link].begin()

    def _new_part(self, link: Link, *, is_alone: bool) -> ConsumerPart:
        request: work_heads.Consume | work_heads.ConsumePart = self._request
        if not is_alone:
            values = msgspec.structs.asdict(request)
            request = work_heads.ConsumePart(**values, holder=self._holder)
        part = ConsumerPart(
            self,
            self._router,
            link,
            self._timers,
            request,
            deadline_s=self._deadline_s,
            is_at_home=is_alone,
        )
        if self._shares is not None:
            self._shares.add(part)
            part.resize(0, 0)  # until it has a share
        return part

    def _end_part(self, link: Link) -> None:
        """The node is gone: its shards come to others, and with them what was not acknowledged."""
        part = self._parts.pop(link)
        part.leave(_ignore_answer, CONNECTION_LOST)
        self._former = self._former.plus(part.ledger.statistics)
        self._may_have_lost_acks |= part.may_have_lost_acks

    # --- Calls of the parts ---

    def next_order(self) -> int:
        return next(self._orders)

    def part_accepted(self, part: ConsumerPart) -> None:
        self.accepted = self.accepted or part.accepted

    def part_failed(self, part: ConsumerPart, error: RunnelError) -> None:
        if part.link in self._parts and self._error is None and not self._is_closed:
            self._error = error
            for other in self._parts.values():
                if other is not part:
                    other.leave(_ignore_answer, str(error))
            self._handover.close(str(error))  # no other node leases anything to it any more
            self.wake()

    def part_lost(self, part: ConsumerPart) -> None:
        self._handover.lost(part)
        if self._shares is not None:
            self._shares.reset(part)
            self._loop.call_soon(self._divide_window)

    def part_arrived(self, part: ConsumerPart, delivery: HeldDelivery) -> None:
        self._handover.arrived(delivery)
        if self._shares is not None:
            self._count_used(part)

    def part_late(self, part: ConsumerPart, late: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]:
        told = self._handover.late(part, late)
        for reported in self._late_listeners:
            reported += [(part.ledger, each) for each in told]
        return told

    def part_recalled(self, part: ConsumerPart) -> None:  # noqa: B027 - few want to know
        """Nothing to do: recalled messages are not handed out any more, and `Work.is_late` tells of others."""

    def part_moving(self, part: ConsumerPart, epoch: int, deliveries: Sequence[int]) -> None:
        found = [part.ledger.deliveries.get(number) for number in deliveries]
        used = sum(_used(delivery) for delivery in found if delivery is not None)
        self._handover.moving(part, epoch, deliveries)
        if self._shares is not None:
            self._count_used(part)
            self._shares.passed_on(part, used)
            part.resize(*self._shares.share(part))
            self._divide_window()

    def part_holds(self, part: ConsumerPart, leases: Sequence[HeldLease]) -> None:
        self._handover.held(part, leases)
        self._count_used(part)
        self._divide_window()

    def report_late(self, ledger: Ledger) -> list[LateWork]:
        found = ledger.take_late()
        self.late.extend(found)
        if self._on_late is not None:
            for late in found:
                # Called by the loop: an error of the callback must not reach the connection.
                self._loop.call_soon(self._on_late, late)
        return found

    # --- The window ---

    def part_wants(self, part: ConsumerPart, *, is_wanting: bool) -> None:
        if self._shares is not None:
            self._shares.wants(part, is_wanting=is_wanting)
            self._divide_window()

    def part_settled(self, part: ConsumerPart) -> None:
        """Acks were sent: the part may have room that another one needs."""
        if self._shares is not None:
            self._count_used(part)
            if self._shares.is_contended:
                self._divide_window()

    def _count_used(self, part: ConsumerPart) -> None:
        if self._shares is not None:
            self._shares.uses(part, sum(map(_used, part.ledger.deliveries.values())))

    def _divide_window(self) -> None:
        shares = self._shares
        if shares is None or self._is_closed:
            return
        parked = self._handover.parked.ledger.deliveries.values()
        shares.moving = sum(map(_used, parked))
        while changes := shares.changes():
            for change in changes:
                part = change.part
                part.resize(change.messages, change.size_bytes)
                if change.needs_confirmation:
                    self._confirm_window(part)

    def resize(self, messages: int, size_bytes: int) -> None:
        """Change the whole window of a consumer of several nodes."""
        self._request = msgspec.structs.replace(
            self._request, window_messages=messages, window_bytes=size_bytes
        )
        if self._shares is not None:
            self._shares.resize(messages, size_bytes)
            self._divide_window()
            for part in self._parts.values():
                part.resize(*self._shares.share(part))

    def _confirm_window(self, part: ConsumerPart) -> None:
        """Wait for what the node has leased before it knew of the smaller share."""

        def confirm(_answer: wire.Answer | RunnelError, _tail: memoryview) -> None:
            if self._shares is not None:
                self._count_used(part)
                self._shares.confirmed(part)
                self._divide_window()

        if self._shares is not None and not part.ping(confirm):
            self._shares.confirmed(part)

    # --- Stored acks ---

    async def flush(self) -> None:
        """Wait until everything acked so far is stored. Late acks raise no error here: they are in `late`.

        ConnectionLostError: a connection was lost, and perhaps acks with it. Messages whose acks were not stored come
        again.
        """
        while True:
            await self._wait_taken_over()
            parts = list(self._parts.values())
            if len(parts) == 1:
                await parts[0].flush()
            elif parts:
                await asyncio.gather(*[part.flush() for part in parts])
            for part in parts:
                self._may_have_lost_acks |= part.may_have_lost_acks
                part.may_have_lost_acks = False
            # Meanwhile a node may have given up a shard before the acks came to it: its next owner gets them.
            if self._is_closed or not self._handover.has_acks:
                break
        if self._may_have_lost_acks:
            self._may_have_lost_acks = False
            raise ConnectionLostError(
                f"the connection, or the consumer, was lost; acks in {self.subscription!r} that were "
                "on their way may have been stored or not"
            )

    async def _wait_stored(self) -> None:
        while True:
            await self._wait_taken_over()
            parts = list(self._parts.values())
            if len(parts) == 1:
                await parts[0].wait_stored()
            elif parts:
                await asyncio.gather(*[part.wait_stored() for part in parts])
            if self._is_closed or not self._handover.has_acks:  # as in `flush`
                return

    async def _wait_taken_over(self) -> None:
        """Wait until acks of messages whose shard moves can be sent to its next owner."""
        deadline = Deadline(self._timers, self._deadline_s)
        while self._handover.has_acks and not self._is_closed:
            await self._wait(deadline)

    # --- Waiting ---

    def wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, deadline: Deadline | None = None) -> None:
        """Wait until `wake` is called."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            if deadline is None:
                await waiter
            else:
                await deadline.wait(waiter, lambda: self._late_link.expired(self._what, deadline))
        finally:
            self._waiting.discard(waiter)

    @property
    def _late_link(self) -> Link:
        """The link of a part that is waited for."""
        parts = self._parts.values()
        return next((part.link for part in parts if not part.was_attached), self._router.home)


def _used(delivery: HeldDelivery) -> int:
    """How many of its messages take room in the window: until an ack is sent."""
    return delivery.left + delivery.states.count(ACKED)


_NO_STATISTICS: Final = ConsumerStatistics(
    received=0, acked=0, nacked=0, recalled=0, late=0, leased=0
)


def _ignore_answer(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
    """The callback of a request whose answer is not awaited."""
