"""Publishing, one request at a time or in a stream, and the terms of named publishers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc.aio

from runnel.broker.broker import Level, Published
from runnel.errors import BusyError, ClientFault, ClosedError, RunnelError
from runnel.protocols.grpc.encoding.fields import field
from runnel.protocols.grpc.encoding.plain import (
    OtherRequest,
    PlainRequest,
    answers_to,
    joinable,
    plain_of,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.methods.sending import (
    RequestPart,
    Sending,
    answer_to,
    joined,
    prepared,
    prepared_plain,
    taken,
)
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.outbox import Outbox
from runnel.protocols.grpc.server.statuses import error_of
from runnel.protocols.grpc.server.talking import talk

# Requests of one stream that are not answered, or whose answers the client has not taken: no more are read meanwhile.
_UNANSWERED_MAX: Final = 1024
# And their bytes, of those that are not stored: above it no more are read. One is, whatever its size.
_UNSTORED_BYTES_MAX: Final = 8 * 2**20
# Requests that are gathered before they are begun: so many, so many bytes, or for so long.
_GATHERED_MAX: Final = 64
_GATHERED_BYTES_MAX: Final = 2**16
_GATHER_SECONDS: Final = 0.002
# Of an answer in a `PublishStreamResponse`.
_ANSWERS: Final = 0x0A


async def publish(call: GrpcCall, request: pb.PublishRequest) -> pb.PublishResponse:
    plain = plain_of(request, request.ByteSize()) if call.traceparent is None else None
    sending = prepared(call, request) if plain is None else prepared_plain(call, plain)
    published = await _all_appended(call, sending)
    done = await call.uninterrupted(asyncio.gather(*published))
    return answer_to(sending, done)


async def new_term(call: GrpcCall, request: pb.NewTermRequest) -> pb.NewTermResponse:
    return pb.NewTermResponse(term=call.access.new_term(request.producer))


async def publish_stream(call: GrpcCall) -> None:
    await PublishStream(call).run()


async def _all_appended(call: GrpcCall, sending: Sending) -> list[asyncio.Future[Published]]:
    published: list[asyncio.Future[Published]] = []
    try:
        for part in sending.parts:
            published.append(await _appended(call, part))  # noqa: PERF401 - what is in must be known
    except BaseException:
        asyncio.gather(*published, return_exceptions=True)  # nobody else will look at them
        raise
    return published


async def _appended(call: GrpcCall, part: RequestPart) -> asyncio.Future[Published]:
    """Tried again whenever there is room, until it is in."""
    while True:
        try:
            return part.append()
        except BusyError:
            await call.access.wait_room(part.topic)


class PublishStream:
    """One stream: requests are begun in the order in which they came and answered as they are done.

    A client that sends on without waiting has its requests gathered for a moment: to store and answer many together
    costs little more than one (bench/listeners.py). One that waits for each answer gets it at once.
    """

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._counters = call.server.broker.metrics.counters
        self._inbox: Outbox[PlainRequest | OtherRequest] = Outbox()
        self._outbox: Outbox[bytes] = Outbox()  # a `PublishResponse` each
        self._unanswered = 0  # those included whose answers are not written yet
        self._awaited = 0  # those excluded whose answers are on their way
        self._awaited_most = 0  # at any time so far
        self._unstored_bytes = 0  # what requests take that are neither stored nor refused
        self._settled: asyncio.Future[None] | None = None
        self._gathered_bytes = 0  # those of them that are not begun either
        self._gathered = asyncio.Event()  # waited long enough for more
        self._is_pipelined = False  # the last request came before the one before it was answered
        self._is_closing = False
        self._is_finishing = False  # nothing more will come

    async def run(self) -> None:
        self._call.queued_bytes = lambda: sum(map(len, self._outbox.items))
        sending = self._call.start(self._send())
        try:
            await talk(self._call, self._read(), self._write(), self._finish)
        finally:
            sending.cancel()

    # --- What the client says ---

    async def _read(self) -> None:
        read, counters, flow = self._call.context.read, self._counters, self._call.flow
        while True:
            data = await read()
            if data is grpc.aio.EOF:
                return
            counters.requests += 1
            flow.bytes_in += len(data)
            self._is_pipelined = self._awaited > 0
            self._unanswered += 1
            self._awaited += 1
            self._awaited_most = max(self._awaited_most, self._awaited)
            self._unstored_bytes += len(data)
            self._gathered_bytes += len(data)
            self._inbox.put(taken(self._call, data))
            del data  # it would stay as long as the next one does not come
            if self._has_enough():
                self._gathered.set()
            while self._unanswered >= _UNANSWERED_MAX or self._unstored_bytes > _UNSTORED_BYTES_MAX:
                await self._wait_settled()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._inbox.wait():
            if self._is_pipelined and not self._has_enough():
                self._gathered.clear()
                timer = loop.call_later(_GATHER_SECONDS, self._gathered.set)
                await self._gathered.wait()
                timer.cancel()
            self._gathered_bytes = 0
            for together in joinable(self._inbox.take_all()):
                if isinstance(together, OtherRequest):
                    await self._begin(together.parsed, together.size)
                else:
                    await self._begin_joined(together)

    def _has_enough(self) -> bool:
        """Whether what is gathered should be begun now."""
        return (
            self._gathered_bytes >= _GATHERED_BYTES_MAX
            or len(self._inbox) >= _GATHERED_MAX
            # The client has never gone further: by now it waits for an answer.
            or self._awaited >= self._awaited_most
            or self._is_finishing
        )

    async def _begin(self, request: pb.PublishRequest, size: int) -> None:
        try:
            sending = prepared(self._call, request)
            self._call.flow.messages_in += sending.messages
            # What comes behind waits too where there is no room: the order of a stream is a promise.
            published = await _all_appended(self._call, sending)
        except RunnelError as error:
            self._release(size)
            self._refuse(request.id, error)
            return
        if len(published) == 1:
            published[0].add_done_callback(partial(self._on_published, sending, size))
        else:
            together = asyncio.gather(*published)
            together.add_done_callback(partial(self._on_all_published, sending, size))

    async def _begin_joined(self, requests: Sequence[PlainRequest]) -> None:
        try:
            part = joined(self._call, requests)
            if part is None:
                await self._begin_apart(requests)
                return
            published = await _appended(self._call, part)
        except RunnelError as error:
            if isinstance(error, ClientFault) and len(requests) > 1:
                await self._begin_apart(requests)  # one of them may be at fault, not all
            else:
                self._refuse_all(requests, error)
            return
        self._call.flow.messages_in += sum([request.messages for request in requests])
        published.add_done_callback(partial(self._on_joined, requests, part.partition))

    async def _begin_apart(self, requests: Sequence[PlainRequest]) -> None:
        for request in requests:
            await self._begin_joined((request,))

    # --- What the client is told ---

    def _on_joined(
        self,
        requests: Sequence[PlainRequest],
        partition: int,
        published: asyncio.Future[Published],
    ) -> None:
        error = self._failure(published)
        if error is not None:
            self._refuse_all(requests, error)
            return
        self._release(sum([request.size for request in requests]))
        if requests[0].level is Level.NONE:
            self._awaited -= len(requests)
            self._settle(len(requests))
        else:
            self._outbox.put_all(answers_to(requests, published.result(), partition))

    def _refuse_all(self, requests: Sequence[PlainRequest], error: BaseException) -> None:
        for request in requests:
            self._release(request.size)
            self._refuse(request.id, error)

    def _on_published(
        self, sending: Sending, size: int, published: asyncio.Future[Published]
    ) -> None:
        self._release(size)
        if (error := self._failure(published)) is not None:
            self._refuse(sending.id, error)
        else:
            self._answer(sending, (published.result(),))

    def _on_all_published(
        self, sending: Sending, size: int, published: asyncio.Future[list[Published]]
    ) -> None:
        self._release(size)
        if (error := self._failure(published)) is not None:
            self._refuse(sending.id, error)
        else:
            self._answer(sending, published.result())

    def _failure(self, published: asyncio.Future[Any]) -> BaseException | None:
        if published.cancelled():
            return ClosedError("the broker was closed before it was stored")
        error = published.exception()
        if error is not None and not isinstance(error, RunnelError):
            self._call.broken(error)
        return error

    def _answer(self, sending: Sending, published: Sequence[Published]) -> None:
        if sending.level is Level.NONE:
            self._awaited -= 1
            self._settle(1)
        else:
            self._outbox.put(answer_to(sending, published).SerializeToString())

    def _refuse(self, request_id: int, error: BaseException) -> None:
        self._counters.requests_failed += 1
        refusal = pb.PublishResponse(id=request_id, error=error_of(error))
        self._outbox.put(refusal.SerializeToString())

    async def _write(self) -> None:
        write, flow = self._call.context.write, self._call.flow
        while await self._outbox.wait():
            answers = self._outbox.take_all()
            self._awaited -= len(answers)
            data = b"".join([field(_ANSWERS, answer) for answer in answers])
            flow.bytes_out += len(data)
            await write(data)
            self._settle(len(answers))
        if self._is_closing:
            closing = self._call.server.closing_notice()
            await write(pb.PublishStreamResponse(closing=closing).SerializeToString())

    async def _finish(self, *, is_closing: bool) -> None:
        """Answer what was accepted."""
        self._is_closing = is_closing
        self._is_finishing = True
        self._gathered.set()
        self._inbox.finish()
        while self._unanswered:
            await self._wait_settled()
        self._outbox.finish()

    def _release(self, size: int) -> None:
        """A request is stored or refused: its answer is all that is left of it."""
        is_full = self._unstored_bytes > _UNSTORED_BYTES_MAX
        self._unstored_bytes -= size
        if is_full:
            self._wake()

    def _settle(self, count: int) -> None:
        self._unanswered -= count
        self._wake()

    def _wake(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    async def _wait_settled(self) -> None:
        """Until a request more is settled, or stored where that may let the next one in."""
        self._settled = asyncio.get_running_loop().create_future()
        await self._settled
