"""Live subscriptions and consumers over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from runnel.client import Gap
from runnel.errors import ClientFault, MalformedError, RunnelError
from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients.grpc_encoding import (
    GrpcTransport,
    answers,
    batches_of,
    fields_of,
    message_of,
    say,
)
from tests.conformance.clients.remote_readers import (
    Arrival,
    RemoteConsumer,
    RemoteSubscription,
    RemoteWork,
)

Handle = tuple[int, int]  # delivery and offset


class GrpcSubscription(RemoteSubscription):
    """One call of `Subscribe`."""

    def __init__(
        self,
        transport: GrpcTransport,
        request: pb.SubscribeRequest,
        buffer_bytes: int,
        on_gap: Callable[[Gap], object] | None,
    ) -> None:
        super().__init__(request.position, buffer_bytes, on_gap)
        self._transport = transport
        self._request = request
        self._call: Any = None

    async def _begin(self) -> AsyncIterator[Arrival]:
        responses = await self._subscribe()
        return self._arrivals(responses)

    async def _subscribe(self) -> AsyncIterator[pb.SubscribeResponse]:
        self._call = self._transport.listen(self._request, pb.SubscribeResponse)
        responses = answers(self._call)
        first = await anext(responses)
        if first.WhichOneof("event") != "subscribed":
            raise MalformedError("response", f"the first is {first}")
        self.position = first.position
        return responses

    async def _end(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _arrivals(
        self, responses: AsyncIterator[pb.SubscribeResponse]
    ) -> AsyncIterator[Arrival]:
        async for response in responses:
            self.position = response.position or self.position
            match response.WhichOneof("event"):
                case "delivery":
                    for message in response.delivery.messages:
                        yield message_of(fields_of(message))
                case "gap":
                    yield Gap(**fields_of(response.gap))
                case "closing":
                    self.is_closing = True

    async def batches(self) -> AsyncIterator[Batch]:
        """Subscribes again from the beginning, and reads blocks instead of messages."""
        await self.close()
        self._request.format = pb.FORMAT_BLOCKS
        async for response in await self._subscribe():
            for batch in batches_of(response.delivery.blocks):
                yield batch

    async def to_arrow(self) -> AsyncIterator[Any]:
        async for batch in self.batches():
            yield batch.to_arrow()


class GrpcConsumer(RemoteConsumer):
    """One call of `Consume`. It waits for each request: the answer to a later ack comes after all of it."""

    def __init__(
        self,
        transport: GrpcTransport,
        opening: pb.ConsumeOpen,
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(0)
        self._transport = transport
        self._opening = opening
        self._now_ns = now_ns
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = (
            asyncio.Lock()
        )  # gRPC fails a write that begins while another one is under way
        self._ids = itertools.count(1)
        self._recalled: set[Handle] = set()  # that the test has taken
        self._acking: dict[int, asyncio.Future[list[Handle]]] = {}
        self._changed = asyncio.Event()
        self._error: RunnelError | None = None
        self._has_ended = False

    # --- Opening and closing ---

    async def open(self) -> None:
        if self._call is not None:
            return
        self._call = self._transport.talk("Consume", pb.ConsumeResponse)
        await say(self._call, pb.ConsumeRequest(open=self._opening))
        responses = answers(self._call)
        first = await anext(responses)
        if first.WhichOneof("event") != "consuming":
            raise MalformedError("response", f"the first is {first}")
        self.mode = fields_of(first.consuming)["mode"]
        self._reading = asyncio.get_running_loop().create_task(self._read(responses))

    async def close(self) -> None:
        if self._reading is None:
            return
        if not self._has_ended:
            await self._say(leave=pb.Leave())
            await asyncio.wait({self._reading})  # the broker ends the call
        self._waiting.clear()

    async def _say(self, **what: Any) -> None:
        async with self._writing:
            with contextlib.suppress(RunnelError):  # the reader learns that the call has ended
                await say(self._call, pb.ConsumeRequest(**what))

    # --- What comes ---

    async def _read(self, responses: AsyncIterator[pb.ConsumeResponse]) -> None:
        try:
            async for response in responses:
                await self._heard(response)
        except RunnelError as error:
            self._error = error
        self._has_ended = True
        for waiting in self._acking.values():
            waiting.set_result(list(self._begun))
        self._acking.clear()
        self._waiting.clear()
        self._changed.set()

    async def _heard(self, response: pb.ConsumeResponse) -> None:
        match response.WhichOneof("event"):
            case "work":
                for lease in response.work.leases:
                    self._waiting.extend(self._works(lease))
                self._changed.set()
            case "recall":
                await self._recall(response.recall.parts)
            case "acked":
                if waiting := self._acking.pop(response.acked.id, None):
                    waiting.set_result([h for part in response.acked.late for h in self._in(part)])
            case "late":
                for part in response.late.parts:
                    for handle in self._in(part):
                        self.was_late(self._begun[handle])

    def _works(self, lease: pb.Lease) -> Iterable[RemoteWork]:
        attempts = {attempt.offset: attempt for attempt in lease.attempts}
        for told in lease.messages:
            attempt = attempts.get(told.offset)
            first_ns = attempt.first_delivery_ns if attempt is not None else 0
            yield RemoteWork(
                message_of(fields_of(told)),
                self,
                (lease.delivery, told.offset),
                0 if attempt is None else attempt.failures,
                first_ns or self._now_ns(),
            )

    async def _recall(self, parts: Iterable[pb.Part]) -> None:
        """Messages that wait go back at once, the others when the test settles them."""
        recalled = {handle for part in parts for handle in self._in(part)}
        dropped = [work.handle for work in self._waiting if work.handle in recalled]
        self._waiting = deque(work for work in self._waiting if work.handle not in recalled)
        self._recalled |= recalled - set(dropped)
        await self._say(recalled=pb.Recalled(parts=_parts(dropped)))

    def _in(self, part: pb.Part) -> list[Handle]:
        """The messages of this consumer in a part of a delivery."""
        known = [*self._begun, *(work.handle for work in self._waiting)]
        return [
            (delivery, offset)
            for delivery, offset in known
            if delivery == part.delivery and (not part.end or part.begin <= offset < part.end)
        ]

    async def _fill(self, messages_max: int) -> None:
        await self.open()
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    # --- Giving back ---

    async def _send_acks(self, works: Sequence[RemoteWork]) -> Sequence[RemoteWork]:
        self._check_own(works)
        recalled = await self._give_up(works)
        parts = _parts(work.handle for work in works if work not in recalled)
        told = await self._ack(pb.Ack(parts=parts))
        late = [work for work in works if work.handle in told or work in recalled]
        self._settled(works)
        return late

    async def ack_up_to(self, work: RemoteWork) -> None:
        number = next(self._ids)
        done: asyncio.Future[list[Handle]] = asyncio.get_running_loop().create_future()
        self._acking[number] = done
        up_to = pb.AckUpTo(
            id=number, topic=work.topic, partition=work.partition, offset=work.offset
        )
        await self._say(ack_up_to=up_to)
        await done

    async def nack(
        self, *works: RemoteWork, delay_s: float | None = None, reason: str = ""
    ) -> None:
        self._check_own(works)
        if delay_s is not None and delay_s < 0:
            raise ClientFault(f"delay_s is {delay_s!r}: it must be seconds from 0 on")
        recalled = await self._give_up(works)
        parts = _parts(work.handle for work in works if work not in recalled)
        delay_ms = None if delay_s is None else round(delay_s * 1000)
        await self._say(nack=pb.Nack(parts=parts, delay_ms=delay_ms, reason=reason))
        self._settled(works)
        await self.flush()  # recalls that it causes come before the answer

    async def extend(self, work: RemoteWork, seconds: float) -> None:
        self._check_own((work,))
        delivery, _ = work.handle
        await self._say(extend=pb.Extend(deliveries=[delivery], lease_ms=round(seconds * 1000)))
        await self.flush()

    async def flush(self) -> None:
        await self._ack(pb.Ack())

    async def _ack(self, ack: pb.Ack) -> list[Handle]:
        """The messages that came too late, once the others are stored."""
        if self._has_ended:
            return list(self._begun)
        ack.id = next(self._ids)
        done: asyncio.Future[list[Handle]] = asyncio.get_running_loop().create_future()
        self._acking[ack.id] = done
        await self._say(ack=ack)
        return await done

    async def _give_up(self, works: Iterable[RemoteWork]) -> list[RemoteWork]:
        """Give back the messages that the broker has recalled, and return them."""
        recalled = [work for work in works if work.handle in self._recalled]
        if recalled:
            self._recalled -= {work.handle for work in recalled}
            await self._say(recalled=pb.Recalled(parts=_parts(work.handle for work in recalled)))
        return recalled

    def _settled(self, works: Iterable[RemoteWork]) -> None:
        for work in works:
            self._begun.pop(work.handle, None)

    def _check_own(self, works: Iterable[RemoteWork]) -> None:
        # The number of a delivery belongs to its call: the broker cannot see that it is another consumer's.
        for work in works:
            if work.consumer is not self:
                raise ClientFault(
                    f"{work!r:.200} was given by another consumer: acknowledge it there"
                )


def _parts(handles: Iterable[Any]) -> list[pb.Part]:
    return [
        pb.Part(delivery=delivery, begin=offset, end=offset + 1) for delivery, offset in handles
    ]
