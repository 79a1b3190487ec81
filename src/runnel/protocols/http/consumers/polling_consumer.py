"""A consumer over HTTP: it has no lasting connection, but polls.

The consumer group leases to it only what a request waits for: its window is open while a request waits, and closed
otherwise. Every change of its leases closes the window first and wakes the waiting request, which opens the window
again as far as it needs. So an ack, or a lease that ends, makes no room for messages that no request wants.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from runnel.broker.consumer_groups import OpenConsumer, WorkDelivery
from runnel.errors import RunnelError
from runnel.formats.message import Message
from runnel.formats.work_heads import Attempt, DeliveryPart
from runnel.platform.clock import Clock
from runnel.protocols.http.consumers.recent_acks import Offsets, RecentAcks

_WINDOW_BYTES_MAX: Final = 2**30


class TakeRequest(msgspec.Struct, frozen=True, gc=False):
    """How much a request asks for. It gets at least one message, whatever the size of that message."""

    messages_max: int
    bytes_max: int
    lease_ns: int | None = None  # instead of the subscription's


class _Arrival(msgspec.Struct):
    """A delivery that no request has taken whole, and the offsets that are taken or recalled."""

    delivery: WorkDelivery
    gone: set[int]

    @property
    def left(self) -> int:
        return self.delivery.messages - len(self.gone)

    def offsets(self) -> list[int]:
        """The offsets of the messages that no request has taken."""
        return [each.offset for each in self.delivery.each() if each.offset not in self.gone]


class Leased(NamedTuple):
    """A message that is leased to the client of a request."""

    delivery: int
    message: Message
    before: Attempt | None  # its earlier deliveries, if there were any


class PollingConsumer:
    """A `WorkSink` that keeps messages until a request takes them.

    Requests are served one after the other, in the order in which they came. Messages that no request has taken when
    the last one ends go back to the consumer group, uncounted.
    """

    def __init__(
        self,
        consumer_id: str,
        connection_id: int,
        peer: str,
        clock: Clock,
        on_ended: Callable[[], object],
    ) -> None:
        self.id: Final = consumer_id
        self.connection_id: Final = connection_id
        self.peer: Final = peer
        self.used_ns = clock.monotonic_ns()
        self._clock = clock
        self._on_ended = on_ended
        self._consumer: OpenConsumer
        self._turn = asyncio.Lock()
        self._requests = 0
        self._arrived: deque[_Arrival] = deque()
        self._recent_acks = RecentAcks()
        self._wake_up: asyncio.Future[None] | None = None
        self._error: RunnelError | None = None
        self._is_closed = False

    def open(self, consumer: OpenConsumer) -> None:
        """Begin as a member of the consumer group, unless the broker has ended the membership meanwhile."""
        self._consumer = consumer
        if self._error is not None:
            consumer.close(is_clean=True)
            raise self._error
        consumer.start()

    @property
    def consumer(self) -> OpenConsumer:
        return self._consumer

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_free(self) -> bool:
        """Whether no request waits, and no client has messages of it."""
        return not self._requests and not self._consumer.leased[0]

    # --- Taking ---

    async def take(self, wanted: TakeRequest, *, may_wait: bool) -> list[Leased]:
        """Messages for a request. `may_wait`: wait until there are any, or the request is cancelled."""
        self.used_ns = self._clock.monotonic_ns()
        if not may_wait and self._turn.locked():
            return []
        self._requests += 1
        try:
            if not may_wait:  # it awaits nothing, so no other request comes in between
                return await self._take(wanted, may_wait=False)
            async with self._turn:
                return await self._take(wanted, may_wait=True)
        finally:
            self._requests -= 1
            self.used_ns = self._clock.monotonic_ns()
            if not self._requests:
                self._give_back_unclaimed()

    def give_back(self, leased: Sequence[Leased]) -> None:
        """Return messages whose client disconnected before it got them: they go to another consumer, uncounted."""
        back: dict[int, list[int]] = {}
        for delivery, message, _ in leased:
            back.setdefault(delivery, []).append(message.offset)
        self._return(back)

    def _give_back_unclaimed(self) -> None:
        if self._arrived:
            back = {each.delivery.lease.delivery: each.offsets() for each in self._arrived}
            self._arrived.clear()
            self._return(back)

    def _return(self, offsets: Offsets) -> None:
        if offsets and not self._is_closed:
            self._close_window()
            self._consumer.give_back(_parts(offsets))
            self._wake()

    async def _take(self, wanted: TakeRequest, *, may_wait: bool) -> list[Leased]:
        try:
            while True:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    return []
                if not self._arrived:
                    self._open_window(wanted)
                if self._arrived:
                    found = self._taken(wanted)
                    if found:
                        return found
                elif may_wait:
                    self._wake_up = asyncio.get_running_loop().create_future()
                    await self._wake_up
                else:
                    return []
        finally:
            self._close_window()

    def _open_window(self, wanted: TakeRequest, had: int = 0, had_bytes: int = 0) -> None:
        """Make room for what is wanted. Messages that the broker has in memory arrive before this returns."""
        leased, leased_bytes = self._consumer.leased
        messages = wanted.messages_max - had
        if leased and not had:
            # One message fits whatever its size. The rest is requested once it has arrived, within the wanted bytes.
            self._consumer.resize(leased + 1, _WINDOW_BYTES_MAX)
        else:
            window_bytes = min(leased_bytes + wanted.bytes_max - had_bytes, _WINDOW_BYTES_MAX)
            self._consumer.resize(leased + messages, window_bytes)

    def _close_window(self) -> None:
        if not self._is_closed:
            self._consumer.resize(0, 0)

    def _taken(self, wanted: TakeRequest) -> list[Leased]:
        """As many messages as are wanted, of those that have arrived and those that arrive at once."""
        arrived = size = 0
        for each in self._arrived:
            arrived += each.left
            size += each.delivery.size
        if arrived < wanted.messages_max and size < wanted.bytes_max:
            self._open_window(wanted, arrived, size)
        found: list[Leased] = []
        size = 0
        while self._arrived and len(found) < wanted.messages_max:
            if found and size >= wanted.bytes_max:
                break
            arrival = self._arrived[0]
            gone, lease = arrival.gone, arrival.delivery.lease
            before = {attempt.offset: attempt for attempt in lease.attempts}
            for message in arrival.delivery.each():
                if message.offset not in gone and len(found) < wanted.messages_max:
                    gone.add(message.offset)
                    found.append(Leased(lease.delivery, message, before.get(message.offset)))
                    size += message.size
            if not arrival.left:
                self._arrived.popleft()
        # The lease begins when the messages leave. The request may choose another length than the subscription's.
        deliveries = list(dict.fromkeys(each.delivery for each in found))
        self._consumer.renew(deliveries, lease_ns=wanted.lease_ns)
        return found

    def _wake(self) -> None:
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    # --- Acknowledging ---

    def ack(self, offsets: Offsets) -> set[tuple[int, int]]:
        """Returns the late ones, by delivery and offset. A message acknowledged recently may be acknowledged again."""
        self.forget_acked()
        offsets = self._recent_acks.unknown(offsets)
        self._begin_settling()
        late = _offsets(self._consumer.ack((), _parts(offsets)) if offsets else ())
        acked = {(number, offset) for number, named in offsets.items() for offset in named}
        self._recent_acks.add(sorted(acked - late), self.used_ns)
        self._wake()
        return late

    def nack(self, offsets: Offsets, *, delay_ns: int | None, reason: str) -> set[tuple[int, int]]:
        self._begin_settling()
        late = self._consumer.nack(_parts(offsets), delay_ns=delay_ns, reason=reason)
        self._wake()
        return _offsets(late)

    def extend(self, offsets: Offsets, lease_ns: int | None) -> set[tuple[int, int]]:
        """Returns the late ones. A delivery has one lease, so its other messages are extended too."""
        self.used_ns = self._clock.monotonic_ns()
        late = _offsets(self._consumer.missing(_parts(offsets)))
        held = [
            number
            for number, named in offsets.items()
            if any((number, offset) not in late for offset in named)
        ]
        self._consumer.renew(held, lease_ns=lease_ns)
        return late

    def forget_acked(self) -> None:
        """Forget acks that are so old that no client repeats them."""
        self._recent_acks.forget_old(self._clock.monotonic_ns())

    def _begin_settling(self) -> None:
        self.used_ns = self._clock.monotonic_ns()
        self._close_window()

    # --- Called by the broker (WorkSink) ---

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:  # noqa: ARG002
        self._arrived.extend(_Arrival(delivery, set()) for delivery in deliveries)
        self._wake()

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:  # noqa: ARG002
        """Messages that a client has stay leased until it acknowledges them or the lease ends; others go back."""
        back: dict[int, list[int]] = {}
        for arrival in self._arrived:
            number = arrival.delivery.lease.delivery
            named = [
                offset
                for part in parts
                if part.delivery == number
                for offset in range(part.begin, part.end)
                if offset not in arrival.gone
            ]
            if named:
                arrival.gone.update(named)
                back[number] = named
        if back:
            self._arrived = deque(each for each in self._arrived if each.left)
            # Later, because the broker is still in the middle of recalling.
            asyncio.get_running_loop().call_soon(self._consumer.recalled, _parts(back))

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        """Nothing to do: the answer to the late request says so."""

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:  # noqa: ARG002
        """Messages of these deliveries are owed to any consumer again."""
        self._close_window()
        if self._arrived:
            over = set(deliveries)
            self._arrived = deque(
                each for each in self._arrived if each.delivery.lease.delivery not in over
            )
        self._wake()

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:  # noqa: ARG002
        self._error = error
        self._end()

    # --- Closing ---

    def close(self) -> None:
        """Leave the consumer group. Leased messages go back and do not count as failed."""
        if not self._is_closed:
            self._consumer.close(is_clean=True)
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._arrived.clear()
        self._on_ended()
        self._wake()


def _offsets(parts: Iterable[DeliveryPart]) -> set[tuple[int, int]]:
    """Each message by its delivery and offset."""
    return {(part.delivery, offset) for part in parts for offset in range(part.begin, part.end)}


def _parts(offsets: Offsets) -> list[DeliveryPart]:
    """Parts of deliveries; neighbouring offsets share a part."""
    parts: list[DeliveryPart] = []
    for delivery, named in offsets.items():
        for offset in sorted(named):
            if parts and parts[-1].delivery == delivery and parts[-1].end == offset:
                parts[-1] = DeliveryPart(delivery, parts[-1].begin, offset + 1)
            else:
                parts.append(DeliveryPart(delivery, offset, offset + 1))
    return parts
