"""The methods Publish, PublishStream and NewTerm."""

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
from runnel.protocols.grpc.methods.publish_requests import (
    PreparedPublish,
    RequestPart,
    answer_to,
    classify,
    join_requests,
    prepare,
    prepare_plain,
)
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.outbox import Outbox
from runnel.protocols.grpc.server.statuses import error_of
from runnel.protocols.grpc.server.two_way_stream import run_two_way_stream

# Requests of one stream without an answer that the client has taken. At this number reading stops.
_UNANSWERED_MAX: Final = 1024
# Bytes of a stream's requests that are not stored. Above it reading stops; one request is read whatever its size.
_UNSTORED_BYTES_MAX: Final = 8 * 2**20
# Requests are gathered before they are stored: up to this number, these bytes or this time.
_GATHERED_MAX: Final = 64
_GATHERED_BYTES_MAX: Final = 2**16
_GATHER_SECONDS: Final = 0.002
# The tag of an answer in a `PublishStreamResponse`.
_ANSWERS: Final = 0x0A


async def publish(call: GrpcCall, request: pb.PublishRequest) -> pb.PublishResponse:
    plain = plain_of(request, request.ByteSize()) if call.traceparent is None else None
    prepared = prepare(call, request) if plain is None else prepare_plain(call, plain)
    published = await _all_appended(call, prepared)
    done = await call.uninterrupted(asyncio.gather(*published))
    return answer_to(prepared, done)


async def new_term(call: GrpcCall, request: pb.NewTermRequest) -> pb.NewTermResponse:
    return pb.NewTermResponse(term=await call.access.new_term(request.producer))


async def publish_stream(call: GrpcCall) -> None:
    await PublishStream(call).run()


async def _all_appended(
    call: GrpcCall, prepared: PreparedPublish
) -> list[asyncio.Future[Published]]:
    published: list[asyncio.Future[Published]] = []
    try:
        for part in prepared.parts:
            published.append(await _appended(call, part))  # noqa: PERF401 - on an error, the appended parts must be known
    except BaseException:
        asyncio.gather(
            *published, return_exceptions=True
        )  # retrieves their results: nothing else will
        raise
    return published


async def _appended(call: GrpcCall, part: RequestPart) -> asyncio.Future[Published]:
    """Append a part, waiting for room as often as needed."""
    while True:
        try:
            return part.append()
        except BusyError:
            await call.access.wait_room(part.topic, part.partition)


class PublishStream:
    """One stream: its requests are published in the order in which they came, and answered as they are done.

    The requests of a client that does not wait for answers are gathered for a moment: storing and answering many
    together costs little more than one (bench/listeners.py). A client that waits for each answer gets it at once.
    """

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._counters = call.server.broker.metrics.counters
        self._inbox: Outbox[PlainRequest | OtherRequest] = Outbox()
        self._outbox: Outbox[bytes] = Outbox()  # a `PublishResponse` each
        self._unanswered = 0  # including those whose answers are not written yet
        self._awaited = 0  # excluding those whose answers are being written
        self._awaited_most = 0  # the highest value of `_awaited` so far
        self._unstored_bytes = 0  # of requests that are neither stored nor refused
        self._settled: asyncio.Future[None] | None = None
        self._gathered_bytes = 0  # of requests that are gathered
        self._gathered = asyncio.Event()  # set: publish what is gathered
        self._is_pipelined = False  # the last request came before its predecessor was answered
        self._is_closing = False
        self._is_finishing = False  # no more requests will come

    async def run(self) -> None:
        self._call.queued_bytes = lambda: sum(map(len, self._outbox.items))
        sender = self._call.start(self._send())
        try:
            await run_two_way_stream(self._call, self._read(), self._write(), self._finish)
        finally:
            sender.cancel()

    # --- From the client ---

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
            self._inbox.put(classify(self._call, data))
            del data  # else it stays in memory until the next one comes
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
        """Whether the gathered requests should be published now."""
        return (
            self._gathered_bytes >= _GATHERED_BYTES_MAX
            or len(self._inbox) >= _GATHERED_MAX
            # The client has never had more requests unanswered: it probably waits for an answer.
            or self._awaited >= self._awaited_most
            or self._is_finishing
        )

    async def _begin(self, request: pb.PublishRequest, size: int) -> None:
        try:
            prepared = prepare(self._call, request)
            self._call.flow.messages_in += prepared.messages
            # Without room, later requests wait too: the order of a stream is a promise.
            published = await _all_appended(self._call, prepared)
        except RunnelError as error:
            self._release(size)
            self._refuse(request.id, error)
            return
        if len(published) == 1:
            published[0].add_done_callback(partial(self._on_published, prepared, size))
        else:
            together = asyncio.gather(*published)
            together.add_done_callback(partial(self._on_all_published, prepared, size))

    async def _begin_joined(self, requests: Sequence[PlainRequest]) -> None:
        try:
            part = join_requests(self._call, requests)
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

    # --- To the client ---

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
        self, prepared: PreparedPublish, size: int, published: asyncio.Future[Published]
    ) -> None:
        self._release(size)
        if (error := self._failure(published)) is not None:
            self._refuse(prepared.id, error)
        else:
            self._answer(prepared, (published.result(),))

    def _on_all_published(
        self, prepared: PreparedPublish, size: int, published: asyncio.Future[list[Published]]
    ) -> None:
        self._release(size)
        if (error := self._failure(published)) is not None:
            self._refuse(prepared.id, error)
        else:
            self._answer(prepared, published.result())

    def _failure(self, published: asyncio.Future[Any]) -> BaseException | None:
        if published.cancelled():
            return ClosedError("the broker was closed before it was stored")
        error = published.exception()
        if error is not None and not isinstance(error, RunnelError):
            self._call.log_bug(error)
        return error

    def _answer(self, prepared: PreparedPublish, published: Sequence[Published]) -> None:
        if prepared.level is Level.NONE:
            self._awaited -= 1
            self._settle(1)
        else:
            self._outbox.put(answer_to(prepared, published).SerializeToString())

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
        """Answer all accepted requests."""
        self._is_closing = is_closing
        self._is_finishing = True
        self._gathered.set()
        self._inbox.finish()
        while self._unanswered:
            await self._wait_settled()
        self._outbox.finish()

    def _release(self, size: int) -> None:
        """Count a request's bytes as stored or refused."""
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
        """Wait until one more request is settled, or is stored so that reading may continue."""
        self._settled = asyncio.get_running_loop().create_future()
        await self._settled
