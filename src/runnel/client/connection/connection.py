"""One connection to a broker: sends and receives frames, matches answers to requests, and pings while it is quiet.

It does not know what requests mean. Each request has a callable for its answer, which is called exactly once, with the
answer or with an error; the loss of the connection is one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeAlias, cast

from runnel.client.connection.timers import Handle, Timers
from runnel.errors import (
    ConnectionLostError,
    LimitExceededError,
    MovedError,
    RunnelError,
    Unavailable,
    from_details,
)
from runnel.formats import wire, work_heads
from runnel.formats.frames import PREFIX_BYTES, FrameReader
from runnel.formats.memory import keep_freed_memory

Buffer: TypeAlias = bytes | memoryview
OnAnswer: TypeAlias = Callable[[wire.Answer | RunnelError, memoryview], None]

# The largest frame that a broker may send: the largest possible batch with its envelope.
_FRAME_BYTES_MAX: Final = 128 * 2**20
_RECEIVE_BYTES: Final = 256 * 2**10
# Memory for an announced frame is allocated at once up to this size. A requested page is rarely larger.
_TRUSTED_BYTES: Final = 8 * 2**20
# Frames gathered in one turn of the loop are sent before its end when they reach this size.
_EARLY_FLUSH_BYTES: Final = 64 * 2**10
# Buffers are joined up to this size: the copy costs less than giving the system several buffers.
_JOINED_BYTES_MAX: Final = 2 * 2**10
# How many requests without an answer are remembered, so that a refusal reaches them.
_UNANSWERED_MAX: Final = 1024
_PINGS_PER_IDLE_TIMEOUT: Final = 3
_NO_TAIL: Final = memoryview(b"")

# The first bytes of Runnel's other listeners, and of all other HTTP servers. Neither can begin a frame of the native
# protocol: the frame of the first would be too long, and that of the second would have no head.
#
# The beginning of an HTTP/1 status line.
_HTTP: Final = b"HTTP/"
# HTTP/2, which carries gRPC, begins with a SETTINGS frame:
#
#     0   3   length      big-endian
#     3   1   type        4
#     4   1   flags       0
#     5   4   stream      0
_HTTP2_TYPE_AT: Final = 3
_HTTP2_SETTINGS: Final = b"\x04\x00\x00\x00\x00\x00"


class Receiver(Protocol):
    """Receives the messages, gaps and end of a subscription. Each call only queues."""

    def delivered(self, head: wire.Deliver, tail: memoryview) -> None: ...

    def missed(self, notice: wire.GapNotice) -> None: ...

    def ended(self, error: RunnelError) -> None: ...


class PartReceiver(Receiver, Protocol):
    """Receives one part of a subscription: also the shards that come to its node, and leave it."""

    def shards_came(self, shards: Sequence[wire.ShardTerm]) -> None: ...

    def shards_left(self, shards: Sequence[wire.ShardTerm]) -> None: ...


class WorkReceiver(Protocol):
    """Receives the leases, recalls and end of a consumer. Each call only queues, or sends a small frame."""

    def leased(self, leases: Sequence[work_heads.Lease], tail: memoryview) -> None: ...

    def recalled(self, parts: Sequence[work_heads.DeliveryPart]) -> None: ...

    def reported_late(self, parts: Sequence[work_heads.DeliveryPart]) -> None: ...

    def moving(self, epoch: int, deliveries: Sequence[int]) -> None: ...

    def held(self, leases: Sequence[work_heads.HeldLease]) -> None: ...

    def wants(self, *, is_wanting: bool) -> None: ...

    def ended(self, error: RunnelError) -> None: ...


class BrokerConnectionOwner(Protocol):
    """Is called when the connection is writable again, when it is lost, and when the broker's nodes change."""

    def connection_writable(self) -> None: ...

    def connection_lost(self, connection: BrokerConnection, error: ConnectionLostError) -> None: ...

    def nodes_changed(self, connection: BrokerConnection, nodes: wire.NodeList) -> None: ...


