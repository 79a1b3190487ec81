"""The sockets between parent and child: messages both ways, and the end of either as an end of file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from runnel.processes.messages import LENGTH_BYTES, FromChild, ToChild, encode, length_of


class Channel:
    """One end, within a running loop. Make one with `await Channel.open(…)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        end.settimeout(0)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: ToChild | FromChild) -> None:
        """Send without waiting. If the other end is gone, nothing happens: `receive` ends for it."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> AsyncIterator[bytes]:
        """The content of each message, until the other end is gone."""
        try:
            while True:
                header = await self._reader.readexactly(LENGTH_BYTES)
                yield await self._reader.readexactly(length_of(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def close(self) -> None:
        """Send what is waiting, and close this end."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the other end was gone first


def receive_blocking(end: socket.socket) -> bytes | None:
    """The first message, before there is a loop; None: the other end is gone."""
    header = _read_exactly(end, LENGTH_BYTES)
    return None if header is None else _read_exactly(end, length_of(header))


def _read_exactly(end: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = end.recv(min(count, 2**16))
        except ConnectionResetError:  # it was killed before it had read everything
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
