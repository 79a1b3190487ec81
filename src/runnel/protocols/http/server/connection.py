"""One connection: uvicorn's HTTP/1.1 protocol with the limits that uvicorn itself lacks.

The head of a request has a maximum size, and a request has a maximum time to arrive. A connection that is idle, or
whose client reads nothing, is closed. A connection has no timer: the server calls `check_times` of all connections
periodically, by the broker's clock.
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
"""Limit of a request's head, and of what a chunked body contains besides its data, trailers above all."""
QUEUED_MAX: Final = 64
"""Pipelined requests that may wait for the answers to earlier ones."""
# A refused connection is still read for this long: closing it at once could lose the answer.
_LINGER_NS: Final = 1_000_000_000
CONNECTION: Final = "runnel.connection"  # the connection's key in a request's scope
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

# `Front` answers, counts or logs every failure of a request, so uvicorn itself logs nothing.
_silent: Final = logging.getLogger("runnel.http.uvicorn")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
_silent.setLevel(logging.CRITICAL + 1)


class ConnectionOwner(Protocol):
    """The server, as its connections see it."""

    broker: Broker
    settings: Settings
    loop: asyncio.AbstractEventLoop
    usual_fields: bytes
    """Header lines of every answer."""

    @property
    def is_closing(self) -> bool: ...
    def enter(self, connection: HttpConnection) -> RunnelError | None: ...
    def leave(self, connection: HttpConnection) -> None: ...
    def on_answered(self) -> None: ...


