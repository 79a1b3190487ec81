"""The bytes that a connection writes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from runnel.client.connection import BrokerConnection, LoopTimers
from runnel.client.connection.connection import Buffer
from runnel.errors import ConnectionLostError, LimitExceededError, RunnelError
from runnel.formats import wire
from tests.client.running import in_both_loops


class Paper(asyncio.Transport):
    """A transport that keeps what is written, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Buffer]] = []

    def close(self) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append([bytes(data)])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.calls.append([data for data in list_of_data if not isinstance(data, bytearray)])

    @property
    def written(self) -> bytes:
        return b"".join(map(b"".join, self.calls))


class Nobody:
    def connection_writable(self) -> None: ...

    def connection_lost(self, connection: BrokerConnection, error: ConnectionLostError) -> None: ...

    def nodes_changed(self, connection: BrokerConnection, nodes: wire.NodeList) -> None: ...


def connected() -> tuple[BrokerConnection, Paper]:
    connection, paper = BrokerConnection("nowhere", LoopTimers(), Nobody()), Paper()
    connection.connection_made(paper)
    return connection, paper


@in_both_loops
async def test_a_small_frame_leaves_at_once_in_one_piece() -> None:
    connection, paper = connected()
    connection.send(b"head", (b"block", memoryview(b"body")), 9)
    assert paper.calls == [[b"headblockbody"]]


@in_both_loops
async def test_a_large_tail_leaves_by_reference() -> None:
    connection, paper = connected()
    body = bytes(100_000)
    connection.send(b"head", (body,), len(body))
    ((head, sent),) = paper.calls
    assert head == b"head"
    assert sent is body


@in_both_loops
async def test_what_follows_in_a_wake_up_leaves_together_at_its_end() -> None:
    connection, paper = connected()
    for frame in (b"1", b"2", b"3"):
        connection.send(frame)
    assert paper.calls == [[b"1"]]
    await asyncio.sleep(0)
    assert paper.calls == [[b"1"], [b"23"]]
    connection.send(b"4")
    assert paper.calls[2:] == [[b"4"]]


@in_both_loops
async def test_frames_keep_their_order_whatever_their_size() -> None:
    for size in (1, 700, 3000, 70_000):
        connection, paper = connected()
        frames = [bytes([number]) * size for number in range(9)]
        for frame in frames:
            connection.send(frame[:1], (frame[1:],), size - 1)
        await asyncio.sleep(0)
        assert paper.written == b"".join(frames)


@in_both_loops
async def test_a_request_that_is_too_large_is_answered_and_not_sent() -> None:
    connection, paper = connected()
    connection.frame_bytes_max = 100
    answers: list[wire.Answer | RunnelError] = []
    connection.request(
        1, wire.Publish(1), lambda answer, _: answers.append(answer), (bytes(99),), 99
    )
    assert [type(answer) for answer in answers] == [LimitExceededError]
    assert paper.calls == []


@in_both_loops
async def test_closing_sends_what_was_gathered() -> None:
    connection, paper = connected()
    connection.send(b"1")
    connection.send(b"2")
    connection.close()
    assert paper.written == b"12"
