"""A client made of frames only, to send a listener what no real client would."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar, cast

from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.frames import Frame, FrameReader
from runnel.formats.message import Message

P = ParamSpec("P")
A = TypeVar("A", bound=wire.Head)

HELLO = wire.Hello(1, 1, (), "test")
TURNS_MAX = 10_000


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def scenario() -> None:
            await test(*args, **kwargs)

        asyncio.run(scenario())

    return run


async def turn(count: int = 10) -> None:
    """Let the loop turn a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something has come about."""
    for _ in range(TURNS_MAX):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it has not come about")


def packed(head: wire.Head, tail: bytes = b"") -> bytes:
    return wire.encode(head, len(tail)) + tail


def publish(
    request_id: int,
    payload: bytes,
    *,
    level: str | None = None,
    topic: str = "a",
) -> bytes:
    batch = Batch.from_messages([Message(topic, payload)])
    return packed(wire.Publish(request_id, level), batch.pack())


def subscribe(request_id: int, number: int = 1, *patterns: str, credit_bytes: int = 2**30) -> bytes:
    start = wire.Start("latest")
    return packed(wire.Subscribe(request_id, number, patterns or ("*",), start, credit_bytes))


def frames_of(data: bytes) -> list[Frame]:
    return FrameReader(2**30).feed(data)


def answers_in(data: bytes) -> list[wire.Answer]:
    return [wire.decode_answer(frame) for frame in frames_of(data)]


class Talker(asyncio.Protocol):
    """Sends any frame that the test gives it, and keeps every answer until the test asks for it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.answers: deque[tuple[wire.Answer, bytes]] = deque()
        self.is_closed_by_server = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.can_write = True
        self._reader = FrameReader(2**30)
        self._more = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self.answers.append((wire.decode_answer(frame), bytes(frame.tail)))
        self._more.set()

    def eof_received(self) -> bool:
        self.is_closed_by_server = True
        self._more.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(exc)
        self._more.set()

    def pause_writing(self) -> None:
        self.can_write = False

    def resume_writing(self) -> None:
        self.can_write = True

    # --- Talking ---

    def say(self, *frames: bytes | wire.Head) -> None:
        self.transport.write(
            b"".join(packed(each) if isinstance(each, wire.Head) else each for each in frames)
        )

    async def hear_all(self) -> tuple[wire.Answer, bytes]:
        """The next answer and its tail."""
        while not self.answers:
            assert not self.lost.done(), "the connection was closed, and nothing was said"
            self._more.clear()
            await self._more.wait()
        return self.answers.popleft()

    async def hear(self, kind: type[A]) -> A:
        answer, _ = await self.hear_all()
        assert isinstance(answer, kind), answer
        return answer

    async def ask(self, request: bytes | wire.Head, kind: type[A]) -> A:
        self.say(request)
        return await self.hear(kind)

    async def greet(self) -> wire.Welcome:
        return await self.ask(HELLO, wire.Welcome)

    async def hear_end(self) -> list[wire.Answer]:
        """Everything up to the end of the connection."""
        await self.lost
        answers = [answer for answer, _ in self.answers]
        self.answers.clear()
        return answers


class Recorder:
    """An `Output` that keeps what is said."""

    connection_id = 1
    peer = "a test"

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_closed = False
        self.is_input_paused = False

    def queue(
        self, head: bytes, tail: Sequence[bytes | memoryview] = (), tail_bytes: int = 0
    ) -> None:
        if not self.is_closed:
            assert sum(map(len, tail)) == tail_bytes
            self.data += head + b"".join(tail)

    def send(self, head: bytes, tail: Sequence[bytes | memoryview], tail_bytes: int) -> None:
        self.queue(head, tail, tail_bytes)

    def close(self) -> None:
        self.is_closed = True

    def pause_input(self) -> None:
        assert not self.is_input_paused
        self.is_input_paused = True

    def resume_input(self) -> None:
        assert self.is_input_paused
        self.is_input_paused = False

    def take(self) -> list[wire.Answer]:
        """What was said since the last time."""
        data, self.data = bytes(self.data), bytearray()
        return answers_in(data)
