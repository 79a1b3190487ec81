"""What all hostile clients share: a raw connection, and the attacks that work against every protocol."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import ClassVar, Final, NamedTuple

from tests.fuzz.formats import mutate

# The longest wait for an answer, or for the server to close the connection.
PATIENCE_S: Final = 1.5
# Connections of an attack that opens many at once.
CROWD: Final = 50


class AttackTarget(NamedTuple):
    """The listener that is attacked. `tls` is None where it does not speak TLS."""

    port: int
    tls: ssl.SSLContext | None = None


Attack = Callable[[AttackTarget, Random], Awaitable[None]]


class RawConnection:
    """A connection that keeps to no protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.write = writer.write
        self.close = writer.close
        self.is_closing = writer.is_closing
        self.pause_reading = writer.transport.pause_reading  # type: ignore[attr-defined]

    async def push(self, data: bytes) -> None:
        """Send for as long as the server accepts it."""
        self.write(data)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 4):
                await self._writer.drain()

    async def read_some(self) -> bytes:
        """The first bytes that come, or none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                return await self._reader.read(2**12)
        return b""

    async def read_until_closed(self) -> None:
        """Read until the server closes the connection, or patience ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while await self._reader.read(2**16):
                    pass

    def end_writing(self) -> None:
        """Half-close the connection; TLS cannot do that."""
        if self._writer.can_write_eof():
            self._writer.write_eof()


@asynccontextmanager
async def connected(target: AttackTarget) -> AsyncIterator[RawConnection]:
    """A connection that is cut off at the end, whatever is still under way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, ssl=target.tls)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


async def crowd(one: Callable[[], Awaitable[None]], count: int) -> None:
    """Run many at once. The server may close any of their connections at any moment."""

    async def until_closed() -> None:
        with suppress(OSError):
            await one()

    await asyncio.gather(*(until_closed() for _ in range(count)))


class Vandal(ABC):
    """A hostile client of one protocol: its words, the attacks that every protocol knows, and its own.

    All that it does follows from `random`. The names of its topics, cursors and subscriptions begin with `vandal`.
    """

    greeting: ClassVar[bytes] = b""
    # How often `requests` may be sent in a row on one connection.
    rounds: ClassVar[Sequence[int]] = (1,)
    drops: ClassVar[int] = 4 * CROWD
    workers: ClassVar[int] = CROWD

    @abstractmethod
    def noise(self, random: Random) -> Sequence[bytes]:
        """Bytes that do not belong to the protocol, or only begin like it."""

    @abstractmethod
    def requests(self, random: Random) -> list[bytes]:
        """Valid requests, one of every kind."""

    @abstractmethod
    def streams(self, random: Random) -> bytes:
        """Requests whose answers go on for long."""

    @abstractmethod
    def work(self, random: Random) -> bytes:
        """The requests of a consumer that takes all the messages it can get."""

    def broken_requests(self, random: Random) -> list[bytes]:
        """Valid requests, some with changed bytes."""
        asked = self.requests(random)
        return [
            mutate(random, one, random.choice(asked)) if random.random() < 0.3 else one
            for one in asked
        ]

    @property
    def own_attacks(self) -> Sequence[Attack]:
        """The attacks that only this protocol knows."""
        return ()

    @property
    def attacks(self) -> Sequence[Attack]:
        return (
            self.send_noise,
            self.send_broken_requests,
            self.send_all_at_once,
            self.send_slowly,
            self.abandon_streams,
            self.keep_work,
            self.connect_and_drop,
            *self.own_attacks,
        )

    async def send_noise(self, target: AttackTarget, random: Random) -> None:
        """Bytes that are not the protocol."""
        async with connected(target) as connection:
            await connection.push(random.choice(self.noise(random)))
            if random.random() < 0.2:
                connection.end_writing()
            if random.random() < 0.7:
                await connection.read_until_closed()

    async def send_broken_requests(self, target: AttackTarget, random: Random) -> None:
        """Requests whose bytes changed on the way."""
        async with connected(target) as connection:
            connection.write(self.greeting)
            for one in self.broken_requests(random):
                await connection.push(one)
            if random.random() < 0.3:
                connection.end_writing()
            await connection.read_until_closed()

    async def send_all_at_once(self, target: AttackTarget, random: Random) -> None:
        """Many valid requests in a row, whose answers are read late or never."""
        async with connected(target) as connection:
            if random.random() < 0.3:
                connection.pause_reading()
            asked = [self.requests(random) for _ in range(random.choice(self.rounds))]
            await connection.push(self.greeting + b"".join(one for each in asked for one in each))
            if random.random() < 0.5:
                connection.end_writing()
            if random.random() < 0.7:
                await connection.read_until_closed()

    async def send_slowly(self, target: AttackTarget, random: Random) -> None:
        """Many connections that send a byte at a time, and never all of a request."""

        async def one() -> None:
            said = self.greeting
            if not said or random.random() < 0.5:
                said += random.choice(self.requests(random))[:200]
            said = said[: random.randrange(1, len(said))]
            async with connected(target) as connection:
                for byte in said:
                    if connection.is_closing():
                        return
                    connection.write(bytes((byte,)))
                    await asyncio.sleep(random.uniform(0, 2 * PATIENCE_S / len(said)))

        await crowd(one, CROWD)

    async def abandon_streams(self, target: AttackTarget, random: Random) -> None:
        """Streams that are dropped at once, later, or never read."""

        async def one() -> None:
            async with connected(target) as connection:
                if random.random() < 0.3:
                    connection.pause_reading()
                connection.write(self.greeting + self.streams(random))
                match random.randrange(4):
                    case 0:
                        connection.end_writing()
                        await connection.read_some()
                    case 1:
                        await connection.read_some()
                    case 2:
                        await asyncio.sleep(random.random())
                    case _:
                        pass

        await crowd(one, CROWD)

    async def keep_work(self, target: AttackTarget, random: Random) -> None:
        """Consumers that take what they can get, acknowledge nothing, and vanish."""

        async def one() -> None:
            async with connected(target) as connection:
                await connection.push(self.greeting + self.work(random))
                for _ in range(random.randrange(3)):
                    await connection.read_some()

        await crowd(one, self.workers)

    async def connect_and_drop(self, target: AttackTarget, random: Random) -> None:
        """Many connections at once, dropped in every way and at every moment of a request."""

        async def one() -> None:
            asked = self.requests(random)
            said = self.greeting + (
                b"".join(asked) if random.random() < 0.1 else random.choice(asked)
            )
            if random.random() < 0.3:
                said = self.greeting
            async with connected(target) as connection:
                connection.write(said[: random.randrange(len(said) + 1)])
                match random.randrange(4):
                    case 0:
                        connection.end_writing()
                        await connection.read_until_closed()
                    case 1:
                        await connection.read_some()
                    case 2:
                        connection.close()
                    case _:
                        pass

        await crowd(one, self.drops)
