"""One connection's bytes: frames in, one or two writes per wake-up out; and what becomes of the silent and the slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, cast

from runnel.broker.broker import Broker, ConnectionStats
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.config import Settings, format_duration
from runnel.errors import HandshakeError, RunnelError, TimeoutExpiredError
from runnel.formats.frames import Frame, FrameReader
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.native.greeting import answer_to_http
from runnel.protocols.native.output import Buffer
from runnel.protocols.native.session import Session
from runnel.protocols.native.turns import Turns
from runnel.protocols.native.wake_up import WakeUp
from runnel.security.authenticator import Authenticator

RECEIVE_BYTES: Final = 256 * 1024
HELLO_BYTES_MAX: Final = 8 * 1024
"""The largest first frame. More is not kept of a client before it is admitted."""

# What is queued is written at once when there is so much, not only at the end of the turn.
_FLUSH_BYTES: Final = 256 * 1024
# So little is joined into one buffer: copying it costs less than handing over many.
_JOIN_BYTES: Final = 16 * 1024
# Where the transport holds more than the first, subscriptions wait until it holds less than the second.
_WRITE_BYTES_HIGH: Final = 1024 * 1024
_WRITE_BYTES_LOW: Final = 256 * 1024
# A connection that has been told everything may take so long to read it and to close its side.
_LINGER_NS: Final = 2_000_000_000


class Host(Protocol):
    """What a connection needs of the listener it comes through."""

    broker: Broker
    settings: Settings
    tasks: OwnedTasks
    turns: Turns
    wake_up: WakeUp

    def enter(self, connection: NativeConnection) -> None:
        """It has been made: let it in, or turn it away."""

    def leave(self, connection: NativeConnection) -> None:
        """It is gone."""


class NativeConnection(asyncio.BufferedProtocol):
    """Between a transport and a `Session`, whose `Output` it is."""

    __slots__ = (
        "_buffer",
        "_bytes_in",
        "_bytes_out",
        "_connected_ns",
        "_is_admitted",
        "_is_closed",
        "_is_held_by_session",
        "_is_held_for_turn",
        "_is_input_over",
        "_is_input_own",
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
        server: Host,
        buffer: memoryview,
        *,
        authenticator: Authenticator | None,
        times_out: bool,
        own_buffer_bytes: int = 0,
    ) -> None:
        """`buffer` may be shared with others: nothing stays in it when `buffer_updated` returns.

        With `own_buffer_bytes` a buffer of that size takes its place once the client is admitted.

        Without a authenticator the client may do everything: it is in this process.
        """
        self._server = server
        self._buffer = buffer
        self._times_out = times_out
        self._own_buffer_bytes = own_buffer_bytes
        self._is_admitted = False
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._offered_bytes = 0
        self._is_input_own = False  # the reader's own room was offered, not the buffer
        self._is_input_over = False  # the client will send no more
        self._is_held_by_session = False
        self._is_held_for_turn = False
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._is_write_wanted = False  # at the end of this turn
        self._is_closed = False  # nothing more is said; the rest of the input is ignored
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
            turns=server.turns,
        )

    # --- What the transport tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BYTES_HIGH, low=_WRITE_BYTES_LOW)
        self.peer = _peer_name(transport.get_extra_info("peername"))
        self._server.enter(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - we know better
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
            # There is probably more, and the loop would read on and on: others have their turn first.
            self._is_held_for_turn = True
            self._transport.pause_reading()
            self._server.wake_up.read_later(self)
        try:
            if self._is_input_own:
                frames = self._reader.fill(nbytes)
            elif self._is_admitted:
                frames = self._reader.feed(self._buffer[:nbytes])
            else:
                frames = self._hear_hello(self._buffer[:nbytes])
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

    def _hear_hello(self, chunk: memoryview) -> list[Frame]:
        """Takes the first frame alone. What follows it is not looked at unless it has made the client welcome."""
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
        """The client has said everything. It still gets its answers, where the transport can do that."""
        self._is_input_over = True
        if self._is_closed or not self._transport.can_write_eof():
            return False
        self.session.end_input()
        return True

    def pause_writing(self) -> None:
        self.session.pause_output()

    def resume_writing(self) -> None:
        self.session.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is lost, why ever
        self._is_closed = True
        self._pending.clear()
        # At once: session and connection know each other, and so stay until the garbage collector comes.
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._buffer = memoryview(b"")
        self.session.lost()
        self._server.leave(self)

    # --- What the session tells (session.Output) ---

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
        self._is_write_wanted = True  # what follows in this turn leaves at its end
        wake_up.write_later(self)
        if not self._transport.is_closing():
            self._bytes_out += len(head) + tail_bytes
            self._transport.write(b"".join((head, *tail)))

    def close(self) -> None:
        """Write what is queued, then close our side, and wait a moment for the client's.

        A socket that is closed with bytes unread resets the connection, and the client may lose what it was told last.
        So what still comes is read, and ignored, until the client has closed its side or time is up.
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
        self._is_held_by_session = True
        if not self._is_held_for_turn and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_input(self) -> None:
        self._is_held_by_session = False
        self._read_on()

    # --- What the listener tells ---

    def flush(self) -> None:
        """One write for everything that is queued."""
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
        self._is_held_for_turn = False
        self._read_on()

    def refuse(self, error: RunnelError, *, lingers: bool) -> None:
        """Tell why this connection cannot be, and close it."""
        self.session.fail(error)
        if not lingers:
            self._transport.close()

    @property
    def is_stranger(self) -> bool:
        """Whether it has yet to be admitted, and came from outside."""
        return self._times_out and not self._is_admitted

    def abort(self) -> None:
        self._is_closed = True
        self._transport.abort()

    def row(self) -> ConnectionStats:
        """As the metrics show it."""
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
        """Now and then: has it been silent for too long?"""
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

    def _read_on(self) -> None:
        if not (
            self._is_held_by_session
            or self._is_held_for_turn
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
