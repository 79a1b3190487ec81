"""One connection: uvicorn's HTTP/1.1 protocol with the limits that it leaves to others.

A head has a size, and a request a time to arrive in; a connection that is idle, or whose client reads nothing, ends.
The listener looks at all of them now and then (`check_times`), by the broker's clock; there is no timer of its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn, Protocol, cast

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from runnel.broker.broker import Broker, ConnectionStats
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.config import Settings
from runnel.errors import (
    HandshakeError,
    LimitExceededError,
    RunnelError,
    TimeoutExpiredError,
)
from runnel.platform.addresses import format_address
from runnel.protocols.http.encoding.problems import PROBLEM_TYPE, problem_bytes, problem_of

HEAD_BYTES_MAX: Final = 64 * 1024
"""Of a request's head; also of what comes in a chunked body beside the body, trailers above all."""
QUEUED_MAX: Final = 64
"""Requests that may wait for the answers to those before them."""
# Whoever was refused is still heard for so long, so that the answer is not lost with the connection.
_LINGER_NS: Final = 1_000_000_000
CONNECTION: Final = "runnel.connection"  # its key in a request's scope
CYCLE: Final = "runnel.cycle"  # uvicorn's side of the request
AUTHORITY: Final = "runnel.authority"  # the host of a request whose target is an absolute URI

_HEAD_BEGIN: Final = b"HTTP/1.1 "
_INT32_MAX: Final = 2**31 - 1
_AGENT_CHARS_MAX: Final = 100
_FIELD_BYTES: Final = len(b": \r\n")

_NOT_HTTP_FAULT: Final = HandshakeError("this is not HTTP/1.1 as RFC 9112 wants it"), 400
_TRAILERS_FAULT: Final = (
    LimitExceededError(f"trailers, or extensions of a chunk, of more than {HEAD_BYTES_MAX} bytes"),
    431,
)

# What goes wrong with a request is answered, counted, or logged by the front: nothing is left for uvicorn to say.
_silent: Final = logging.getLogger("runnel.http.uvicorn")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
_silent.setLevel(logging.CRITICAL + 1)


class ConnectionOwner(Protocol):
    """The listener that a connection came to."""

    broker: Broker
    settings: Settings
    loop: asyncio.AbstractEventLoop
    usual_fields: bytes
    """Of the head of every answer, line by line."""

    @property
    def is_closing(self) -> bool: ...
    def enter(self, connection: HttpConnection) -> RunnelError | None: ...
    def leave(self, connection: HttpConnection) -> None: ...
    def on_answered(self) -> None: ...


