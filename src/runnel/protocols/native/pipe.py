"""A connection without a socket: two transports in one process, each the other's far end.

They behave as a socket's would: bytes come in order, in a later turn of the loop and in pieces of their own; a reader
that pauses fills the pipe, and the writer is told; `close` comes after what was written, `abort` does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

_HIGH_BYTES: Final = 256 * 1024
# A socket's reader would not get more at once either.
_TURN_BYTES_MAX: Final = 256 * 1024


def connect_pipe(
    loop: asyncio.AbstractEventLoop,
    server_protocol: asyncio.BaseProtocol,
    client_protocol: asyncio.BaseProtocol,
) -> tuple[PipeTransport, PipeTransport]:
    """Connect two protocols; returns the server's transport and the client's. Both are told at once."""
    server, client = PipeTransport(loop, server_protocol), PipeTransport(loop, client_protocol)
    server.join(client)
    client.join(server)
    server_protocol.connection_made(server)
    client_protocol.connection_made(client)
    return server, client


class PipeTransport(asyncio.Transport):
    """One end. What is written here waits here, until the far end's protocol takes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": "in-process"})
        self._loop = loop
        self._protocol = protocol
        self._far: PipeTransport
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._high = _HIGH_BYTES
        self._low = _HIGH_BYTES // 4
        self._is_protocol_paused = False
        self._is_reading = True
        self._is_delivery_expected = False
        self._is_ended = False  # nothing will be written here any more
        self._is_end_told = False  # and the far end knows
        self._is_closing = False
        self._is_lost = False

    # --- Writing ---

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        if self._is_ended:
            if self._is_closing:
                return  # as a socket's transport: what comes after close is dropped
            raise RuntimeError("write_eof was called: nothing can be written any more")
        for data in list_of_data:
            # By reference, but for a bytearray: its owner may change it.
            view = memoryview(bytes(data) if isinstance(data, bytearray) else data)
            if view.nbytes:
                self._waiting.append(view.cast("B"))
                self._waiting_bytes += view.nbytes
        self.expect_delivery()
        if self._waiting_bytes > self._high and not self._is_protocol_paused:
            self._is_protocol_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._is_ended = True
        self.expect_delivery()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    # --- Reading ---

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_reading = True
            self._far.expect_delivery()

    # --- The end ---

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """What was written still goes out; nothing more comes in."""
        if not self._is_closing:
            self._is_closing = self._is_ended = True
            self.expect_delivery()
            if not self._waiting:
                self._lose(None)

    def abort(self) -> None:
        """At once: what was written and not taken yet is lost."""
        self._give_up(None)
        self._far.reset()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- What the other end calls ---

    def join(self, far: PipeTransport) -> None:
        self._far = far

    def expect_delivery(self) -> None:
        """Whatever can be handed over is, in the next turn of the loop."""
        if not self._is_delivery_expected:
            self._is_delivery_expected = True
            self._loop.call_soon(self._deliver)

    def receive(self, source: deque[memoryview], bytes_max: int) -> int:
        """Let the protocol take some bytes of the source; returns how many."""
        protocol = self._protocol
        try:
            if isinstance(protocol, asyncio.BufferedProtocol):
                buffer = memoryview(protocol.get_buffer(bytes_max)).cast("B")
                taken = _move(source, buffer[:bytes_max])
                protocol.buffer_updated(taken)
                return taken
            data = bytearray(min(bytes_max, sum(map(len, source))))
            taken = _move(source, memoryview(data))
            protocol.data_received(bytes(data))  # type: ignore[attr-defined]
            return taken
        except Exception as error:  # noqa: BLE001 - as with a socket: its protocol failed, it ends
            self._loop.call_exception_handler(
                {
                    "message": "a protocol failed to take what came through a pipe",
                    "exception": error,
                    "transport": self,
                    "protocol": protocol,
                }
            )
            self.abort()
            return 0

    def receive_end(self) -> None:
        """The other end has said everything."""
        if not self._is_closing and not self._protocol.eof_received():  # type: ignore[attr-defined]
            self.close()

    def reset(self) -> None:
        """The other end is gone, without having taken everything."""
        self._give_up(ConnectionResetError("the other end of the pipe was closed"))

    # --- From here to the other end ---

    def _deliver(self) -> None:
        """Hand over as much as a socket's reader would get at once; the rest in the next turn."""
        self._is_delivery_expected = False
        far = self._far
        if self._waiting and far.is_closing():
            self.reset()  # as a socket, of which the other end was closed with bytes unread
            return
        left = _TURN_BYTES_MAX
        while left and self._waiting and far.is_reading():
            taken = far.receive(self._waiting, left)
            left -= taken
            self._waiting_bytes -= taken
        if self._is_protocol_paused and self._waiting_bytes <= self._low:
            self._is_protocol_paused = False
            self._protocol.resume_writing()
        if self._waiting:
            if far.is_reading():
                self.expect_delivery()
        elif self._is_ended and not self._is_end_told:
            self._is_end_told = True
            far.receive_end()
            if self._is_closing:
                self._lose(None)

    def _give_up(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_closing = self._is_ended = True
            self._waiting.clear()
            self._waiting_bytes = 0
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)


def _move(source: deque[memoryview], buffer: memoryview) -> int:
    """Fill the buffer from the beginning of the source, as far as it goes; returns how far that was."""
    filled = 0
    while source and filled < len(buffer):
        view = source.popleft()
        part = view[: len(buffer) - filled]
        buffer[filled : filled + len(part)] = part
        filled += len(part)
        if len(part) < len(view):
            source.appendleft(view[len(part) :])
    return filled
