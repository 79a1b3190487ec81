"""The pipe: two transports that behave as a socket's two ends would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from runnel.protocols.native.pipe import PipeTransport, connect_pipe
from tests.protocols.native.talker import in_loop, turn, until


class End:
    """What both kinds of protocol have in common: they keep what they are told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.events: list[str] = []
        self.error: Exception | None = None
        self.keeps_open = False
        self.transport: PipeTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(PipeTransport, transport)
        self.events.append("made")

    def take(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.error = exc


class StreamEnd(End, asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        self.take(data)


class BufferEnd(End, asyncio.BufferedProtocol):
    def __init__(self, size: int = 10) -> None:
        super().__init__()
        self._buffer = bytearray(size)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.take(bytes(self._buffer[:nbytes]))


KINDS = pytest.mark.parametrize("kind", [StreamEnd, BufferEnd])


def connected(kind: Callable[[], End] = StreamEnd) -> tuple[End, End]:
    server, client = kind(), kind()
    loop = asyncio.get_running_loop()
    transports = connect_pipe(
        loop, cast(asyncio.BaseProtocol, server), cast(asyncio.BaseProtocol, client)
    )
    assert transports == (server.transport, client.transport)
    assert server.events == client.events == ["made"]
    return server, client


@KINDS
@in_loop
async def test_bytes_go_both_ways_in_order_and_in_a_later_turn(kind: type[End]) -> None:
    server, client = connected(kind)
    client.transport.write(b"one ")
    client.transport.writelines([b"two ", memoryview(b"three "), bytearray(b"four")])
    server.transport.write(b"answer")
    assert not server.data
    await turn()
    assert server.data == b"one two three four"
    assert client.data == b"answer"


@in_loop
async def test_a_buffer_that_is_written_may_be_changed_at_once() -> None:
    server, client = connected()
    data = bytearray(b"before")
    client.transport.write(data)
    data[:] = b"after!"
    await turn()
    assert server.data == b"before"


@KINDS
@in_loop
async def test_a_reader_that_pauses_gets_nothing_more_and_its_writer_is_told(
    kind: type[End],
) -> None:
    server, client = connected(kind)
    client.transport.set_write_buffer_limits(high=100, low=20)
    assert client.transport.get_write_buffer_limits() == (20, 100)
    server.transport.pause_reading()
    client.transport.write(b"x" * 100)
    assert client.events == ["made"]
    client.transport.write(b"y")
    assert client.events == ["made", "pause"]
    await turn()
    assert not server.data
    assert client.transport.get_write_buffer_size() == 101
    server.transport.resume_reading()
    await turn()
    assert server.data == b"x" * 100 + b"y"
    assert client.events == ["made", "pause", "resume"]


@in_loop
async def test_a_reader_that_pauses_while_it_reads_keeps_the_rest_for_later() -> None:
    class Hesitant(BufferEnd):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.transport.pause_reading()

    server, client = connected(Hesitant)
    client.transport.write(b"0123456789abcdef")
    await turn()
    assert server.data == b"0123456789"
    server.transport.resume_reading()
    await turn()
    assert server.data == b"0123456789abcdef"


@in_loop
async def test_others_have_their_turn_while_much_goes_through() -> None:
    server, client = connected()
    client.transport.write(bytes(2**20))
    await turn(2)
    assert 0 < len(server.data) < 2**20
    await until(lambda: len(server.data) == 2**20)


@KINDS
@in_loop
async def test_closing_comes_after_what_was_written(kind: type[End]) -> None:
    server, client = connected(kind)
    client.transport.write(b"last words")
    client.transport.close()
    assert client.transport.is_closing()
    client.transport.write(b"nobody hears this")
    await turn()
    assert server.data == b"last words"
    assert server.events == ["made", "eof", "lost"]
    assert client.events == ["made", "lost"]
    assert server.error is client.error is None


@in_loop
async def test_closing_waits_for_a_reader_that_has_paused() -> None:
    server, client = connected()
    server.transport.pause_reading()
    client.transport.write(b"last words")
    client.transport.close()
    await turn()
    assert client.events == ["made"]
    server.transport.resume_reading()
    await turn()
    assert server.data == b"last words"
    assert client.events[-1] == server.events[-1] == "lost"


@in_loop
async def test_one_direction_can_end_before_the_other() -> None:
    server, client = connected()
    server.keeps_open = True
    client.transport.write(b"question")
    client.transport.write_eof()
    with pytest.raises(RuntimeError, match="write_eof"):
        client.transport.write(b"more")
    await turn()
    assert server.events == ["made", "eof"]
    server.transport.write(b"answer")
    server.transport.close()
    await turn()
    assert client.data == b"answer"
    assert server.events == ["made", "eof", "lost"]
    assert client.events == ["made", "eof", "lost"]


@in_loop
async def test_aborting_loses_what_was_written_and_resets_the_other_end() -> None:
    server, client = connected()
    client.transport.write(b"lost words")
    client.transport.abort()
    client.transport.abort()
    await turn()
    assert not server.data
    assert client.events == server.events == ["made", "lost"]
    assert client.error is None
    assert isinstance(server.error, ConnectionResetError)


@in_loop
async def test_writing_to_an_end_that_has_closed_resets() -> None:
    server, client = connected()
    client.transport.write(b"too late")
    server.transport.close()
    await turn()
    assert not server.data
    assert server.events == ["made", "lost"]
    assert isinstance(client.error, ConnectionResetError)


@in_loop
async def test_an_end_whose_protocol_fails_is_aborted_and_told_of() -> None:
    class Broken(StreamEnd):
        def take(self, data: bytes) -> None:
            raise ZeroDivisionError

    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    server, client = connected(Broken)
    client.transport.write(b"x")
    await turn()
    assert server.events == client.events == ["made", "lost"]
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