class _JoinedWrites:
    """A transport for uvicorn's answers, whose head and body come one after the other: they leave together.

    `hears_out` is asked before it is closed: whether that is left to it.
    """

    __slots__ = ("_head", "_hears_out", "_loop", "_transport", "is_closing")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        hears_out: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._hears_out = hears_out
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        head = self._head
        if head is not None:
            self._head = None
            self._transport.write(head + data)
        elif data.startswith(_HEAD_BEGIN):
            self._head = data
            self._loop.call_soon(self.flush)  # if nothing follows at once
        else:
            self._transport.write(data)

    def write_whole(self, answer: bytes) -> None:
        """A head with its body."""
        self.flush()
        self._transport.write(answer)

    def flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        if not self._hears_out():
            self._transport.close()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Flow(FlowControl):
    """uvicorn's, but that nothing is read while requests are queued: they would grow more and more.

    The one that is being answered needs no more of its body then: it came before the head of the next.
    """

    def __init__(self, transport: asyncio.Transport, queue: Collection[object]) -> None:
        super().__init__(transport)
        self._queue = queue

    def resume_reading(self) -> None:
        if self.read_paused and not self._queue:
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    """See the module's first lines. Requests come one after the other; `on_lost` is the current one's."""

    def __init__(self, server: ConnectionOwner, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {}, server.loop)
        self.logger = _silent
        self.id = 0
        self.http_server = server
        self.flow_of_messages = Flow()
        self.token_name = ""
        self.agent = b""  # as the client calls itself
        self.on_lost: Callable[[], object] | None = None
        """Called once when the client has gone while a request of its is under way."""
        self._opened_ns = 0  # wall clock
        self._is_in_body = False
        self._head_bytes = 0
        self._beside_bytes = 0  # that came since the last of a body
        self._trailer_bytes = 0
        self._discarded_bytes = 0
        self._fault: tuple[RunnelError, int] | None = None  # why the parser was stopped
        self._quiet_since_ns = 0  # nothing has come since then, where nothing is under way
        self._arriving_since_ns: int | None = None  # a request that has not arrived whole
        self._unread_since_ns: int | None = None  # an answer that the client does not read
        self._unread_bytes = 0
        self._is_refused = False

    # --- What the listener asks ---

    @property
    def peer(self) -> str:
        return "" if self.client is None else format_address(*self.client)

    @property
    def peer_host(self) -> str:
        return "" if self.client is None else self.client[0]

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def quiet_since_ns(self) -> int:
        """Where it is not busy: since when. Bytes that are no request do not count."""
        return self._quiet_since_ns

    def row(self) -> ConnectionStats:
        return ConnectionStats(
            self.id,
            "http",
            self.peer,
            self.agent[:_AGENT_CHARS_MAX].decode("latin-1"),
            self._opened_ns,
            0,
            self.transport.get_write_buffer_size(),
            self.flow_of_messages,
            self.token_name,
        )

    def check_times(self, now_ns: int) -> None:
        """End what has taken too long."""
        http = self.http_server.settings.http
        if self._is_refused:
            if now_ns - self._quiet_since_ns > _LINGER_NS:
                self.transport.abort()
        elif self._arriving_since_ns is not None:
            if self.flow.read_paused:  # it is we who do not read
                self._arriving_since_ns = now_ns
            elif now_ns - self._arriving_since_ns > http.request_timeout_ns:
                self._refuse(
                    TimeoutExpiredError("the request did not arrive within http.request_timeout"),
                    408,
                )
        elif not self.is_busy:
            if now_ns - self._quiet_since_ns > http.idle_timeout_ns:
                self.http_server.broker.metrics.counters.connections_idle += 1
                self.transport.close()
        elif self._unread_since_ns is not None:
            waiting_bytes = self.transport.get_write_buffer_size()
            if waiting_bytes < self._unread_bytes:
                self._unread_since_ns = now_ns
            elif now_ns - self._unread_since_ns > http.idle_timeout_ns:
                self.transport.abort()
            self._unread_bytes = waiting_bytes

    def answer(self, cycle: RequestResponseCycle, status: int, fields: bytes, body: bytes) -> bool:
        """Write a whole answer. False: not now, and nothing was written; uvicorn's `send` knows what to do.

        That takes head and body apart and looks into every field, which for a small answer costs more than making it.
        """
        if cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        length = b"content-length: %d\r\n" % len(body)
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        parts = STATUS_LINE[status], self.http_server.usual_fields, length, fields, end, body
        self._joined.write_whole(b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def arriving(self) -> None:
        """A handler waits for more of the body: the client's time for it begins anew."""
        if self._is_in_body:
            self._arriving_since_ns = self.http_server.broker.clock.monotonic_ns()

    def holding(self) -> None:
        """A handler reads no further for now: that is not the client's doing."""
        self._arriving_since_ns = None

    # --- uvicorn's ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joined = _JoinedWrites(transport, self.loop, self._hears_out)
        self.transport = cast("asyncio.Transport", self._joined)
        self.flow = _Flow(transport, self.pipeline)
        clock = self.http_server.broker.clock
        self._opened_ns = clock.time_ns()
        self._quiet_since_ns = clock.monotonic_ns()
        self.id = next(self.http_server.broker.connection_ids)
        self._bound_silence(transport)
        refusal = self.http_server.enter(self)
        if refusal is not None:
            self._turn_away(refusal, 503)

    def _bound_silence(self, transport: asyncio.Transport) -> None:
        """Let the kernel give up a client that acknowledges nothing: what a stream says to it now and then fits the
        socket's buffer for a quarter of an hour, and would not be missed before."""
        option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
        accepted = transport.get_extra_info("socket")
        if option is not None and accepted is not None:
            patience_ms = 2 * self.http_server.settings.http.idle_timeout_ns // 1_000_000
            accepted.setsockopt(socket.IPPROTO_TCP, option, min(patience_ms, _INT32_MAX))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.http_server.leave(self)
        self._tell_lost()

    def _tell_lost(self) -> None:
        react, self.on_lost = self.on_lost, None
        if react is not None:
            react()

    def shutdown(self) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_body:
            self._beside_bytes += len(data)
        else:
            if self._arriving_since_ns is None:
                self._arriving_since_ns = self.http_server.broker.clock.monotonic_ns()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(
                LimitExceededError(f"the head of a request has more than {HEAD_BYTES_MAX} bytes"),
                431,
            )
        elif self._beside_bytes > HEAD_BYTES_MAX:
            self._refuse(*_TRAILERS_FAULT)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, written out because it is hot. A trailer is dropped: nothing here asks for any."""
        if self._is_in_body:
            self._trailer_bytes += len(name) + len(value) + _FIELD_BYTES
            if self._trailer_bytes > HEAD_BYTES_MAX:
                self._stop(*_TRAILERS_FAULT)
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= QUEUED_MAX:
            self._stop(
                LimitExceededError(
                    f"{QUEUED_MAX} requests wait for the answers to those before them; no more are allowed"
                ),
                503,
            )
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._discarded_bytes = 0
        super().on_headers_complete()
        self.scope[CYCLE] = self.cycle  # type: ignore[typeddict-unknown-key]
        self._is_in_body = True
        if not self.url.startswith(b"/") and b"://" in self.url:
            authority = self.url.partition(b"://")[2].partition(b"/")[0]
            self.scope[AUTHORITY] = authority  # type: ignore[typeddict-unknown-key]
        if self.http_server.is_closing:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        super().on_body(body)
        if (
            self.cycle.response_complete
        ):  # answered before it was there: let it come, but not for ever
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self.http_server.settings.http.body_bytes_max:
                self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_body = False
        self._beside_bytes = 0
        self._arriving_since_ns = None
        self._quiet_since_ns = self.http_server.broker.clock.monotonic_ns()

    def on_response_complete(self) -> None:
        """As uvicorn's, without its timer for connections that stay quiet: `check_times` sees to those."""
        if not self._is_refused and not self.transport.is_closing():
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            self.flow.resume_reading()  # if that was the last one queued
        self._quiet_since_ns = self.http_server.broker.clock.monotonic_ns()
        self.http_server.on_answered()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since_ns = self.http_server.broker.clock.monotonic_ns()
        self._unread_bytes = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since_ns = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - it says nothing that helps
        self._refuse(*(self._fault or _NOT_HTTP_FAULT))

    def _unsupported_upgrade_warning(self) -> None:
        """Asked for another protocol (HTTP/2, WebSocket): answered in this one, and then no more."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # --- Refusing ---

    def _stop(self, error: RunnelError, status: int) -> NoReturn:
        """From within the parser: it goes no further, and uvicorn comes to `send_400_response`."""
        self._fault = error, status
        raise httptools.HttpParserError

    def _refuse(self, error: RunnelError, status: int) -> None:
        """What comes cannot be a request, or not in time."""
        if self._is_refused or self.transport.is_closing():
            return
        self.http_server.broker.metrics.counters.protocol_errors += 1
        if self._is_in_body and not self.is_busy:  # it has been answered: there is nothing to say
            self.transport.close()
            return
        if self.is_busy and (self.cycle.response_started or self.pipeline):
            self.transport.abort()  # nothing can be said within another answer
            return
        if self.is_busy:  # its handler waits for what will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._tell_lost()
        self._turn_away(error, status)

    def _turn_away(self, error: RunnelError, status: int) -> None:
        """Say why, and hear the client out."""
        self._write_problem(error, status)
        self._hear_out()

    def _hears_out(self) -> bool:
        """Asked before the connection is closed. A request that has not arrived whole is let come for a moment."""
        if self._is_in_body and not self._is_refused and not self.transport.is_closing():
            self._hear_out()
            return True
        return False

    def _hear_out(self) -> None:
        """Say no more, and listen a little longer: to close on a client that speaks takes the answer from it."""
        self._is_refused = True
        self._quiet_since_ns = self.http_server.broker.clock.monotonic_ns()
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _write_problem(self, error: RunnelError, status: int) -> None:
        problem, headers = problem_of(error)
        body = problem_bytes(msgspec.structs.replace(problem, status=status))
        lines = [
            *(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers),
            b"content-type: ",
            PROBLEM_TYPE.encode(),
            b"\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, body)))
