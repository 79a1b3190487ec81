"""A consumer's seat: acknowledged work for somebody who has no connection, but asks now and then.

The broker leases to a seat only what a request waits for. Its window is what the seat has in flight and what is wanted
while a request waits, and nothing otherwise. What the broker does not tell, that leases have ended by time, is reckoned
here by the same clock, a little ahead of it: no lease that ends makes room for messages that nobody wants.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery
from runnel.errors import RunnelError
from runnel.formats.message import Message
from runnel.formats.work_heads import Attempt, Part
from runnel.platform.clock import Clock
from runnel.protocols.http.acked import AckedLately, Offsets

_NS_PER_SECOND: Final = 1_000_000_000
# A lease that ends so soon counts as ended: the broker must not find room that it makes before it is reckoned with.
_AHEAD_NS: Final = 5_000_000
_WINDOW_BYTES_MAX: Final = 2**30
_NEVER_NS: Final = 2**63 - 1
# What the broker reckons for a delivery beyond its bytes, at most.
_DELIVERY_BYTES: Final = 1024


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """What a request asks for. One message is given whatever its size."""

    messages_max: int
    bytes_max: int
    lease_ns: int | None = None  # instead of the subscription's


class _Arrival(msgspec.Struct):
    """A delivery of which something has not been handed out, and the offsets that have, or are not to be."""

    delivery: WorkDelivery
    gone: set[int]

    @property
    def left(self) -> int:
        return self.delivery.messages - len(self.gone)


class Leased(NamedTuple):
    """A message for the one who asked."""

    arrival: _Arrival
    message: Message
    before: Attempt | None  # how it fared, if it was delivered before

    @property
    def delivery(self) -> int:
        return self.arrival.delivery.lease.delivery


class _Lease(msgspec.Struct):
    """A delivery as far as it is not settled."""

    begin: int
    end: int
    left: int
    size: int
    deadline_ns: int
    settled: set[int]


class Seat:
    """The `WorkSink` of one consumer. Requests are served one after the other, in the order in which they came."""

    def __init__(
        self,
        seat_id: str,
        connection_id: int,
        peer: str,
        clock: Clock,
        on_ended: Callable[[], object],
    ) -> None:
        self.id: Final = seat_id
        self.connection_id: Final = connection_id
        self.peer: Final = peer
        self.used_ns = clock.monotonic_ns()
        self._clock = clock
        self._on_ended = on_ended
        self._consumer: WorkConsumer
        self._turn = asyncio.Lock()
        self._requests = 0
        self._arrived: deque[_Arrival] = deque()
        self._leases: dict[int, _Lease] = {}
        self._messages = 0  # of all leases, that are not settled
        self._bytes = 0
        self._due_ns = _NEVER_NS  # no lease ends before
        self._acked_lately = AckedLately()
        self._news: asyncio.Future[None] | None = None
        self._error: RunnelError | None = None
        self._is_closed = False

    def open(self, consumer: WorkConsumer) -> None:
        """It has its place in the consumer group, unless the broker has ended that meanwhile."""
        self._consumer = consumer
        if self._error is not None:
            consumer.close(is_clean=True)
            raise self._error
        consumer.start()

    @property
    def consumer(self) -> WorkConsumer:
        return self._consumer

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_free(self) -> bool:
        """Whether nobody waits, and nothing is leased to it that anybody was given."""
        self._expire()
        return not self._requests and self._messages == sum([each.left for each in self._arrived])

    # --- Taking ---

    async def take(self, wanted: Wanted, *, may_wait: bool) -> list[Leased]:
        """Messages for a request. `may_wait`: until there are any, or it is cancelled."""
        self.used_ns = self._clock.monotonic_ns()
        if not may_wait and self._turn.locked():
            return []
        self._requests += 1
        try:
            if not may_wait:  # it is over before anybody else can come
                return await self._take(wanted, may_wait=False)
            async with self._turn:
                return await self._take(wanted, may_wait=True)
        finally:
            self._requests -= 1
            self.used_ns = self._clock.monotonic_ns()

    def give_back_unclaimed(self) -> None:
        """If messages came for somebody who has gone, and for nobody else: back they go, at once, and uncounted."""
        if self._arrived and self.is_free:
            self.close()

    def put_back(self, leased: Sequence[Leased]) -> None:
        """The one who asked had gone before it could be told: as if these had not been handed out."""
        for arrival, message, _ in leased:
            if arrival.delivery.lease.delivery in self._leases:
                arrival.gone.discard(message.offset)
                if not any(each is arrival for each in self._arrived):
                    self._arrived.appendleft(arrival)
        self._wake()

    async def _take(self, wanted: Wanted, *, may_wait: bool) -> list[Leased]:
        try:
            while True:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    return []
                if not self._arrived:
                    self._ask(wanted)
                if self._arrived:
                    found = self._handed_out(wanted)
                    if found:
                        return found
                elif may_wait:
                    await self._wait_news()
                else:
                    return []
        finally:
            if not self._is_closed:
                self._consumer.resize(0, 0)

    def _ask(self, wanted: Wanted, had: int = 0) -> None:
        """Make room for what is wanted. What is there already is delivered before this returns."""
        in_flight, in_flight_bytes = self._in_flight()
        messages = wanted.messages_max - had
        if in_flight and not had:
            # One fits whatever its size; the rest is asked for, within the bytes that are wanted, once that is there.
            self._consumer.resize(in_flight + 1, _WINDOW_BYTES_MAX)
        else:
            window_bytes = min(in_flight_bytes + wanted.bytes_max, _WINDOW_BYTES_MAX)
            self._consumer.resize(in_flight + messages, window_bytes)

    def _handed_out(self, wanted: Wanted) -> list[Leased]:
        """Of what has arrived, and of what there is besides, as much as is wanted."""
        arrived = size = 0
        for each in self._arrived:
            arrived += each.left
            size += each.delivery.size
        if arrived < wanted.messages_max and size < wanted.bytes_max:
            self._ask(wanted, arrived)
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
                    found.append(Leased(arrival, message, before.get(message.offset)))
                    size += message.size
            if not arrival.left:
                self._arrived.popleft()
        self._begin_leases({each.delivery for each in found}, wanted.lease_ns)
        return found

    async def _wait_news(self) -> None:
        """Until something has happened, or a lease is about to end."""
        self._news = asyncio.get_running_loop().create_future()
        if not self._leases:
            await self._news
            return
        seconds = (self._due_ns - _AHEAD_NS - self._clock.monotonic_ns()) / _NS_PER_SECOND
        sleeping = asyncio.get_running_loop().create_task(self._clock.sleep(max(seconds, 0)))
        try:
            await asyncio.wait({self._news, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            await asyncio.wait({sleeping})

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # --- Leases ---

    def _in_flight(self) -> tuple[int, int]:
        """Messages and bytes that are leased to it, without leases that end now."""
        self._expire()
        return self._messages, self._bytes

    def _expire(self) -> None:
        now_ns = self._clock.monotonic_ns() + _AHEAD_NS
        if now_ns < self._due_ns:
            return
        over = [number for number, lease in self._leases.items() if lease.deadline_ns <= now_ns]
        for number in over:
            self._drop(number)
        if over:
            self._arrived = deque(
                each for each in self._arrived if each.delivery.lease.delivery in self._leases
            )
        self._due_ns = min(
            (lease.deadline_ns for lease in self._leases.values()), default=_NEVER_NS
        )

    def _drop(self, delivery: int) -> None:
        lease = self._leases.pop(delivery)
        self._messages -= lease.left
        self._bytes -= lease.size

    def _begin_leases(self, deliveries: Iterable[int], lease_ns: int | None) -> None:
        """Lease anew what is leased to it, from now on, unless it has just been leased for as long."""
        options = self._consumer.definition.options
        lease_ns = min(
            options.lease_ns if lease_ns is None else lease_ns, options.processing_ns_max
        )
        deadline_ns = self._clock.monotonic_ns() + lease_ns
        known = [
            number
            for number in deliveries
            if number in self._leases
            and abs(self._leases[number].deadline_ns - deadline_ns) > _AHEAD_NS
        ]
        if known:
            self._consumer.renew(known, lease_ns=lease_ns)
            for number in known:
                self._leases[number].deadline_ns = deadline_ns
            self._due_ns = min(self._due_ns, deadline_ns)
            self._wake()  # whoever waits reckons anew

    # --- What is said of messages ---

    def ack(self, offsets: Offsets) -> set[tuple[int, int]]:
        """Those that came too late, by delivery and offset. What was acknowledged lately may be so again."""
        self.forget_acked()
        offsets = self._acked_lately.unknown(offsets)
        late = self._settled(offsets, self._consumer.ack((), _parts(offsets)) if offsets else ())
        acked = {(number, offset) for number, named in offsets.items() for offset in named}
        self._acked_lately.add(sorted(acked - late), self.used_ns)
        return late

    def nack(self, offsets: Offsets, *, delay_ns: int | None, reason: str) -> set[tuple[int, int]]:
        late = self._consumer.nack(_parts(offsets), delay_ns=delay_ns, reason=reason)
        return self._settled(offsets, late)

    def extend(self, offsets: Offsets, lease_ns: int | None) -> set[tuple[int, int]]:
        """Deliveries are leased whole: others that came together with these are extended as well."""
        self.used_ns = self._clock.monotonic_ns()
        self._expire()
        late = {
            (number, offset)
            for number, named in offsets.items()
            for offset in named
            if not self._has(number, offset)
        }
        self._begin_leases(
            [
                number
                for number, named in offsets.items()
                if any((number, offset) not in late for offset in named)
            ],
            lease_ns,
        )
        return late

    def forget_acked(self) -> None:
        """What was acknowledged so long ago that nobody asks whether it was heard."""
        self._acked_lately.forget_old(self._clock.monotonic_ns())

    def _has(self, delivery: int, offset: int) -> bool:
        lease = self._leases.get(delivery)
        return (
            lease is not None and lease.begin <= offset < lease.end and offset not in lease.settled
        )

    def _settled(self, offsets: Offsets, late: Sequence[Part]) -> set[tuple[int, int]]:
        """Whatever was said of them, the seat has them no more."""
        self.used_ns = self._clock.monotonic_ns()
        for number, named in offsets.items():
            self._let_go(number, named)
        self._wake()
        self.give_back_unclaimed()
        return {(part.delivery, offset) for part in late for offset in range(part.begin, part.end)}

    def _let_go(self, delivery: int, offsets: Iterable[int]) -> None:
        lease = self._leases.get(delivery)
        if lease is None:
            return
        for offset in offsets:
            if lease.begin <= offset < lease.end and offset not in lease.settled:
                lease.settled.add(offset)
                lease.left -= 1
                self._messages -= 1
        if lease.left <= 0:
            self._drop(delivery)

    # --- What the broker says (WorkSink) ---

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:  # noqa: ARG002
        lease_ns = self._consumer.definition.options.lease_ns
        deadline_ns = self._clock.monotonic_ns() + lease_ns
        for delivery in deliveries:
            lease, messages = delivery.lease, delivery.messages
            size = delivery.size + _DELIVERY_BYTES
            self._leases[lease.delivery] = _Lease(
                lease.begin, lease.end, messages, size, deadline_ns, set()
            )
            self._messages += messages
            self._bytes += size
            self._arrived.append(_Arrival(delivery, set()))
        self._due_ns = min(self._due_ns, deadline_ns)
        self._wake()

    def recall(self, consumer: int, parts: Sequence[Part]) -> None:  # noqa: ARG002
        """What was handed out stays until it is acknowledged or its lease ends; the rest is given back."""
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
                self._let_go(number, named)
                back[number] = named
        if back:
            self._arrived = deque(each for each in self._arrived if each.left)
            # The broker is in the middle of saying it: not at once.
            asyncio.get_running_loop().call_soon(self._consumer.recalled, _parts(back))

    def late(self, consumer: int, parts: Sequence[Part]) -> None:
        """Told in the answer to what was late."""

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:  # noqa: ARG002
        self._error = error
        self._end()

    # --- The end ---

    def close(self) -> None:
        """Leave. What is leased goes back and does not count as failed."""
        if not self._is_closed:
            self._consumer.close(is_clean=True)
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._arrived.clear()
        self._leases.clear()
        self._messages = self._bytes = 0
        self._on_ended()
        self._wake()


def _parts(offsets: Offsets) -> list[Part]:
    """Neighbours in one part."""
    parts: list[Part] = []
    for delivery, named in offsets.items():
        for offset in sorted(named):
            if parts and parts[-1].delivery == delivery and parts[-1].end == offset:
                parts[-1] = Part(delivery, parts[-1].begin, offset + 1)
            else:
                parts.append(Part(delivery, offset, offset + 1))
    return parts
