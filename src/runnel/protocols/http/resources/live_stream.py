"""One live stream: writes the broker's deliveries as server-sent events, as fast as the client reads them.

The subscription has credit for a little more than the connection holds, and gets it back for what has been written.
So a slow client is served from the log, as at every listener, and nothing piles up for it here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from litestar.types import Receive, Scope, Send

from runnel.broker.broker import LiveDelivery
from runnel.broker.live.subscription import OpenSubscription, SubscribeRequest
from runnel.errors import ClosedError, ConnectionLostError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.wire import GapState, Start
from runnel.protocols.http.encoding import event_stream
from runnel.protocols.http.encoding.blocks import Blocks, messages_of
from runnel.protocols.http.encoding.event_ids import EventIds
from runnel.protocols.http.encoding.event_stream import message_event
from runnel.protocols.http.encoding.messages import PayloadForm, TimeForm, gap_out, message_out
from runnel.protocols.http.encoding.problems import problem_bytes, problem_of
from runnel.protocols.http.server.answers import encode_json
from runnel.protocols.http.server.calls import HttpCall

_CREDIT_BYTES: Final = 256 * 1024
_CHUNK_BYTES: Final = 32 * 1024
_HEARTBEAT_SECONDS: Final = 15.0
_RETRY_MS: Final = 2000
_GAPS_MAX: Final = 1000  # gaps that wait to be written; more are merged into one
_HEADERS: Final = [
    (b"content-type", event_stream.CONTENT_TYPE.encode()),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would delay events
]


class HttpLiveStream:
    """A streamed answer: an ASGI application, and the `Sink` of its subscription."""

    def __init__(
        self,
        call: HttpCall,
        patterns: Sequence[str],
        start: Start,
        ids: EventIds,
        *,
        overflow: str,
        form: PayloadForm,
        times: TimeForm,
    ) -> None:
        self._call = call
        self._patterns = patterns
        self._start = start
        self._ids = ids
        self._overflow = overflow
        self._form = form
        self._times = times
        self._arrived: deque[LiveDelivery | GapState] = deque()
        self._gaps_waiting = 0
        self._end: RunnelError | None = None  # why the broker ended the subscription
        self._is_beat_due = False
        self._wake_up = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        call = self._call
        with call.server.enter_stream():
            ended = call.ended
            subscription = await call.access.subscribe(
                SubscribeRequest(
                    1, self, self._patterns, self._start, _CREDIT_BYTES, self._overflow
                )
            )
            try:
                async with self._woken(ended):
                    await self._stream(send, subscription)
            finally:
                subscription.close()

    # --- Called by the broker (Sink) ---

    @property
    def connection_id(self) -> int:
        return self._call.connection.id

    @property
    def peer(self) -> str:
        return self._call.peer

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:  # noqa: ARG002
        self._arrived.append(delivery)
        self._wake_up.set()

    def gap(self, subscription: int, gap: GapState) -> None:  # noqa: ARG002
        """Gaps take no credit, so without a limit any number of them could wait for a client that reads nothing."""
        if self._gaps_waiting >= _GAPS_MAX:
            last = self._arrived[-1]
            if isinstance(last, GapState):
                text = "several gaps, added up because nobody read them"
                gap = GapState(gap.reason, last.missed + gap.missed, text=text)
                self._arrived.pop()
                self._gaps_waiting -= 1
        self._gaps_waiting += 1
        self._arrived.append(gap)
        self._wake_up.set()

    def ended(self, subscription: int, error: RunnelError) -> None:  # noqa: ARG002
        self._end = error
        self._wake_up.set()

    # --- Wake-ups ---

    @asynccontextmanager
    async def _woken(self, ended: asyncio.Event) -> AsyncIterator[None]:
        """Wake the stream for heartbeats, and when the call has to end."""
        loop = self._call.server.loop
        tasks = [loop.create_task(self._beat()), loop.create_task(self._wait_end(ended))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _beat(self) -> None:
        while True:
            await self._call.server.broker.clock.sleep(_HEARTBEAT_SECONDS)
            self._is_beat_due = True
            self._wake_up.set()

    async def _wait_end(self, ended: asyncio.Event) -> None:
        await ended.wait()
        self._wake_up.set()

    # --- Writing ---

    def _is_over(self) -> bool:
        """Whether the call has to end."""
        return self._call.why_ended is not None

    async def _stream(self, send: Send, subscription: OpenSubscription) -> None:
        self._ids.begin(subscription.shards, subscription.partitions)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._write(send, event_stream.preamble(_RETRY_MS, self._ids.current()))
        subscription.start()
        while not self._is_over():
            if self._arrived:
                await self._write_arrived(send, subscription)
            elif self._end is not None:
                break
            elif self._is_beat_due:
                await self._write(send, event_stream.HEARTBEAT)
            else:
                await self._wake_up.wait()
                self._wake_up.clear()
        await self._write_end(send)

    async def _write(self, send: Send, chunk: bytes) -> None:
        """Write a chunk. Waits while the client reads nothing, unless the call has to end."""
        self._is_beat_due = False
        flow = self._call.connection.flow
        while flow.write_paused and not self._is_over():
            draining = self._call.server.loop.create_task(flow.drain())
            draining.add_done_callback(lambda _: self._wake_up.set())
            try:
                while not draining.done() and not self._is_over():
                    await self._wake_up.wait()
                    self._wake_up.clear()
            finally:
                draining.cancel()
        if not flow.write_paused:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _write_arrived(self, send: Send, subscription: OpenSubscription) -> None:
        """Write what has arrived, in chunks of many events. Each delivery that was written gives back its credit."""
        parts: list[bytes] = []
        size = written_bytes = 0
        while self._arrived and not self._is_over():
            arrived = self._arrived.popleft()
            if isinstance(arrived, GapState):
                self._gaps_waiting -= 1
                parts.append(self._gap_event(arrived))
                continue
            if arrived.ends_last_values:
                self._ids.last_sent()
                parts.append(event_stream.event(event_stream.CAUGHT_UP, self._ids.current(), b"{}"))
                continue
            if not arrived.buffers:
                parts.append(self._position_event(arrived))
                continue
            blocks = Blocks(arrived.buffers)
            arrived = msgspec.structs.replace(
                arrived, buffers=()
            )  # frees them: they may be parts of larger buffers
            while not blocks.is_over:
                batch = await blocks.next()
                for event in self._events(arrived, batch, is_last=blocks.is_over):
                    parts.append(event)
                    size += len(event)
                    if size >= _CHUNK_BYTES:
                        chunk, parts, size = b"".join(parts), [], 0
                        await self._write(send, chunk)
                        await asyncio.sleep(
                            0
                        )  # lets other tasks run, even if this client reads fast
                        if self._is_over():
                            return
            written_bytes += arrived.size
            self._call.flow.messages_out += arrived.messages
            self._call.flow.bytes_out += arrived.size
        if parts:
            await self._write(send, b"".join(parts))
        if written_bytes:
            subscription.grant(written_bytes)

    def _events(self, delivery: LiveDelivery, batch: Batch, *, is_last: bool) -> Iterator[bytes]:
        """The events of a batch, made one by one, without last values that the client got before it reconnected.

        `is_last`: this is the last batch of the delivery.
        """
        ids, form, times = self._ids, self._form, self._times
        shard = delivery.shard
        if ids.awaits_last_values and not delivery.next_entry:
            for message, (is_repeated, event_id) in zip(
                messages_of(batch), ids.last_values(batch), strict=True
            ):
                if not is_repeated:
                    yield message_event(event_id, encode_json(message_out(message, form, times)))
            return
        event_ids = ids.ids(
            batch,
            shard.journal,
            shard.shard,
            delivery.epoch,
            delivery.next_entry,
            is_whole=is_last,
        )
        for message, event_id in zip(messages_of(batch), event_ids, strict=True):
            yield message_event(event_id, encode_json(message_out(message, form, times)))

    def _gap_event(self, gap: GapState) -> bytes:
        data = encode_json(gap_out(gap))
        return event_stream.event(event_stream.GAP, self._ids.missed(gap), data)

    def _position_event(self, passed: LiveDelivery) -> bytes:
        journal, shard = passed.shard.journal, passed.shard.shard
        return event_stream.position_event(
            self._ids.passed(journal, shard, passed.epoch, passed.next_entry)
        )

    async def _write_end(self, send: Send) -> None:
        """Write why the stream ends, if the client is still connected and reads."""
        error = self._call.why_ended or self._end
        assert error is not None
        if isinstance(error, ConnectionLostError) or self._call.connection.flow.write_paused:
            return
        problem, _ = problem_of(error)
        is_closing = self._call.server.is_closing and isinstance(error, ClosedError)
        kind = event_stream.CLOSING if is_closing else event_stream.ENDED
        event = event_stream.event(kind, None, problem_bytes(problem))
        await send({"type": "http.response.body", "body": event, "more_body": False})
