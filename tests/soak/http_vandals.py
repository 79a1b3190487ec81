"""Ways of being a burden to the HTTP door: bytes that are not HTTP, requests that never end, answers that nobody reads.

All they do comes from a seed, and topics, cursors and subscriptions of theirs begin with `vandal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Final

from tests.fuzz.formats import mutate
from tests.soak.lines import (
    CROWD,
    Entrance,
    Vandal,
    crowd,
    drip,
    end_writing,
    hear_out,
    hear_something,
    line,
    push,
)

_JSON: Final = "content-type: application/json"
_LINES: Final = "content-type: application/x-ndjson"
_NUMBERS: Final = (
    "0",
    "1",
    "-1",
    "1e9",
    "NaN",
    "18446744073709551616",
    "0x10",
    "",
    "%00",
    "9" * 300,
)


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """Of which nothing is wrong."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def requests(random: Random) -> list[bytes]:
    """What a client might ask, with something of everything."""
    topic = f"/v1/topics/vandal%2F{random.randrange(20)}"
    work = f"/v1/subscriptions/vandal-{random.randrange(5)}"
    cursor = f"/v1/cursors/vandal-{random.randrange(5)}"
    mode = random.choice(("shared", "key_shared", "multicast"))
    number = random.choice(_NUMBERS)
    many = b"[" + b",".join([b'{"text": "x", "key": "k"}'] * random.choice((1, 10, 1000))) + b"]"
    asked = [
        request("POST", f"{topic}/messages", random.randbytes(random.randrange(3000))),
        request("POST", f"{topic}/messages", b'{"text": "1", "tags": {"a": "b"}}', _JSON),
        request("POST", f"{topic}/messages", many, _JSON),
        request("POST", f"{topic}/messages", b'{"text": "1"}\n' * 50, _LINES),
        request("GET", f"{topic}/messages?offset={number}&limit=100"),
        request("GET", f"{topic}/messages?wait=0.2"),
        request("GET", f"{topic}/messages/1"),
        request("PUT", work, b'{"patterns": ["vandal/*"], "mode": "%s"}' % mode.encode(), _JSON),
        request("POST", f"{work}/messages?limit={number}&consumer=c{random.randrange(9)}"),
        request("POST", f"{work}/messages?limit=100"),
        request("POST", f"{work}/ack", b'{"acks": ["abcdefghijkl.1.1", ""]}', _JSON),
        request("POST", f"{work}/nack", b'{"acks": ["%d.1.1"]}' % random.randrange(99), _JSON),
        request("POST", f"{work}/move", b'{"start": {"kind": "earliest"}}', _JSON),
        request("GET", f"{work}/dead?offset={number}"),
        request("DELETE", work),
        request("PUT", cursor, b'{"places": [{"topic": "vandal/1", "offset": 1}]}', _JSON),
        request("GET", cursor),
        request("DELETE", f"{topic}/messages"),
        request("DELETE", topic),
        request("GET", "/v1/topics?pattern=" + "%2A" * random.choice((1, 30, 400))),
        request("GET", "/v1/subscriptions"),
        request("GET", "/v1/connections"),
        request("GET", "/v1/statistics"),
        request("GET", "/metrics"),
        request("GET", "/openapi.json"),
        request("GET", "/" + "../" * random.randrange(9) + "%2e%2e/etc/passwd"),
        request(random.choice(("OPTIONS", "TRACE", "PATCH", "HEAD", "BREW")), topic),
    ]
    random.shuffle(asked)
    return asked


def stream(random: Random) -> bytes:
    start = random.choice(("earliest", "latest", "last"))
    pattern = random.choice(("*", "vandal/*", "!*", "live/*"))
    return request("GET", f"/v1/stream?pattern={pattern}&start={start}")


# --- The ways ---


async def say_no_http(entrance: Entrance, random: Random) -> None:
    """Bytes of anything but HTTP/1.1: noise, another protocol's greeting, a head without an end."""
    greetings = (
        random.randbytes(random.choice((1, 16, 3000, 200_000))),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.randbytes(50),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(100),
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"\0" * random.randrange(1, 99) + b"\r\n\r\n",
        b"\r\n" * random.randrange(1, 9000),
        b"GET " + b"/" * random.choice((10, 70_000)) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    )
    async with line(entrance) as (reader, writer):
        await push(writer, random.choice(greetings))
        await hear_out(reader)


async def ask_brokenly(entrance: Entrance, random: Random) -> None:
    """Sensible requests in which bytes have changed on the way."""
    asked = requests(random)
    async with line(entrance) as (reader, writer):
        for one in asked:
            if random.random() < 0.3:
                one = mutate(random, one, random.choice(asked))
            await push(writer, one)
        if random.random() < 0.3:
            end_writing(writer)
        await hear_out(reader)


