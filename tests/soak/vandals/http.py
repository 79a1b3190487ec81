"""Attacks on the HTTP listener."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from tests.soak.vandals.vandal import Attack, AttackTarget, Vandal, connected

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
    """A valid request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


class HttpVandal(Vandal):
    """Bytes that are not HTTP, requests that never end, answers that are never read."""

    rounds = (1, 2, 10)

    def noise(self, random: Random) -> Sequence[bytes]:
        return (
            random.randbytes(random.choice((1, 16, 3000, 200_000))),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.randbytes(50),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(100),
            b"GET / HTTP/0.9\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + b"\0" * random.randrange(1, 99) + b"\r\n\r\n",
            b"\r\n" * random.randrange(1, 9000),
            b"GET " + b"/" * random.choice((10, 70_000)) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        )

    def requests(self, random: Random) -> list[bytes]:
        topic = f"/v1/topics/vandal%2F{random.randrange(20)}"
        work = f"/v1/subscriptions/vandal-{random.randrange(5)}"
        cursor = f"/v1/cursors/vandal-{random.randrange(5)}"
        mode = random.choice(("shared", "key_shared", "multicast"))
        number = random.choice(_NUMBERS)
        many = (
            b"[" + b",".join([b'{"text": "x", "key": "k"}'] * random.choice((1, 10, 1000))) + b"]"
        )
        asked = [
            request("POST", f"{topic}/messages", random.randbytes(random.randrange(3000))),
            request("POST", f"{topic}/messages", b'{"text": "1", "tags": {"a": "b"}}', _JSON),
            request("POST", f"{topic}/messages", many, _JSON),
            request("POST", f"{topic}/messages", b'{"text": "1"}\n' * 50, _LINES),
            request("GET", f"{topic}/messages?offset={number}&limit=100"),
            request("GET", f"{topic}/messages?wait=0.2"),
            request("GET", f"{topic}/messages/1"),
            request(
                "PUT", work, b'{"patterns": ["vandal/*"], "mode": "%s"}' % mode.encode(), _JSON
            ),
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

    def streams(self, random: Random) -> bytes:
        if random.random() < 0.3:
            return request("GET", "/v1/topics/vandal%2F1/messages?offset=1&wait=1m")
        start = random.choice(("earliest", "latest", "last"))
        pattern = random.choice(("*", "vandal/*", "!*", "live/*"))
        return request("GET", f"/v1/stream?pattern={pattern}&start={start}")

    def work(self, random: Random) -> bytes:
        path = f"/v1/subscriptions/vandal-{random.randrange(5)}"
        made = b'{"patterns": ["vandal/*"], "mode": "shared", "options": {"lease_ms": 1000}}'
        name = random.randrange(10**6)
        wait = random.choice(("", "&wait=1", "&wait=1m"))
        return request("PUT", path, made, _JSON) + request(
            "POST", f"{path}/messages?limit=1000&consumer=v{name}{wait}"
        )

    @property
    def own_attacks(self) -> Sequence[Attack]:
        return self.send_chunked_nonsense, self.send_huge_heads

    async def send_chunked_nonsense(self, target: AttackTarget, random: Random) -> None:
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
        async with connected(target) as connection:
            await connection.push(head.encode() + random.choice(bodies))
            if random.random() < 0.3:
                connection.end_writing()
            if random.random() < 0.7:
                await connection.read_until_closed()

    async def send_huge_heads(self, target: AttackTarget, random: Random) -> None:
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
        async with connected(target) as connection:
            connection.write(b"POST /v1/topics/vandal%2Fx/messages HTTP/1.1\r\nhost: localhost\r\n")
            await connection.push(random.choice(heads))
            await connection.read_until_closed()
