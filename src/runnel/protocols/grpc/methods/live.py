"""The method Subscribe: sends a live subscription's messages to the client, with a position to resume from.

The broker sends as much as it has credit for. Credit is granted again when a write is done, and gRPC completes writes
only as fast as the client reads. So little waits here for a slow client.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from runnel.broker.broker import LiveDelivery
from runnel.broker.live.subscription import OpenSubscription, SubscribeRequest
from runnel.errors import RunnelError
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.wire import GapState, Start
from runnel.protocols.grpc.encoding.messages import (
    block_of,
    blocks_in,
    is_blocks,
    proto_gap,
    proto_message,
)
from runnel.protocols.grpc.encoding.options import overflow_of, start_of
from runnel.protocols.grpc.encoding.positions import StreamPosition, read_position, start_at
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.grpc_server import shutting_down
from runnel.protocols.grpc.server.outbox import Outbox

_CREDIT_BYTES: Final = 2**20
# The approximate size of a response. A large batch is sent in several, and other calls get their turn in between.
_MESSAGES_MAX: Final = 500
_BYTES_MAX: Final = 2**19

# A reader of many topics has a long position, which would be most of the traffic. It is sent at this interval.
_POSITION_BYTES_MAX: Final = 2**12
_POSITION_SECONDS: Final = 1.0

_LATEST: Final = Start("latest")

_Event: TypeAlias = LiveDelivery | GapState | None  # None: the last responses had no position


async def subscribe(call: GrpcCall, request: pb.SubscribeRequest) -> None:
    await GrpcLiveStream(call, request).run()


class GrpcLiveStream:
    """One call of Subscribe. It is the `Sink` of its subscription."""

    def __init__(self, call: GrpcCall, request: pb.SubscribeRequest) -> None:
        self._call = call
        self._patterns = tuple(request.patterns)
        self._overflow = overflow_of(request.overflow)
        self._is_blocks = is_blocks(request.format)
        given = None
        if request.position:
            given = read_position(request.position, self._patterns)
            self._start = start_at(given)
        else:
            self._start = start_of(request.start) or _LATEST
        self._position = StreamPosition(self._patterns, self._start, given)
        self._outbox: Outbox[_Event] = Outbox()
        self._queued_bytes = 0
        self._long_position: asyncio.TimerHandle | None = None  # set until it may be sent again
        self._is_position_owed = False
        self._end: RunnelError | None = None
        self._is_closing = False

    async def run(self) -> None:
        call = self._call
        subscription = await call.access.subscribe(
            SubscribeRequest(1, self, self._patterns, self._start, _CREDIT_BYTES, self._overflow)
        )
        call.subscriptions = 1
        call.queued_bytes = lambda: self._queued_bytes
        call.when_closing(self._close)
        try:
            self._position.begin(subscription)
            await self._respond_with_position(pb.SubscribeResponse(subscribed=pb.Subscribed()))
            subscription.start()
            await self._write(subscription)
        finally:
            subscription.close()
            if self._long_position is not None:
                self._long_position.cancel()

    # --- From the broker (Sink) ---

    @property
    def connection_id(self) -> int:
        return self._call.id

    @property
    def peer(self) -> str:
        return self._call.peer

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:  # noqa: ARG002 - there is only one
        self._queued_bytes += delivery.size
        self._call.flow.messages_out += delivery.messages
        self._outbox.put(delivery)

    def gap(self, subscription: int, gap: GapState) -> None:  # noqa: ARG002
        self._outbox.put(gap)

    def ended(self, subscription: int, error: RunnelError) -> None:  # noqa: ARG002
        self._end = error
        self._outbox.finish()

    def _close(self) -> None:
        self._is_closing = True
        self._outbox.finish()

    # --- To the client ---

    async def _write(self, subscription: OpenSubscription) -> None:
        outbox = self._outbox
        while await outbox.wait() and not self._is_closing:
            event = outbox.items.popleft()
            if event is None:
                if self._is_position_owed:
                    await self._respond_with_position(pb.SubscribeResponse(delivery=pb.Delivery()))
            elif isinstance(event, GapState):
                self._position.missed(event)
                await self._respond(pb.SubscribeResponse(gap=proto_gap(event)))
            elif event.ends_last_values:
                self._position.last_values_sent()
                await self._respond_with_position(pb.SubscribeResponse(caught_up=pb.CaughtUp()))
            elif not event.size:
                self._position.delivered(event)
                await self._respond(pb.SubscribeResponse(delivery=pb.Delivery()))
            else:
                size = await (self._write_blocks if self._is_blocks else self._write_messages)(
                    event
                )
                self._queued_bytes -= size
                subscription.grant(size)
        if self._is_closing:
            notice = self._call.server.closing_notice()
            await self._respond_with_position(pb.SubscribeResponse(closing=notice))
            raise shutting_down()
        if self._end is not None:
            raise self._end

    async def _write_blocks(self, delivery: LiveDelivery) -> int:
        data = b"".join(delivery.buffers)
        position = self._position
        if position.looks_at_runs:
            batches = self._unsent(data)
            blocks = [block_of(batch) for batch in batches]
            position.delivered(delivery, batches)
        else:
            blocks = blocks_in(data)
            position.delivered(delivery)
        if blocks:
            await self._respond(pb.SubscribeResponse(delivery=pb.Delivery(blocks=blocks)))
        return delivery.size

    async def _write_messages(self, delivery: LiveDelivery) -> int:
        """Write this delivery and the following ones that fit into the same response. A large one takes several."""
        items, position = self._outbox.items, self._position
        ready: list[pb.Message] = []
        ready_bytes = written = 0
        while True:
            written += delivery.size
            batches = self._unsent(b"".join(delivery.buffers))
            for batch in batches:
                for row, message in enumerate(batch.messages(), 1):
                    ready.append(proto_message(message))
                    ready_bytes += len(message.payload)
                    if len(ready) >= _MESSAGES_MAX or ready_bytes >= _BYTES_MAX:
                        position.delivered_rows(batch, row)
                        await self._respond_messages(ready)
                        ready, ready_bytes = [], 0
                if len(batches) > 1:
                    position.delivered_rows(batch, len(batch))
            position.delivered(delivery, batches)
            following = items[0] if items else None
            if (
                not isinstance(following, LiveDelivery)
                or not following.size
                or following.size + ready_bytes > _BYTES_MAX
            ):
                break
            delivery = following
            items.popleft()
        if ready:
            await self._respond_messages(ready)
        return written

    def _unsent(self, data: bytes) -> list[Batch]:
        unsent = map(self._position.unsent, unpack_blocks(data))
        return [batch for batch in unsent if batch is not None]

    async def _respond_messages(self, messages: list[pb.Message]) -> None:
        await self._respond(pb.SubscribeResponse(delivery=pb.Delivery(messages=messages)))

    async def _respond(self, response: pb.SubscribeResponse) -> None:
        if self._long_position is None:
            await self._respond_with_position(response)
        else:
            self._is_position_owed = True
            await self._send(response)

    async def _respond_with_position(self, response: pb.SubscribeResponse) -> None:
        """Send a response with the position, however long it is."""
        response.position = self._position.pack()
        self._is_position_owed = False
        if len(response.position) > _POSITION_BYTES_MAX:
            if self._long_position is not None:
                self._long_position.cancel()
            loop = asyncio.get_running_loop()
            self._long_position = loop.call_later(_POSITION_SECONDS, self._release_position)
        await self._send(response)

    def _release_position(self) -> None:
        """Let the next response have the position. If responses went without it, send it by itself."""
        self._long_position = None
        if self._is_position_owed:
            self._outbox.put(None)

    async def _send(self, response: pb.SubscribeResponse) -> None:
        data = response.SerializeToString()
        self._call.flow.bytes_out += len(data)
        await self._call.context.write(data)