class _ReceiveBuffers(threading.local):
    """One receive buffer for all connections of a thread: what is kept of it is copied before the next read."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.view = memoryview(bytearray(_RECEIVE_BYTES))


_receive_buffers: Final = _ReceiveBuffers()


class BrokerConnection(asyncio.BufferedProtocol):
    """An asyncio protocol for any transport: TCP, TLS, or a pipe to a broker in this process."""

    def __init__(self, peer: str, timers: Timers, owner: BrokerConnectionOwner) -> None:
        self.peer: Final = peer
        self.receivers: Final[dict[int, Receiver]] = {}
        self.consumers: Final[dict[int, WorkReceiver]] = {}
        self.is_open = False
        self.is_writable = True
        self.frame_bytes_max = _FRAME_BYTES_MAX  # that the broker accepts; its welcome replaces it
        self.closed: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._timers = timers
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader(_FRAME_BYTES_MAX, trusted_bytes=_TRUSTED_BYTES)
        self._view = _receive_buffers.view
        self._is_room_lent = False
        self._pending: dict[int, OnAnswer] = {}
        self._unanswered: deque[int] = deque()
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._is_flush_scheduled = False
        self._problem: str | None = None
        self.was_closed_without_reason = False  # by the broker
        self.other_listener: str | None = None  # a listener that is not native, by its answer
        self.final_error: RunnelError | None = None  # the error that the broker ended it with
        self._is_given_up = False
        self._pinger: Handle | None = None
        self._ping_interval_s = 0.0
        self._has_heard = self._has_spoken = False
        self._ping_id = 0

    # --- Called by asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from it
        if self._is_given_up:
            self._transport.abort()
            return
        self.is_open = True
        if self._transport.get_extra_info("sslcontext") is not None:
            # Decrypted bytes may stay in the buffer while other connections read.
            self._view = memoryview(bytearray(_RECEIVE_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        room = self._frames.room()
        self._is_room_lent = room is not None
        return self._view if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        self._has_heard = True
        try:
            if self._is_room_lent:
                frames = self._frames.fill(nbytes)
            else:
                frames = self._frames.feed(self._view[:nbytes])
            for frame in frames:
                answer = wire.decode_answer(frame)
                if take := self._TAKEN_BY.get(type(answer)):
                    take(self, answer, frame.tail)
                else:
                    self._take_answer(answer, frame.tail)
        except RunnelError as error:
            if not self._is_room_lent:
                self.other_listener = listener_kind(self._view[:nbytes])
            self.abort(f"the broker sent what cannot be understood: {error}")

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._owner.connection_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_closed_without_reason = self._problem is None and exc is None
        reason = self._problem or (
            str(exc) or type(exc).__name__ if exc else "the broker closed it"
        )
        self.is_open = False
        self._out.clear()
        if self._pinger is not None:
            self._pinger.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        error = ConnectionLostError(f"the connection to {self.peer} was lost: {reason}")
        self._owner.connection_lost(
            self, error
        )  # first: the callbacks below must not use the connection
        pending, self._pending = self._pending, {}
        for on_answer in pending.values():
            on_answer(error, _NO_TAIL)

    # --- Sending ---

    def request(
        self,
        number: int,
        head: wire.Head,
        on_answer: OnAnswer,
        tail: Sequence[Buffer] = (),
        tail_bytes: int = 0,
    ) -> None:
        """Send a request with this id; its tail is not copied. The answer goes to `on_answer`."""
        encoded = wire.encode(head, tail_bytes)
        if not self.is_open:
            on_answer(ConnectionLostError(f"the connection to {self.peer} was lost"), _NO_TAIL)
            return
        frame_bytes = len(encoded) + tail_bytes
        if frame_bytes - PREFIX_BYTES > self.frame_bytes_max:
            on_answer(self._too_large(frame_bytes), _NO_TAIL)
            return
        self._pending[number] = on_answer
        self.send(encoded, tail, tail_bytes)

    def request_unanswered(
        self,
        number: int,
        head: wire.Head,
        on_answer: OnAnswer,
        tail: Sequence[Buffer] = (),
        tail_bytes: int = 0,
    ) -> None:
        """Send a request that has no answer. `on_answer` is called only with a refusal, if that comes soon."""
        self._unanswered.append(number)
        if len(self._unanswered) > _UNANSWERED_MAX:
            self._pending.pop(self._unanswered.popleft(), None)
        self.request(number, head, on_answer, tail, tail_bytes)

    def check_size(self, frame_bytes: int) -> None:
        """Refuse a frame that is too large: the broker would end the connection, which others share."""
        if frame_bytes - PREFIX_BYTES > self.frame_bytes_max:
            raise self._too_large(frame_bytes)

    def _too_large(self, frame_bytes: int) -> LimitExceededError:
        return LimitExceededError(
            f"a request of {frame_bytes} bytes; the broker takes {self.frame_bytes_max} "
            "(native.frame_bytes_max)"
        )

    def send(self, encoded: Buffer, tail: Sequence[Buffer] = (), tail_bytes: int = 0) -> None:
        """Send an encoded frame.

        The first frame in a turn of the loop is sent at once; the others together at its end, or earlier if they
        are many.
        """
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)
            self._transmit((encoded, *tail), len(encoded) + tail_bytes)
            return
        self._out.append(encoded)
        self._out += tail
        self._out_bytes += len(encoded) + tail_bytes
        if self._out_bytes >= _EARLY_FLUSH_BYTES:
            self._write()

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if self._out:
            self._write()

    def _write(self) -> None:
        out, out_bytes = self._out, self._out_bytes
        self._out, self._out_bytes = [], 0
        self._transmit(out, out_bytes)

    def _transmit(self, buffers: Sequence[Buffer], size_bytes: int) -> None:
        if self.is_open and self._transport is not None:
            self._has_spoken = True
            if size_bytes <= _JOINED_BYTES_MAX:
                self._transport.write(b"".join(buffers))
            else:
                self._transport.writelines(buffers)

    def close(self) -> None:
        """Send what is waiting, then end the connection. The future `closed` is set when it has ended."""
        self._problem = self._problem or "this client closed it"
        if self._transport is not None and self.is_open:
            self._write()
            self._transport.close()

    def abort(self, problem: str) -> None:
        """End the connection at once, without sending what is waiting."""
        self._problem = self._problem or problem
        if self._transport is not None:
            self._transport.abort()

    async def wait_aborted(self, problem: str) -> None:
        """End the connection at once, and wait for its end. A connection that is still being made never opens."""
        self._is_given_up = True
        self.abort(problem)
        if self.is_open:
            await asyncio.wait((self.closed,))

    # --- Receiving ---

    def _take_answer(self, answer: Any, tail: memoryview) -> None:
        if on_answer := self._pending.pop(answer.id, None):
            on_answer(answer, tail)

    def _take_delivery(self, head: wire.Deliver, tail: memoryview) -> None:
        if receiver := self.receivers.get(head.subscription):
            receiver.delivered(head, tail)

    def _take_gap(self, head: wire.GapNotice, _tail: memoryview) -> None:
        if receiver := self.receivers.get(head.subscription):
            receiver.missed(head)

    def _take_came(self, head: wire.ShardsCame, _tail: memoryview) -> None:
        if part := self.receivers.get(head.subscription):
            cast("PartReceiver", part).shards_came(head.shards)

    def _take_left(self, head: wire.ShardsLeft, _tail: memoryview) -> None:
        if part := self.receivers.get(head.subscription):
            cast("PartReceiver", part).shards_left(head.shards)

    def _take_nodes(self, head: wire.NodeList, tail: memoryview) -> None:
        self._owner.nodes_changed(self, head)
        self._take_answer(head, tail)

    def _take_end(self, head: wire.Ended, _tail: memoryview) -> None:
        if receiver := self.receivers.pop(head.subscription, None):
            if head.code == MovedError.code:
                receiver.ended(MovedError(head.text, head.routes))
            else:
                receiver.ended(_rebuild_error(head.code, head.text, retriable=head.retriable))

    def _take_work(self, head: work_heads.WorkHead, tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.leased(head.leases, tail)

    def _take_recall(self, head: work_heads.Recall, _tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.recalled(head.parts)

    def _take_late(self, head: work_heads.Late, _tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.reported_late(head.parts)

    def _take_moving(self, head: work_heads.Moving, _tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.moving(head.epoch, head.deliveries)

    def _take_held(self, head: work_heads.Held, _tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.held(head.leases)

    def _take_wants(self, head: work_heads.Wants, _tail: memoryview) -> None:
        if consumer := self.consumers.get(head.consumer):
            consumer.wants(is_wanting=head.is_wanting)

    def _take_consumer_end(self, head: work_heads.ConsumerEnded, _tail: memoryview) -> None:
        if consumer := self.consumers.pop(head.consumer, None):
            consumer.ended(_rebuild_error(head.code, head.text, retriable=head.retriable))

    def _take_closing(self, head: wire.Closing, _tail: memoryview) -> None:
        self._problem = f"the broker said that it is closing: {head.text}"

    def _take_error(self, answer: wire.Error, tail: memoryview) -> None:
        if not answer.id:
            self._problem = f"the broker ended it: {answer.text} ({answer.code})"
            self.final_error = _rebuild_error(answer.code, answer.text, retriable=answer.retriable)
            return
        if on_answer := self._pending.pop(answer.id, None):
            error: RunnelError
            if answer.code == MovedError.code:
                error = MovedError(answer.text, answer.routes)
            else:
                error = _rebuild_error(
                    answer.code, answer.text, answer.details, retriable=answer.retriable
                )
            on_answer(error, tail)

    # All types but plain answers. A look-up is faster than a check of one type after the other (bench/latency.py).
    _TAKEN_BY: ClassVar[dict[type, Callable[[BrokerConnection, Any, memoryview], None]]] = {
        wire.Deliver: _take_delivery,
        wire.GapNotice: _take_gap,
        wire.ShardsCame: _take_came,
        wire.ShardsLeft: _take_left,
        wire.NodeList: _take_nodes,
        wire.Ended: _take_end,
        wire.Closing: _take_closing,
        wire.Error: _take_error,
        work_heads.WorkHead: _take_work,
        work_heads.Recall: _take_recall,
        work_heads.Late: _take_late,
        work_heads.Moving: _take_moving,
        work_heads.Held: _take_held,
        work_heads.Wants: _take_wants,
        work_heads.ConsumerEnded: _take_consumer_end,
    }

    # --- Pings ---

    def keep_alive(self, idle_timeout_ms: int, next_number: Callable[[], int]) -> None:
        """Send something at least every third of the broker's idle timeout.

        A broker that sends nothing for such a third after a ping is considered dead.
        """
        self._ping_interval_s = idle_timeout_ms / 1000 / _PINGS_PER_IDLE_TIMEOUT
        if self._ping_interval_s > 0:
            self._pinger = self._timers.call_later(
                self._ping_interval_s, lambda: self._check_alive(next_number)
            )

    def _check_alive(self, next_number: Callable[[], int]) -> None:
        if self._ping_id and not self._has_heard:
            self.abort(f"no answer to a ping for {self._ping_interval_s:g} s")
            return
        if not self._ping_id and not (self._has_heard and self._has_spoken):
            self._ping_id = next_number()
            self.request(self._ping_id, wire.Ping(self._ping_id), self._take_pong)
        self._has_heard = self._has_spoken = False
        self._pinger = self._timers.call_later(
            self._ping_interval_s, lambda: self._check_alive(next_number)
        )

    def _take_pong(self, answer: wire.Answer | RunnelError, tail: memoryview) -> None:  # noqa: ARG002
        self._ping_id = 0


def _rebuild_error(
    code: str, text: str, details: dict[str, str | int] | None = None, *, retriable: bool
) -> RunnelError:
    """The broker's error. An unknown code still says whether trying again may help."""
    error = from_details(code, text, details or {})
    if retriable and not error.retriable:
        return Unavailable(f"{text} ({code})")
    return error


def listener_kind(beginning: memoryview) -> str | None:
    """The kind of listener whose answer begins with these bytes. None: unknown."""
    first = bytes(beginning[: _HTTP2_TYPE_AT + len(_HTTP2_SETTINGS)])
    if first.startswith(_HTTP):
        return "an HTTP listener"
    if first[_HTTP2_TYPE_AT:] == _HTTP2_SETTINGS:
        return "a gRPC listener"
    return None