class _JoinedWrites:
    """A transport for uvicorn, which writes an answer's head and body separately: they leave in one write.

    `close` calls `lingers` first. If that returns True, the connection closes itself later.
    """

    __slots__ = ("_head", "_lingers", "_loop", "_transport", "is_closing")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        lingers: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._lingers = lingers
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
        """Write an answer, its head and its body together."""
        self.flush()
        self._transport.write(answer)

    def flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        if not self._lingers():
            self._transport.close()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Flow(FlowControl):
    """uvicorn's flow control, but nothing is read while requests are queued: the queue would grow without end.

    The request that is being answered waits for nothing then: its body came before the head of the next one.
    """

    def __init__(self, transport: asyncio.Transport, queue: Collection[object]) -> None:
        super().__init__(transport)
        self._queue = queue

    def resume_reading(self) -> None:
        if self.read_paused and not self._queue:
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    """One client's connection. Its requests are served one after the other; `on_lost` belongs to the current one."""

    def __init__(self, server: ConnectionOwner, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {}, server.loop)
        self.logger = _silent
        self.id = 0
        self.http_server = server
        self.flow_of_messages = Flow()
        self.token_name = ""
        self.agent = b""  # the client's User-Agent
        self.on_lost: Callable[[], object] | None = None
        """Called once, if the client disconnects while its request is under way."""
        self._opened_ns = 0  # wall clock
        self._is_in_body = False
        self._head_bytes = 0
        self._overhead_bytes = 0  # received since the last piece of a body's data
        self._trailer_bytes = 0
        self._discarded_bytes = 0
        self._fault: tuple[RunnelError, int] | None = None  # why the parser was stopped
        self._quiet_since_ns = 0  # since when it is idle, if no request is under way
        self._arriving_since_ns: int | None = (
            None  # since when an incomplete request has been arriving
        )
        self._unread_since_ns: int | None = (
            None  # since when the client has read nothing of an answer
        )
        self._unread_bytes = 0
        self._is_refused = False

    # --- For the server and the handlers ---

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
        """Since when it is idle, if it is not busy. Bytes that complete no request do not count."""
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
        """Refuse a request, or close the connection, if a timeout has passed."""
        http = self.http_server.settings.http
        if self._is_refused:
            if now_ns - self._quiet_since_ns > _LINGER_NS:
                self.transport.abort()
        elif self._arriving_since_ns is not None:
            if self.flow.read_paused:  # the server itself does not read
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
        """Write a whole answer. False: this is not possible now, and nothing was written; use uvicorn's `send`.

        `send` takes head and body separately and checks every field. For a small answer this costs more than making it.
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

    def restart_request_timeout(self) -> None:
        """Restart the client's time to send: a handler waits for more of the body."""
        if self._is_in_body:
            self._arriving_since_ns = self.http_server.broker.clock.monotonic_ns()

    def suspend_request_timeout(self) -> None:
        """Stop counting the client's time to send: the handler, not the client, is the one that pauses."""
        self._arriving_since_ns = None

    # --- Called by uvicorn ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joined = _JoinedWrites(transport, self.loop, self._lingers)
        self.transport = cast("asyncio.Transport", self._joined)
        self.flow = _Flow(transport, self.pipeline)
        clock = self.http_server.broker.clock
        self._opened_ns = clock.time_ns()
        self._quiet_since_ns = clock.monotonic_ns()
        self.id = next(self.http_server.broker.connection_ids)
        self._set_tcp_user_timeout(transport)
        refusal = self.http_server.enter(self)
        if refusal is not None:
            self._turn_away(refusal, 503)

    def _set_tcp_user_timeout(self, transport: asyncio.Transport) -> None:
        """Let the kernel close the connection of a client that acknowledges nothing.

        Otherwise the heartbeats of a stream fit the socket's buffer for a quarter of an hour, and only then the loss
        would be noticed.
        """
        option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
        accepted = transport.get_extra_info("socket")
        if option is not None and accepted is not None:
            timeout_ms = 2 * self.http_server.settings.http.idle_timeout_ns // 1_000_000
            accepted.setsockopt(socket.IPPROTO_TCP, option, min(timeout_ms, _INT32_MAX))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.http_server.leave(self)
        self._call_on_lost()

    def _call_on_lost(self) -> None:
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
            self._overhead_bytes += len(data)
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
        elif self._overhead_bytes > HEAD_BYTES_MAX:
            self._refuse(*_TRAILERS_FAULT)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Does what uvicorn's does, written out because it is hot. Trailers are dropped: no handler uses them."""
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
        self._overhead_bytes = 0
        super().on_body(body)
        # The request was answered before its body had arrived: read the rest, but not without limit.
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self.http_server.settings.http.body_bytes_max:
                self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_body = False
        self._overhead_bytes = 0
        self._arriving_since_ns = None
        self._quiet_since_ns = self.http_server.broker.clock.monotonic_ns()

    def on_response_complete(self) -> None:
        """Does what uvicorn's does, without its timer for idle connections: `check_times` closes those."""
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

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the text does not help a client
        self._refuse(*(self._fault or _NOT_HTTP_FAULT))

    def _unsupported_upgrade_warning(self) -> None:
        """The client asks for another protocol (HTTP/2, WebSocket): answer in this one, then close."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # --- Refusing ---

    def _stop(self, error: RunnelError, status: int) -> NoReturn:
        """Called within the parser: stop it, so that uvicorn calls `send_400_response`."""
        self._fault = error, status
        raise httptools.HttpParserError

    def _refuse(self, error: RunnelError, status: int) -> None:
        """Refuse data that is no valid request, or that did not arrive in time."""
        if self._is_refused or self.transport.is_closing():
            return
        self.http_server.broker.metrics.counters.protocol_errors += 1
        if self._is_in_body and not self.is_busy:  # it has been answered already
            self.transport.close()
            return
        if self.is_busy and (self.cycle.response_started or self.pipeline):
            self.transport.abort()  # an error cannot be written within another answer
            return
        if self.is_busy:  # its handler waits for a body that will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._call_on_lost()
        self._turn_away(error, status)

    def _turn_away(self, error: RunnelError, status: int) -> None:
        """Write the error, and linger."""
        self._write_problem(error, status)
        self._linger()

    def _lingers(self) -> bool:
        """Called before closing. True: a request is still arriving, so the connection lingers first."""
        if self._is_in_body and not self._is_refused and not self.transport.is_closing():
            self._linger()
            return True
        return False

    def _linger(self) -> None:
        """Write nothing more, and read a little longer: closing while the client sends could lose the answer."""
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
