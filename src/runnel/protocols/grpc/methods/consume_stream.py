"""The method Consume: leases messages to the client within its window, and takes its acks and nacks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeAlias

import grpc.aio

from runnel.broker.consumer_groups import OpenConsumer, WorkDelivery
from runnel.errors import ClientFault, RunnelError
from runnel.formats import work_heads as heads
from runnel.protocols.grpc.encoding.messages import is_blocks, natural, parsed
from runnel.protocols.grpc.encoding.options import (
    mode_of,
    options_of,
    proto_mode,
    proto_options,
    start_of,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.methods.leases import (
    check_count,
    late_parts,
    parts_of,
    proto_lease,
    proto_parts,
    whole,
)
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.outbox import Outbox
from runnel.protocols.grpc.server.two_way_stream import run_two_way_stream

_NS_PER_MS: Final = 1_000_000
_WINDOW_MESSAGES: Final = 256
_WINDOW_BYTES: Final = 8 * 2**20
# While this much waits to be written, the client is leased nothing more, whatever its window.
_QUEUED_BYTES_MAX: Final = 2**20
# Several deliveries share a response up to this size.
_RESPONSE_BYTES_MAX: Final = 2**19
# Acknowledgements that wait to be stored. At this number reading stops.
_STORING_MAX: Final = 256
_REASON_CHARACTERS_MAX: Final = 1000

_Event: TypeAlias = WorkDelivery | pb.ConsumeResponse


async def consume(call: GrpcCall) -> None:
    await WorkStream(call).run()


class WorkStream:
    """One call of Consume. It is the `WorkSink` of its consumer."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._consumer: OpenConsumer | None = None
        self._is_blocks = False
        self._outbox: Outbox[_Event] = Outbox()
        self._queued_bytes = 0
        self._is_paused = False
        self._storing: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def run(self) -> None:
        call = self._call
        call.queued_bytes = lambda: self._queued_bytes
        try:
            await run_two_way_stream(call, self._read(), self._write(), self._finish)
        finally:
            if self._consumer is not None:
                # If the broker ended the call, unfinished messages are redelivered without counting as failed.
                is_clean = isinstance(call.end, RunnelError) or call.server.is_closing
                self._consumer.close(is_clean=is_clean)

    # --- From the client ---

    async def _read(self) -> None:
        read, counters = self._call.context.read, self._call.server.broker.metrics.counters
        while (data := await read()) is not grpc.aio.EOF:
            counters.requests += 1
            self._call.flow.bytes_in += len(data)
            request = parsed(pb.ConsumeRequest, data)
            if self._consumer is None:
                if request.WhichOneof("say") != "open":
                    raise ClientFault(
                        "the first request of Consume is `open`, which names the subscription"
                    )
                await self._open(request.open)
            elif not self._handle(self._consumer, request):
                return
            while len(self._storing) >= _STORING_MAX:
                await asyncio.wait(self._storing, return_when=asyncio.FIRST_COMPLETED)

    async def _open(self, request: pb.ConsumeOpen) -> None:
        self._is_blocks = is_blocks(request.format)
        window = request.window
        consume = heads.Consume(
            0,
            1,
            request.subscription,
            tuple(request.patterns),
            mode_of(request.mode),
            natural("window.messages", window.messages) or _WINDOW_MESSAGES,
            natural("window.bytes", window.bytes) or _WINDOW_BYTES,
            request.member,
            start_of(request.start),
            options_of(request.options) if request.HasField("options") else None,
        )
        # This may make a subscription, so it is not cancelled once begun.
        opening = self._call.server.tasks.start_awaited(self._call.access.consume(1, self, consume))
        try:
            consumer = self._consumer = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise
        self._call.subscriptions = 1
        definition = consumer.definition
        consuming = pb.Consuming(
            subscription=definition.name,
            mode=proto_mode(definition.mode),
            patterns=definition.patterns,
            options=proto_options(definition.options.to_wire()),
            member=consumer.member,
        )
        self._outbox.put(pb.ConsumeResponse(consuming=consuming))
        consumer.start()  # after the response above is queued

    def _handle(self, consumer: OpenConsumer, request: pb.ConsumeRequest) -> bool:
        """Handle a request. False: the client leaves."""
        match request.WhichOneof("say"):
            case "ack":
                self._ack(consumer, request.ack)
            case "ack_up_to":
                up_to = request.ack_up_to
                offset = natural("offset", up_to.offset)
                consumer.ack_up_to(up_to.topic, up_to.partition, offset)
                self._answer_when_stored(consumer, up_to.id, ())
            case "nack":
                self._nack(consumer, request.nack)
            case "extend":
                self._extend(consumer, request.extend)
            case "recalled":
                recalled = request.recalled
                check_count(recalled.parts, picked=recalled.picked)
                consumer.recalled(parts_of(recalled.parts, recalled.picked))
            case "window":
                window = request.window
                consumer.resize(
                    natural("window.messages", window.messages),
                    natural("window.bytes", window.bytes),
                )
            case "leave":
                return False
            case "open":
                raise ClientFault("`open` was said already; it is the first request and no other")
            case _:
                raise ClientFault("a request of Consume that says nothing this broker knows")
        return True

    def _ack(self, consumer: OpenConsumer, ack: pb.Ack) -> None:
        check_count(ack.deliveries, ack.parts, picked=ack.picked)
        asked = parts_of(ack.parts, ack.picked)
        deliveries = [natural("deliveries", delivery) for delivery in ack.deliveries]
        late = late_parts(consumer.ack(deliveries, asked), asked)
        if late and not ack.id:
            self.late(1, late)
        self._answer_when_stored(consumer, ack.id, late)

    def _nack(self, consumer: OpenConsumer, nack: pb.Nack) -> None:
        check_count(nack.deliveries, nack.parts, picked=nack.picked)
        asked = [whole(delivery) for delivery in nack.deliveries]
        asked += parts_of(nack.parts, nack.picked)
        delay_ns = natural("delay_ms", nack.delay_ms) * _NS_PER_MS
        late = consumer.nack(
            asked,
            delay_ns=delay_ns if nack.HasField("delay_ms") else None,
            reason=nack.reason[:_REASON_CHARACTERS_MAX],  # it is stored for each of the messages
        )
        if late := late_parts(late, asked):
            self.late(1, late)

    def _extend(self, consumer: OpenConsumer, extend: pb.Extend) -> None:
        check_count(extend.deliveries)
        lease_ns = natural("lease_ms", extend.lease_ms) * _NS_PER_MS
        consumer.renew(
            tuple(extend.deliveries), lease_ns=lease_ns if extend.HasField("lease_ms") else None
        )

    def _answer_when_stored(
        self, consumer: OpenConsumer, request_id: int, late: Sequence[heads.DeliveryPart]
    ) -> None:
        """Answer an acknowledgement that has an id, once it is stored."""
        if request_id:
            waiting = self._wait_stored(consumer, request_id, late)
            task = self._call.server.tasks.start_awaited(waiting)
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    async def _wait_stored(
        self, consumer: OpenConsumer, request_id: int, late: Sequence[heads.DeliveryPart]
    ) -> None:
        try:
            late = [*late, *await consumer.wait_stored()]
        except Exception as error:  # noqa: BLE001 - after any error, the client must not wait for ever
            self._call.finish_with(error)
        else:
            acked = pb.Acked(id=request_id, late=proto_parts(late))
            self._outbox.put(pb.ConsumeResponse(acked=acked))

    # --- From the broker (WorkSink) ---

    @property
    def connection_id(self) -> int:
        return self._call.id

    @property
    def peer(self) -> str:
        return self._call.peer

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:  # noqa: ARG002 - there is only one
        for delivery in deliveries:
            self._queued_bytes += delivery.size
            self._call.flow.messages_out += delivery.messages
            self._outbox.put(delivery)
        if self._queued_bytes > _QUEUED_BYTES_MAX and not self._is_paused:
            assert self._consumer is not None
            self._is_paused = True
            self._consumer.pause()

    def recall(self, consumer: int, parts: Sequence[heads.DeliveryPart]) -> None:  # noqa: ARG002
        self._outbox.put(pb.ConsumeResponse(recall=pb.Recall(parts=proto_parts(parts))))

    def late(self, consumer: int, parts: Sequence[heads.DeliveryPart]) -> None:  # noqa: ARG002
        self._outbox.put(pb.ConsumeResponse(late=pb.Late(parts=proto_parts(parts))))

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None:
        """Does nothing: a client that acknowledges too late gets `late` then."""

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:  # noqa: ARG002
        self._call.finish_with(error)

    # --- To the client ---

    async def _write(self) -> None:
        outbox = self._outbox
        while await outbox.wait():
            event = outbox.items.popleft()
            if isinstance(event, WorkDelivery):
                await self._write_work(event)
            else:
                await self._respond(event)
        if self._is_closing:
            await self._respond(pb.ConsumeResponse(closing=self._call.server.closing_notice()))

    async def _write_work(self, delivery: WorkDelivery) -> None:
        """Write this delivery and the following ones that fit into the same response."""
        items = self._outbox.items
        leases = [proto_lease(delivery, is_blocks=self._is_blocks)]
        size = delivery.size
        while items and isinstance(following := items[0], WorkDelivery):
            if size + following.size > _RESPONSE_BYTES_MAX:
                break
            items.popleft()
            leases.append(proto_lease(following, is_blocks=self._is_blocks))
            size += following.size
        await self._respond(pb.ConsumeResponse(work=pb.Work(leases=leases)))
        self._queued_bytes -= size
        if self._is_paused and self._queued_bytes <= _QUEUED_BYTES_MAX // 2:
            self._is_paused = False
            if self._consumer is not None and not self._is_closing:
                self._consumer.resume()

    async def _respond(self, response: pb.ConsumeResponse) -> None:
        data = response.SerializeToString()
        self._call.flow.bytes_out += len(data)
        await self._call.context.write(data)

    async def _finish(self, *, is_closing: bool) -> None:
        """Let the consumer leave cleanly, and answer its acknowledgements."""
        self._is_closing = is_closing
        if self._consumer is not None:
            self._consumer.close(is_clean=True)
        while self._storing:
            await asyncio.wait(self._storing)
        self._outbox.finish()


def _close_unused(opening: asyncio.Task[OpenConsumer]) -> None:
    """Close a consumer whose client left before it was opened."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(is_clean=True)
