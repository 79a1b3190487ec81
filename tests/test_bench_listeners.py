"""The load of `bin/bench listeners`: its clients see whole answers, however they come, and nothing that was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bench.systems.http_load import Client, LoadConnection

ANSWERS = (
    b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\ncontent-type: application/json\r\n\r\n{"acked":1}',
    b"HTTP/1.1 202 Accepted\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: 4\r\n\r\n\r\n\r\n",
)
BODIES = [b'{"acked":1}', b"", b"\r\n\r\n"]


class WrittenTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


def asking(bodies: list[bytes], count: int) -> Client:
    for number in range(count):
        bodies.append((yield b"request %d" % number))  # noqa: PERF401 - it yields in between


def exchanged(chunks: Sequence[bytes], *, is_closed: bool = False) -> tuple[list[bytes], int]:
    """The bodies that a client got, and how many requests it wrote."""

    async def exchange() -> tuple[list[bytes], int]:
        transport, connection = WrittenTransport(), LoadConnection()
        connection.connection_made(transport)
        bodies: list[bytes] = []
        finished = connection.start(asking(bodies, len(ANSWERS)))
        for chunk in chunks:
            connection.data_received(chunk)
        if is_closed:
            connection.connection_lost(None)
        async with asyncio.timeout(5):
            await finished
        return bodies, len(transport.written)

    return asyncio.run(exchange())


def test_an_answer_split_at_any_byte_is_one_answer() -> None:
    for place in range(1, len(ANSWERS[0])):
        halves = (ANSWERS[0][:place], ANSWERS[0][place:])
        assert exchanged([*halves, *ANSWERS[1:]]) == (BODIES, len(ANSWERS))


def test_answers_that_come_byte_by_byte_are_read() -> None:
    chunks = [bytes((byte,)) for byte in b"".join(ANSWERS)]
    assert exchanged(chunks) == (BODIES, len(ANSWERS))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone", "404 Not Found"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "without its length"),
    ],
    ids=["refused", "chunked"],
)
def test_an_answer_that_cannot_be_counted_ends_the_client_with_the_reason(
    answer: bytes, told: str
) -> None:
    with pytest.raises((ConnectionError, ValueError), match=told):
        exchanged([answer])


def test_a_connection_that_is_closed_ends_its_client() -> None:
    with pytest.raises(ConnectionResetError):
        exchanged([ANSWERS[0]], is_closed=True)
