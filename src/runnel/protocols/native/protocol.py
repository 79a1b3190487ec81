"""The bytes of one connection: cuts frames, writes once or twice per wake-up, closes silent and slow connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, cast

from runnel.broker.access import MakeAccess
from runnel.broker.broker import Broker, ConnectionStats
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.config import Settings, format_duration
from runnel.errors import HandshakeError, RunnelError, TimeoutExpiredError
from runnel.formats.frames import Frame, FrameReader
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.native.greeting import answer_to_http
from runnel.protocols.native.output import Buffer
from runnel.protocols.native.request_quota import RequestQuota
from runnel.protocols.native.session import Session
from runnel.protocols.native.wake_up import WakeUp
from runnel.security.authenticator import Authenticator

RECEIVE_BYTES: Final = 256 * 1024
HELLO_BYTES_MAX: Final = 8 * 1024
"""The largest first frame. The broker buffers no more of a client before it is admitted."""

# Queued frames of this size are written at once, not only at the end of the turn.
_FLUSH_BYTES: Final = 256 * 1024
# Up to this size, buffers are joined into one: copying costs less than handing over many.
_JOIN_BYTES: Final = 16 * 1024
# When the transport buffers more than the first, subscriptions wait until it buffers less than the second.
_WRITE_BYTES_HIGH: Final = 1024 * 1024
_WRITE_BYTES_LOW: Final = 256 * 1024
# How long a client may take to read the last frames and to close its side.
_LINGER_NS: Final = 2_000_000_000


class ConnectionHost(Protocol):
    """The part of the native server that a connection uses."""

    broker: Broker
    settings: Settings
    tasks: OwnedTasks
    request_quota: RequestQuota
    wake_up: WakeUp
    make_access: MakeAccess

    def enter(self, connection: NativeConnection) -> None:
        """A connection was made: accept or refuse it."""

    def leave(self, connection: NativeConnection) -> None:
        """A connection is gone."""


class NativeConnection(asyncio.BufferedProtocol):
    """Connects a transport with a `Session`; it is the session's `Output`."""

    __slots__ = (
        "_buffer",
        "_bytes_in",
        "_bytes_out",
        "_connected_ns",
        "_is_admitted",
        "_is_closed",
        "_is_input_over",
        "_is_input_own",
        "_is_paused_by_session",
        "_is_paused_for_turn",
        "_is_write_wanted",
        "_offered_bytes",
        "_own_buffer_bytes",
        "_pending",
        "_pending_bytes",
        "_reader",
        "_server",
        "_since_ns",
        "_times_out",
        "_transport",
        "_was_heard",
        "connection_id",
        "peer",
        "session",
    )

    def __init__(
        self,
        server: ConnectionHost,
        buffer: memoryview,
        *,
        authenticator: Authenticator | None,
        times_out: bool,
        own_buffer_bytes: int = 0,
    ) -> None:
        """Connections may share `buffer`: nothing stays in it when `buffer_updated` returns.

        With `own_buffer_bytes` a buffer of that size replaces it once the client is admitted.

        Without an authenticator the client may do everything: it is in this process.
        """
        self._server = server
        self._buffer = buffer
        self._times_out = times_out
        self._own_buffer_bytes = own_buffer_bytes
        self._is_admitted = False
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._offered_bytes = 0
        self._is_input_own = False  # `get_buffer` returned the reader's own room, not the buffer
        self._is_input_over = False  # the client will send no more
        self._is_paused_by_session = False
        self._is_paused_for_turn = False
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._is_write_wanted = False  # at the end of this turn
        self._is_closed = False  # no more output; further input is ignored
        self._was_heard = False
        self.connection_id = 0
        self.peer = "?"
        self._connected_ns = server.broker.clock.time_ns()
        self._since_ns = server.broker.clock.monotonic_ns()
        self._bytes_in = self._bytes_out = 0
        self.session = Session(
            server.broker,
            server.settings,
            self,
            authenticator=authenticator,
            tasks=server.tasks,
            request_quota=server.request_quota,
            make_access=server.make_access,
        )

    # --- Calls from the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BYTES_HIGH, low=_WRITE_BYTES_LOW)
        self.peer = _peer_name(transport.get_extra_info("peername"))
        self._server.enter(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffers have sizes of their own
        room = None if self._is_closed else self._reader.room()
        self._is_input_own = room is not None
        buffer = self._buffer if room is None else room
        self._offered_bytes = len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closed:
            return
        self._was_heard = True
        self._bytes_in += nbytes
        if nbytes == self._offered_bytes:
            # More has probably arrived, and the loop would keep reading. Other connections have their turn first.
            self._is_paused_for_turn = True
            self._transport.pause_reading()
            self._server.wake_up.read_later(self)
        try:
            if self._is_input_own:
                frames = self._reader.fill(nbytes)
            elif self._is_admitted:
                frames = self._reader.feed(self._buffer[:nbytes])
            else:
                frames = self._read_hello(self._buffer[:nbytes])
        except RunnelError as error:
            self._server.broker.metrics.counters.protocol_errors += 1
            is_beginning = self._bytes_in == nbytes
            answer = answer_to_http(self._buffer[:nbytes]) if is_beginning else None
            if answer is None:
                self.session.fail(error)
            else:
                self.queue(answer)
                self.session.close()
        else:
            if frames:
                if len(frames) > 1:
                    self._server.wake_up.is_crowded = True
                self.session.receive(frames)

    def _read_hello(self, chunk: memoryview) -> list[Frame]:
        """Read the first frame alone. Frames behind it are read only if it admits the client."""
        begin = 0
        while begin < len(chunk) and not self.session.has_greeted:
            end = begin + self._reader.missing_bytes
            frames = self._reader.feed(chunk[begin:end])
            begin = end
            if frames:
                self.session.receive(frames)
        if not self.session.is_admitted:
            return []
        self._is_admitted = True
        self._reader = FrameReader(self._server.settings.native.frame_bytes_max)
        frames = self._reader.feed(chunk[begin:])
        if self._own_buffer_bytes:
            self._buffer = memoryview(bytearray(self._own_buffer_bytes))
        return frames

    def eof_received(self) -> bool:
        """The client sends no more. It still gets its answers if the transport can close one direction alone."""
        self._is_input_over = True
        if self._is_closed or not self._transport.can_write_eof():
            return False
        self.session.end_input()
        return True

    def pause_writing(self) -> None:
        self.session.pause_output()

    def resume_writing(self) -> None:
        self.session.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason makes no difference
        self._is_closed = True
        self._pending.clear()
        # Free the buffers now: session and connection refer to each other, so both wait for the garbage collector.
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._buffer = memoryview(b"")
        self.session.lost()
        self._server.leave(self)

    # --- Calls from the session (`Output`) ---

    def queue(self, head: bytes, tail: Sequence[Buffer] = (), tail_bytes: int = 0) -> None:
        if self._is_closed:
            return
        if not self._is_write_wanted:
            self._is_write_wanted = True
            self._server.wake_up.write_later(self)
        pending = self._pending
        pending.append(head)
        if tail_bytes:
            pending += tail
        self._pending_bytes += len(head) + tail_bytes
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def send(self, head: bytes, tail: Sequence[Buffer], tail_bytes: int) -> None:
        wake_up = self._server.wake_up
        waits = self._is_write_wanted or self._is_closed or wake_up.is_crowded
        if waits or tail_bytes > _JOIN_BYTES:
            self.queue(head, tail, tail_bytes)
            return
        self._is_write_wanted = True  # later frames of this turn leave at its end
        wake_up.write_later(self)
        if not self._transport.is_closing():
            self._bytes_out += len(head) + tail_bytes
            self._transport.write(b"".join((head, *tail)))

    def close(self) -> None:
        """Write all queued frames, close our side, and wait a moment for the client to close its side.

        Closing a socket with unread bytes resets the connection, and the client may lose the last frames. So the
        connection reads and ignores further input until the client has closed its side or time is up.
        """
        if self._is_closed:
            return
        self.flush()
        self._is_closed = True
        if self._transport.is_closing():
            return
        if self._is_input_over or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._since_ns = self._server.broker.clock.monotonic_ns()
            self._transport.write_eof()
            self._transport.resume_reading()

    def pause_input(self) -> None:
        self._is_paused_by_session = True
        if not self._is_paused_for_turn and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_input(self) -> None:
        self._is_paused_by_session = False
        self._resume_reading()

    # --- Calls from the server ---

    def flush(self) -> None:
        """Write all queued frames at once."""
        self._is_write_wanted = False
        pending = self._pending
        if not pending or self._transport.is_closing():
            return
        size = self._pending_bytes
        self._bytes_out += size
        self._pending = []
        self._pending_bytes = 0
        if size <= _JOIN_BYTES:
            self._transport.write(b"".join(pending))
        else:
            self._transport.writelines(pending)

    def begin_turn(self) -> None:
        self._is_paused_for_turn = False
        self._resume_reading()

    def refuse(self, error: RunnelError, *, lingers: bool) -> None:
        """Tell the client why its connection is refused, and close it."""
        self.session.fail(error)
        if not lingers:
            self._transport.close()

    @property
    def awaits_admission(self) -> bool:
        """Whether the client comes from outside the process and is not admitted yet."""
        return self._times_out and not self._is_admitted

    def abort(self) -> None:
        self._is_closed = True
        self._transport.abort()

    def row(self) -> ConnectionStats:
        """The connection as the metrics show it."""
        session = self.session
        return ConnectionStats(
            self.connection_id,
            "native",
            self.peer,
            session.client,
            self._connected_ns,
            len(session.subscriptions) + len(session.consumers),
            self._pending_bytes + self._transport.get_write_buffer_size(),
            Flow(
                session.messages_in,
                self._bytes_in,
                session.messages_out,
                self._bytes_out,
            ),
            session.token_name,
        )

    def check_times(self, now_ns: int) -> None:
        """Close the connection if it has been silent for too long. The server calls this at intervals."""
        native = self._server.settings.native
        silent_ns = now_ns - self._since_ns
        if self._is_closed:
            if silent_ns > _LINGER_NS:
                self.abort()
        elif not self._times_out:
            return
        elif not self.session.has_greeted:
            if silent_ns > native.handshake_timeout_ns:
                within = format_duration(native.handshake_timeout_ns)
                self.session.fail(HandshakeError(f"no hello came within {within}"))
        elif self._was_heard or self.session.is_held_back:
            self._was_heard = False
            self._since_ns = now_ns
        elif silent_ns > native.idle_timeout_ns:
            self._server.broker.metrics.counters.connections_idle += 1
            silence = format_duration(native.idle_timeout_ns)
            self.session.fail(
                TimeoutExpiredError(f"nothing was heard for {silence}; ping more often")
            )

    def _resume_reading(self) -> None:
        if not (
            self._is_paused_by_session
            or self._is_paused_for_turn
            or self._is_input_over
            or self._transport.is_closing()
        ):
            self._transport.resume_reading()


def _peer_name(address: object) -> str:
    match address:
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        case str():
            return address
        case _:
            return "?"
