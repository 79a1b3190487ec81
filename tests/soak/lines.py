"""A bare connection to a door, with TLS or without, for those who do not keep to its protocol."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final, NamedTuple

# Nobody waits longer for an answer, or for being thrown out.
PATIENCE_S: Final = 1.5
# How many come at once where many come.
CROWD: Final = 50


class Entrance(NamedTuple):
    """Where a door is, and whether it speaks TLS."""

    port: int
    tls: ssl.SSLContext | None = None


Vandal = Callable[[Entrance, Random], Awaitable[None]]


@asynccontextmanager
async def line(
    entrance: Entrance,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """It is cut off at the end, whatever is still under way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", entrance.port, ssl=entrance.tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def hear_out(reader: asyncio.StreamReader) -> None:
    """Read until the door has had enough, or for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(2**16):
                pass


async def hear_something(reader: asyncio.StreamReader) -> bytes:
    """What comes first, if anything does."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(2**12)
    return b""


async def push(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send as long as it is taken."""
    writer.write(data)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S / 4):
            await writer.drain()


def end_writing(writer: asyncio.StreamWriter) -> None:
    """Half-close; TLS knows no such thing."""
    if writer.can_write_eof():
        writer.write_eof()


async def drip(entrance: Entrance, random: Random, said: bytes) -> None:
    """Say it a byte at a time, without getting to the end."""
    async with line(entrance) as (_, writer):
        for byte in said:
            if writer.is_closing():
                return
            writer.write(bytes((byte,)))
            await asyncio.sleep(random.uniform(0, 2 * PATIENCE_S / len(said)))


async def crowd(one: Callable[[], Awaitable[None]], count: int) -> None:
    """Many at once; that some are thrown out in the middle of a word is what they come for."""

    async def until_thrown_out() -> None:
        with suppress(OSError):
            await one()

    await asyncio.gather(*(until_thrown_out() for _ in range(count)))
