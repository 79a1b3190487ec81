"""The consumers of one connection: sends them work, and passes their acknowledgements to the broker.

A request for an unknown consumer is no mistake: the broker may just have ended the consumer, and the request crossed
the notice. Such a request has no effect, and an acknowledgement that asks for an answer gets `LateAckError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import msgspec

from runnel.broker.access import Access
from runnel.broker.consumer_groups import HeldPart, OpenConsumer, WorkDelivery
from runnel.errors import ClientFault, ClosedError, LateAckError, LimitExceededError, RunnelError
from runnel.formats import wire
from runnel.formats.work_heads import (
    Ack,
    AckedHead,
    AckUpTo,
    Consume,
    ConsumePart,
    Consuming,
    DeliveryPart,
    GiveBack,
    Held,
    HeldLease,
    Late,
    Lease,
    Leave,
    Moving,
    Nack,
    Recall,
    Recalled,
    Renew,
    Wants,
    Window,
    WindowShare,
    WorkHead,
)
from runnel.protocols.native.answers import consumer_ended_notice, shortened
from runnel.protocols.native.output import Buffer, Output, say
from runnel.protocols.native.requests import check_count, check_picked

_NS_PER_MS: Final = 1_000_000

ConsumerRequest: TypeAlias = Window | WindowShare | Nack | GiveBack | Renew | Recalled | Leave
AnswerLater: TypeAlias = Callable[[], Awaitable[None]]


class _OpeningConsumer(msgspec.Struct):
    """A consumer that the broker is still preparing, and the requests that came for it meanwhile."""

    window: Window | WindowShare | None = None
    leave_ids: list[int] = msgspec.field(default_factory=list)
    end: RunnelError | None = None  # the broker ended the consumer before it was open


class Consumers:
    """All consumers of one connection, by the client's numbers; the `WorkSink` of each."""

    __slots__ = (
        "_by_number",
        "_is_closed",
        "_is_paused",
        "_output",
        "_tail_bytes_max",
        "messages_out",
    )

    def __init__(self, output: Output, *, tail_bytes_max: int) -> None:
        """Limit the tail of a frame with several deliveries; a single delivery may be larger."""
        self._output = output
        self._tail_bytes_max = tail_bytes_max
        self._by_number: dict[int, OpenConsumer | _OpeningConsumer] = {}
        self._is_paused = False
        self._is_closed = False
        self.messages_out = 0

    def __len__(self) -> int:
        return len(self._by_number)

    # --- Opening ---

    def prepare(self, number: int, count_max: int) -> None:
        """Reserve the number for a consumer that is about to be opened."""
        if number in self._by_number:
            raise ClientFault(f"this connection has a consumer {number}; choose another number")
        if len(self._by_number) >= count_max:
            raise LimitExceededError(
                f"this connection has {count_max} consumers; no more are allowed "
                "(native.consumers_max)"
            )
        self._by_number[number] = _OpeningConsumer()

    async def open(self, access: Access, request: Consume | ConsumePart) -> None:
        """Open the prepared consumer, and answer the client."""
        number = request.consumer
        opening = self._by_number.get(number)
        if not isinstance(opening, _OpeningConsumer):
            raise _connection_over()  # before this task began
        try:
            part = None
            if isinstance(request, ConsumePart):
                part = HeldPart(request.holder, self)
                request = request.to_consume()
            consumer = await access.consume(number, self, request, part)
        except BaseException:
            self._forget(number, opening)
            raise
        if self._is_closed or opening.end is not None:
            consumer.close(is_clean=True)
            self._forget(number, opening)
            raise opening.end or _connection_over()
        definition = consumer.definition
        consuming = Consuming(
            request.id,
            number,
            definition.name,
            definition.mode,
            definition.patterns,
            definition.options.to_wire(),
            consumer.member,
        )
        say(self._output, consuming)
        if opening.leave_ids:
            consumer.close(is_clean=True)
            self._forget(number, opening)
            return
        self._by_number[number] = consumer
        if opening.window is not None:
            _resize(consumer, opening.window)
        if self._is_paused:
            consumer.pause()
        consumer.start()  # only now: the client has to know the consumer before its work

    def _forget(self, number: int, opening: _OpeningConsumer) -> None:
        if self._by_number.get(number) is opening:
            del self._by_number[number]
        for request_id in opening.leave_ids:
            say(self._output, wire.Done(request_id))

    # --- Requests of the client ---

    def ack(self, request: Ack | AckUpTo) -> AnswerLater | None:
        """Take an acknowledgement. If it has an id, the returned function answers it once it is stored."""
        if isinstance(request, Ack):
            check_count(request, len(request.deliveries) + len(request.parts) + len(request.picked))
            check_picked(request.picked)
        consumer = self._open_consumer(request.consumer)
        if consumer is None:
            if request.id:
                raise _too_late(request.consumer)
            return None  # the notice that the consumer ended is answer enough
        late: Sequence[DeliveryPart] = ()
        if isinstance(request, Ack):
            late = consumer.ack(request.deliveries, request.parts, request.picked)
        else:
            consumer.ack_up_to(request.topic, request.partition, request.offset)
        if request.id:
            return partial(self._answer_stored, request.id, consumer, late)
        if late:
            self.late(request.consumer, late)
        return None

    async def _answer_stored(
        self, request_id: int, consumer: OpenConsumer, late: Sequence[DeliveryPart]
    ) -> None:
        late = [*late, *await consumer.wait_stored()]
        say(self._output, AckedHead(request_id, late))

    def handle(self, request: ConsumerRequest) -> None:
        """Handle any other request for a consumer. Only `leave` has an answer."""
        if isinstance(request, Leave):
            self._leave(request)
            return
        if isinstance(request, Window | WindowShare):
            self._resize(request)
            return
        consumer = self._open_consumer(request.consumer)
        match request:
            case Renew():
                check_count(request, len(request.deliveries))
                if consumer is not None:
                    lease_ns = None if request.lease_ms is None else request.lease_ms * _NS_PER_MS
                    consumer.renew(request.deliveries, lease_ns=lease_ns)
            case Nack():
                check_count(request, len(request.parts))
                if consumer is not None:
                    delay_ns = None if request.delay_ms is None else request.delay_ms * _NS_PER_MS
                    reason = shortened(request.reason)  # it is kept with each of the messages
                    late = consumer.nack(request.parts, delay_ns=delay_ns, reason=reason)
                    if late:
                        self.late(request.consumer, late)
            case GiveBack():
                check_count(request, len(request.parts))
                if consumer is not None:
                    consumer.give_back(request.parts)
            case Recalled():
                check_count(request, len(request.parts))
                if consumer is not None:
                    consumer.recalled(request.parts)

    def _resize(self, request: Window | WindowShare) -> None:
        consumer = self._by_number.get(request.consumer)
        if isinstance(consumer, _OpeningConsumer):
            consumer.window = request
        elif consumer is not None:
            _resize(consumer, request)

    def _leave(self, request: Leave) -> None:
        """Close a consumer. A consumer that is already gone is answered with `done` too."""
        consumer = self._by_number.get(request.consumer)
        if isinstance(consumer, _OpeningConsumer):
            consumer.leave_ids.append(request.id)  # answered once the consumer is open
            return
        if consumer is not None:
            del self._by_number[request.consumer]
            consumer.close(is_clean=True)
        say(self._output, wire.Done(request.id))

    def _open_consumer(self, number: int) -> OpenConsumer | None:
        """The open consumer of this number. None also while it is opening: it has no deliveries yet."""
        consumer = self._by_number.get(number)
        return None if isinstance(consumer, _OpeningConsumer) else consumer

    # --- Events of the connection ---

    def pause(self) -> None:
        """The client reads more slowly than the broker writes."""
        self._is_paused = True
        for consumer in self._by_number.values():
            if not isinstance(consumer, _OpeningConsumer):
                consumer.pause()

    def resume(self) -> None:
        self._is_paused = False
        for consumer in list(self._by_number.values()):
            if self._is_paused:
                return  # deliveries to the consumers before have filled the output again
            if not isinstance(consumer, _OpeningConsumer):
                consumer.resume()

    def close(self, *, is_clean: bool) -> None:
        """Close all consumers. Clean: by no fault of the client, so its unfinished work does not count as failed."""
        self._is_closed = True
        consumers = list(self._by_number.values())
        self._by_number.clear()
        for consumer in consumers:
            if not isinstance(consumer, _OpeningConsumer):
                consumer.close(is_clean=is_clean)

    # --- Calls from the broker (WorkSink) ---

    @property
    def connection_id(self) -> int:
        return self._output.connection_id

    @property
    def peer(self) -> str:
        return self._output.peer

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        """Hot: called once for every few deliveries."""
        leases: list[Lease] = []
        tail: list[Buffer] = []
        tail_bytes = 0
        for delivery in deliveries:
            buffers = delivery.buffers
            size = sum(map(len, buffers))
            if leases and tail_bytes + size > self._tail_bytes_max:
                self._output.queue(
                    wire.encode(WorkHead(consumer, leases), tail_bytes), tail, tail_bytes
                )
                leases, tail, tail_bytes = [], [], 0
            leases.append(delivery.lease)
            tail += buffers
            tail_bytes += size
            self.messages_out += delivery.messages
        self._output.queue(wire.encode(WorkHead(consumer, leases), tail_bytes), tail, tail_bytes)

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        say(self._output, Recall(consumer, parts))

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None:
        say(self._output, Late(consumer, parts))

    def moving(self, consumer: int, epoch: int, deliveries: Sequence[int]) -> None:
        say(self._output, Moving(consumer, epoch, deliveries))

    def held(self, consumer: int, leases: Sequence[HeldLease]) -> None:
        say(self._output, Held(consumer, leases))

    def wants(self, consumer: int, *, is_wanting: bool) -> None:
        say(self._output, Wants(consumer, is_wanting))

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        """Nothing to do: the client library watches its leases, and the answer to a late ack is `late`."""

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        found = self._by_number.get(consumer)
        if isinstance(found, _OpeningConsumer):
            found.end = error  # the answer to its `consume`
        elif found is not None:
            del self._by_number[consumer]
            say(self._output, consumer_ended_notice(consumer, error))


def _resize(consumer: OpenConsumer, request: Window | WindowShare) -> None:
    if isinstance(request, Window):
        consumer.resize(request.messages, request.bytes)
    else:
        consumer.resize(request.messages, request.bytes, request.moves)


def _too_late(number: int) -> LateAckError:
    return LateAckError(
        f"this connection has no consumer {number}, or has it no more: nothing was acknowledged, "
        "and what it acknowledged last may not be stored"
    )


def _connection_over() -> ClosedError:
    return ClosedError("the connection ended before the consumer had begun")