async def ask_all_at_once(entrance: Entrance, random: Random) -> None:
    """A long pipeline, whose answers are read late or by nobody."""
    async with line(entrance) as (reader, writer):
        if random.random() < 0.5:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        asked = [one for _ in range(random.choice((1, 2, 10))) for one in requests(random)]
        await push(writer, b"".join(asked))
        if random.random() < 0.5:
            end_writing(writer)
        if random.random() < 0.7:
            await hear_out(reader)


async def send_chunked_nonsense(entrance: Entrance, random: Random) -> None:
    """Chunks with wrong sizes, endless extensions and trailers, two lengths at once; bodies that stop half-way."""
    path = f"/v1/topics/vandal%2F{random.randrange(20)}/messages"
    kind = random.choice(("", "content-type: application/x-ndjson\r\n"))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{kind}transfer-encoding: chunked\r\n"
    bodies = (
        b"\r\nffffffffffffffff\r\n" + bytes(100),
        b"\r\n-1\r\nx\r\n0\r\n\r\n",
        b"\r\n5;" + b"x" * 100_000,
        b"\r\n0\r\n" + b"a: b\r\n" * 20_000,
        b"content-length: 5\r\n\r\n5\r\n12345\r\n0\r\n\r\n",
        b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
        b"\r\n" + b'e\r\n{"text": "1"}\n\r\n' * random.randrange(300),
        b"\r\n" + b"1\r\n{\r\n" * random.randrange(9000),
        b"\r\n5\r\n1234567890\r\n0\r\n\r\n",
    )
    async with line(entrance) as (reader, writer):
        await push(writer, head.encode() + random.choice(bodies))
        if random.random() < 0.3:
            end_writing(writer)
        if random.random() < 0.7:
            await hear_out(reader)


async def send_huge_heads(entrance: Entrance, random: Random) -> None:
    """Headers too large, too many, or without an end; bodies announced and not sent."""
    heads = (
        b"x: " + b"y" * random.choice((60_000, 70_000, 5_000_000)) + b"\r\n\r\n",
        b"".join(b"h%d: v\r\n" % number for number in range(20_000)) + b"\r\n",
        b"content-length: 99999999999999999999\r\n\r\n",
        b"content-length: %d\r\n\r\n" % random.choice((2**24, 2**24 + 1, 2**40)) + bytes(1000),
        b"content-length: 5\r\ncontent-length: 6\r\n\r\n123456",
        b"expect: 100-continue\r\ncontent-length: 10\r\n\r\n",
        b"upgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    )
    async with line(entrance) as (reader, writer):
        writer.write(b"POST /v1/topics/vandal%2Fx/messages HTTP/1.1\r\nhost: localhost\r\n")
        await push(writer, random.choice(heads))
        await hear_out(reader)


async def dawdle_over_http(entrance: Entrance, random: Random) -> None:
    """Many connections whose requests come a byte at a time."""

    async def one() -> None:
        asked = random.choice(requests(random))[:200]
        await drip(entrance, random, asked[: random.randrange(1, len(asked))])

    await crowd(one, CROWD)


async def listen_and_vanish(entrance: Entrance, random: Random) -> None:
    """Live streams and long polls that are dropped at once, later, or never read."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            if random.random() < 0.3:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
            long_poll = request("GET", "/v1/topics/vandal%2F1/messages?offset=1&wait=1m")
            writer.write(stream(random) if random.random() < 0.7 else long_poll)
            match random.randrange(4):
                case 0:
                    end_writing(writer)
                    await hear_something(reader)
                case 1:
                    await hear_something(reader)
                case 2:
                    await asyncio.sleep(random.random())
                case _:
                    pass

    await crowd(one, CROWD)


async def take_work_over_http(entrance: Entrance, random: Random) -> None:
    """Consumers that take what they can get under ever new names, acknowledge nothing, and are gone."""
    work = f"/v1/subscriptions/vandal-{random.randrange(5)}"
    made = b'{"patterns": ["vandal/*"], "mode": "shared", "options": {"lease_ms": 1000}}'

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            writer.write(request("PUT", work, made, _JSON))
            name = random.randrange(10**6)
            wait = random.choice(("", "&wait=1", "&wait=1m"))
            writer.write(request("POST", f"{work}/messages?limit=1000&consumer=v{name}{wait}"))
            if random.random() < 0.7:
                await hear_something(reader)

    await crowd(one, CROWD)


async def come_and_go_over_http(entrance: Entrance, random: Random) -> None:
    """Many connections at once, dropped at every moment of a request."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            asked = random.choice(requests(random))
            writer.write(asked[: random.randrange(len(asked) + 1)])
            if random.random() < 0.3:
                end_writing(writer)
            if random.random() < 0.3:
                await hear_something(reader)

    await crowd(one, 4 * CROWD)


HTTP_VANDALS: Final[Sequence[Vandal]] = (
    say_no_http,
    ask_brokenly,
    ask_all_at_once,
    send_chunked_nonsense,
    send_huge_heads,
    dawdle_over_http,
    listen_and_vanish,
    take_work_over_http,
    come_and_go_over_http,
)
