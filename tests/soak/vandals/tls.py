"""Attacks on a listener that speaks TLS, before its own protocol begins."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from random import Random
from typing import Final

from tests.soak.vandals.vandal import CROWD, Attack, AttackTarget, connected, crowd

_RECORD: Final = b"\x16\x03\x01"


def _plain(target: AttackTarget) -> AttackTarget:
    return AttackTarget(target.port)


def _client_hello(target: AttackTarget) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """The client's side of TLS without a socket, and the buffers that it reads and writes."""
    assert target.tls is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = target.tls.wrap_bio(incoming, outgoing, server_hostname="localhost")
    _step(client)
    return client, incoming, outgoing


def _step(client: ssl.SSLObject) -> bool:
    """Continue the handshake. Returns whether it is complete."""
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


async def send_plain_bytes(target: AttackTarget, random: Random) -> None:
    """Bytes that are not TLS at all."""
    said = (
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        random.randbytes(random.choice((1, 5, 300, 100_000))),
        _RECORD + random.randbytes(2000),
        _RECORD + b"\xff\xff" + bytes(70_000),
        b"\x15\x03\x03\x00\x02\x02\x28" * 1000,
    )
    async with connected(_plain(target)) as connection:
        await connection.push(random.choice(said))
        if random.random() < 0.3:
            connection.end_writing()
        await connection.read_until_closed()


async def break_handshakes(target: AttackTarget, random: Random) -> None:
    """Handshakes that stop, break or are cut off at any byte."""

    async def one() -> None:
        _, _, outgoing = _client_hello(target)
        hello = bytearray(outgoing.read())
        match random.randrange(3):
            case 0:
                del hello[random.randrange(len(hello)) :]
            case 1:
                hello[random.randrange(len(hello))] ^= 1 << random.randrange(8)
            case _:
                pass
        async with connected(_plain(target)) as connection:
            connection.write(hello)
            if random.random() < 0.5:
                await connection.read_until_closed()

    await crowd(one, CROWD)


async def break_records(target: AttackTarget, random: Random) -> None:
    """A whole handshake, then records with a changed bit."""
    client, incoming, outgoing = _client_hello(target)
    async with connected(_plain(target)) as connection:
        is_done = False
        while not is_done:
            connection.write(outgoing.read())
            if not (heard := await connection.read_some()):
                return
            incoming.write(heard)
            is_done = _step(client)
        client.write(random.randbytes(100))
        record = bytearray(outgoing.read())
        record[random.randrange(len(record))] ^= 1 << random.randrange(8)
        await connection.push(bytes(record) * random.choice((1, 50)))
        await connection.read_until_closed()


async def handshake_and_drop(target: AttackTarget, random: Random) -> None:
    """Many whole handshakes at once, and no byte after them."""

    async def one() -> None:
        async with connected(target) as connection:
            if random.random() < 0.5:
                connection.close()

    await crowd(one, CROWD)


TLS_ATTACKS: Final[Sequence[Attack]] = (
    send_plain_bytes,
    break_handshakes,
    break_records,
    handshake_and_drop,
)
