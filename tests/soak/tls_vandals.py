"""Ways of being a burden to a door that speaks TLS, before any protocol of ours begins. All of it comes from a seed."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from random import Random
from typing import Final

from tests.soak.lines import (
    CROWD,
    Entrance,
    Vandal,
    crowd,
    end_writing,
    hear_out,
    hear_something,
    line,
    push,
)

_RECORD: Final = b"\x16\x03\x01"


def _plain(entrance: Entrance) -> Entrance:
    return Entrance(entrance.port)


def _client_hello(entrance: Entrance) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """One side of TLS without a socket: what it would read, and what it would send."""
    assert entrance.tls is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = entrance.tls.wrap_bio(incoming, outgoing, server_hostname="localhost")
    _step(client)
    return client, incoming, outgoing


def _step(client: ssl.SSLObject) -> bool:
    """Whether the handshake is over."""
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


async def speak_plainly(entrance: Entrance, random: Random) -> None:
    """What is not TLS at all."""
    said = (
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        random.randbytes(random.choice((1, 5, 300, 100_000))),
        _RECORD + random.randbytes(2000),
        _RECORD + b"\xff\xff" + bytes(70_000),
        b"\x15\x03\x03\x00\x02\x02\x28" * 1000,
    )
    async with line(_plain(entrance)) as (reader, writer):
        await push(writer, random.choice(said))
        if random.random() < 0.3:
            end_writing(writer)
        await hear_out(reader)


async def shake_hands_half_way(entrance: Entrance, random: Random) -> None:
    """Handshakes that stop, break or are cut off at any byte."""

    async def one() -> None:
        _, _, outgoing = _client_hello(entrance)
        hello = bytearray(outgoing.read())
        match random.randrange(3):
            case 0:
                del hello[random.randrange(len(hello)) :]
            case 1:
                hello[random.randrange(len(hello))] ^= 1 << random.randrange(8)
            case _:
                pass
        async with line(_plain(entrance)) as (reader, writer):
            writer.write(hello)
            if random.random() < 0.5:
                await hear_out(reader)

    await crowd(one, CROWD)


async def break_records(entrance: Entrance, random: Random) -> None:
    """A whole handshake, then records that are not what they should be."""
    client, incoming, outgoing = _client_hello(entrance)
    async with line(_plain(entrance)) as (reader, writer):
        is_done = False
        while not is_done:
            writer.write(outgoing.read())
            if not (heard := await hear_something(reader)):
                return
            incoming.write(heard)
            is_done = _step(client)
        client.write(random.randbytes(100))
        record = bytearray(outgoing.read())
        record[random.randrange(len(record))] ^= 1 << random.randrange(8)
        await push(writer, bytes(record) * random.choice((1, 50)))
        await hear_out(reader)


async def shake_hands_and_go(entrance: Entrance, random: Random) -> None:
    """Many whole handshakes at once, after which nothing is said."""

    async def one() -> None:
        async with line(entrance) as (_, writer):
            if random.random() < 0.5:
                writer.close()

    await crowd(one, CROWD)


TLS_VANDALS: Final[Sequence[Vandal]] = (
    speak_plainly,
    shake_hands_half_way,
    break_records,
    shake_hands_and_go,
)
