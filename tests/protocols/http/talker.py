"""A client that controls every byte, to send what a well-behaved client never would."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Talker:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: str, context: ssl.SSLContext | None = None) -> Talker:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), ssl=context))

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """A request of which nothing is wrong, unless a header says so."""
        lines = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.say(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)

    async def hear(self) -> Answer:
        """The next answer; it must have a length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    async def is_over(self) -> bool:
        """Wait for the other side to end the connection; whether nothing more came before that."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True
        finally:
            self.writer.close()

    def vanish(self) -> None:
        self.writer.transport.abort()
