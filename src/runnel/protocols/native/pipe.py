"""A connection without a socket: two transports in one process, each the other's far end.

They behave like transports of a socket. Bytes arrive in order, in a later turn of the loop, in pieces of any size. A
reader that pauses fills the pipe, which pauses the writer. `close` delivers all written bytes first, `abort` does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

_HIGH_BYTES: Final = 256 * 1024
# The most that one turn delivers, as with a socket's reader.
_TURN_BYTES_MAX: Final = 256 * 1024


def connect_pipe(
    loop: asyncio.AbstractEventLoop,
    server_protocol: asyncio.BaseProtocol,
    client_protocol: asyncio.BaseProtocol,
) -> tuple[PipeTransport, PipeTransport]:
    """Connect two protocols; calls their `connection_made`, and returns the server's and the client's transport."""
    server, client = PipeTransport(loop, server_protocol), PipeTransport(loop, client_protocol)
    server.join(client)
    client.join(server)
    server_protocol.connection_made(server)
    client_protocol.connection_made(client)
    return server, client


class PipeTransport(asyncio.Transport):
    """One end of a pipe. Written bytes wait here until the far end's protocol takes them."""

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
        self._is_ended = False  # no more writes
        self._is_end_delivered = False  # the far end knows that
        self._is_closing = False
        self._is_lost = False

    # --- Writing ---

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        if self._is_ended:
            if self._is_closing:
                return  # a socket's transport drops writes after close, too
            raise RuntimeError("write_eof was called: nothing can be written any more")
        for data in list_of_data:
            # By reference, except a bytearray: its owner may change it.
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
        """Stop reading, and close once the far end has taken all written bytes."""
        if not self._is_closing:
            self._is_closing = self._is_ended = True
            self.expect_delivery()
            if not self._waiting:
                self._lose(None)

    def abort(self) -> None:
        """Close at once; written bytes that the far end has not taken are lost."""
        self._give_up(None)
        self._far.reset()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- Calls from the far end ---

    def join(self, far: PipeTransport) -> None:
        self._far = far

    def expect_delivery(self) -> None:
        """Deliver written bytes in the next turn of the loop."""
        if not self._is_delivery_expected:
            self._is_delivery_expected = True
            self._loop.call_soon(self._deliver)

    def receive(self, source: deque[memoryview], bytes_max: int) -> int:
        """Give the protocol bytes of the source; returns how many it took."""
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
        except Exception as error:  # noqa: BLE001 - a socket's transport also ends if its protocol fails
            self._loop.call_exception_handler(
                {
                    "message": "a protocol failed to process data from a pipe",
                    "exception": error,
                    "transport": self,
                    "protocol": protocol,
                }
            )
            self.abort()
            return 0

    def receive_end(self) -> None:
        """The far end has written everything."""
        if not self._is_closing and not self._protocol.eof_received():  # type: ignore[attr-defined]
            self.close()

    def reset(self) -> None:
        """The far end is gone without having taken everything."""
        self._give_up(ConnectionResetError("the other end of the pipe was closed"))

    # --- Delivery to the far end ---

    def _deliver(self) -> None:
        """Deliver as much as a socket's reader would get at once; the rest in the next turn."""
        self._is_delivery_expected = False
        far = self._far
        if self._waiting and far.is_closing():
            self.reset()  # like a socket whose far end was closed with bytes unread
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
        elif self._is_ended and not self._is_end_delivered:
            self._is_end_delivered = True
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
    """Move bytes from the beginning of the source into the buffer; returns how many."""
    filled = 0
    while source and filled < len(buffer):
        view = source.popleft()
        part = view[: len(buffer) - filled]
        buffer[filled : filled + len(part)] = part
        filled += len(part)
        if len(part) < len(view):
            source.appendleft(view[len(part) :])
    return filled
