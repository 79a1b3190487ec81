"""A connection to a broker that only fetches pages of stored messages: one blocking socket, and no event loop.

Tasks read nearly everything over it, at half the cost of a page through a client: no other thread has to be woken, and
one call receives a page (bench/spark.py, "read"). It raises only `PageConnectionError`. In unusual cases (TLS, a moved
topic, a refusal, a restarted broker) the caller fetches the same page again through a client.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

import numpy as np

from runnel.client.connection import parse_url
from runnel.errors import RunnelError
from runnel.formats import wire
from runnel.formats.frames import PREFIX_BYTES, Frame
from runnel.spark.connections import BrokerLogin, ProcessCache

_CLIENT_NAME: Final = "spark"
_CONNECT_TIMEOUT_S: Final = 5.0
# If the broker is silent for this long, a client takes over.
_ANSWER_TIMEOUT_S: Final = 30
_FRAME_BYTES_MAX: Final = 128 * 2**20
_PREFIX: Final = struct.Struct("<II")
_TIMEVAL: Final = struct.Struct("ll")


class PageConnectionError(Exception):
    """The connection cannot fetch this page. Use a client."""


class PageConnection:
    """Fetches one page after the other: `ask`, then `take`. An error closes the connection."""

    def __init__(self, address: BrokerLogin) -> None:
        home = parse_url(address.url)
        if home.ssl is not None:
            raise PageConnectionError("it would have to speak TLS")
        try:
            self._socket = socket.create_connection((home.host, home.port), _CONNECT_TIMEOUT_S)
        except OSError as error:
            raise PageConnectionError(str(error)) from error
        self._number = 0
        self._is_asked = False
        try:
            # A timeout in the kernel leaves the socket blocking. Only a blocking socket receives a page with one call.
            self._socket.settimeout(None)
            timeout = _TIMEVAL.pack(_ANSWER_TIMEOUT_S, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            self.close()
            raise PageConnectionError(str(error)) from error
        number = self.next_number()
        self.ask(wire.Hello(number, wire.VERSION, (), _CLIENT_NAME, address.token))
        welcome, _ = self.take()
        if not isinstance(welcome, wire.Welcome) or welcome.version != wire.VERSION:
            self.close()
            raise PageConnectionError(f"it was not welcome: {welcome}")

    def close(self) -> None:
        self._socket.close()

    def is_idle(self) -> bool:
        """Whether it can take a request. Unrequested data means that the broker is closing."""
        if self._is_asked or self._socket.fileno() < 0:
            return False
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        return True

    def next_number(self) -> int:
        """The number of the next request."""
        self._number += 1
        return self._number

    def ask(self, request: wire.Head) -> None:
        """Send a request with the latest number. Its answer has to be taken before the next request."""
        assert not self._is_asked
        try:
            self._socket.sendall(wire.encode(request))
        except OSError as error:
            self.close()
            raise PageConnectionError(str(error)) from error
        self._is_asked = True

    def take(self) -> tuple[wire.Answer, memoryview]:
        """Receive the answer; returns its head and the bytes behind the head."""
        try:
            frame = self._receive_frame()
            answer = wire.decode_answer(frame)
        except (OSError, RunnelError) as error:
            self.close()
            raise PageConnectionError(str(error)) from error
        if isinstance(answer, wire.Error) or getattr(answer, "id", None) != self._number:
            self.close()
            raise PageConnectionError(f"the answer was {answer}")
        self._is_asked = False
        return answer, frame.tail

    def _receive_frame(self) -> Frame:
        frame_bytes, head_bytes = _PREFIX.unpack(self._receive(PREFIX_BYTES))
        if not 0 < head_bytes <= frame_bytes <= _FRAME_BYTES_MAX:
            raise PageConnectionError(f"a frame of {frame_bytes} bytes with a head of {head_bytes}")
        data = self._receive(frame_bytes)
        return Frame(data[:head_bytes], data[head_bytes + -head_bytes % 8 :])

    def _receive(self, size: int) -> memoryview:
        data = np.empty(size, np.uint8).data
        received = 0
        while received < size:
            count = self._socket.recv_into(data[received:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the broker closed the connection")
            received += count
        return data.toreadonly()


_connections: Final[ProcessCache[BrokerLogin, PageConnection]] = ProcessCache()


def page_connection(address: BrokerLogin) -> PageConnection:
    """This process's connection to a broker, opened if necessary. PageConnectionError if that fails."""
    kept = _connections.get(address)
    if kept is not None and kept.is_idle():
        return kept
    close_page_connection(address)
    opened = PageConnection(address)
    _connections.put(address, opened)
    return opened


def close_page_connection(address: BrokerLogin) -> None:
    """Close a connection whose reader did not take all its answers."""
    kept = _connections.pop(address)
    if kept is not None:
        kept.close()


def close_page_connections() -> None:
    """Close all page connections of this process."""
    for kept in _connections.pop_all():
        kept.close()
