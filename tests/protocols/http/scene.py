"""An HTTP listener on loopback, its broker in this loop, a clock that the test moves, and stream readers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, Self

import httpx
import msgspec

from runnel.broker.broker import Broker
from runnel.config import HttpSettings, LogSettings, SecuritySettings, Settings, TopicRule
from runnel.errors import BusyError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.http.listener import HttpListener
from runnel.security.authenticator import Authenticator
from runnel.testing import VirtualClock

_P = ParamSpec("_P")
TIMEOUT_SECONDS = 30
LOG = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0)


def in_loop(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """A test that runs in an event loop of its own, and not for ever."""

    @wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_SECONDS))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds, and a little further; what a socket brings takes a moment."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass
class HttpScene:
    broker: Broker
    listener: HttpListener
    clock: VirtualClock
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.listener.address}"

    async def publish(self, topic: str, *payloads: bytes, key: bytes | None = None) -> None:
        """As one batch."""
        batch = Batch.from_messages([Message(topic, payload, key) for payload in payloads])
        await self.broker.publish(batch)

    async def publish_all(self, *messages: Message) -> None:
        """As one batch, once there is room: many new topics are made in steps."""
        batch = Batch.from_messages(messages)
        while True:
            try:
                await self.broker.publish(batch)
            except BusyError:
                await self.broker.wait_room(messages[0].topic)
            else:
                return

    def stream(self, *patterns: str, **query: str) -> Stream:
        """Not open yet."""
        return Stream(self.listener.address, patterns, query)


@asynccontextmanager
async def open_scene(
    *,
    http: HttpSettings | None = None,
    topics: tuple[TopicRule, ...] = (),
    directory: str | None = None,
    security: SecuritySettings | None = None,
    clock: VirtualClock | None = None,
    settings: Settings | None = None,
    journal_shards: int = 1,
) -> AsyncIterator[HttpScene]:
    """In memory, or in a directory that can be opened again."""
    clock = clock or VirtualClock()
    settings = msgspec.structs.replace(
        settings or Settings(),
        data=directory or "memory:",
        http=msgspec.structs.replace(http or HttpSettings(), listen="127.0.0.1:0"),
        topics=topics,
        log=msgspec.structs.replace(LOG, journal_shards=journal_shards),
        security=security or SecuritySettings(),
    )
    workers = ThreadWorkers(2)
    try:
        broker = await Broker.open(
            settings, directory=directory, disk=RealDisk(), clock=clock, workers=workers
        )
        authenticator = Authenticator.open(settings, clock)
        authenticator.start()
        try:
            listener = await HttpListener.open(broker, authenticator, settings)
            try:
                async with httpx.AsyncClient(
                    base_url=f"http://{listener.address}", timeout=TIMEOUT_SECONDS
                ) as client:
                    yield HttpScene(broker, listener, clock, client)
            finally:
                await listener.close()
        finally:
            await authenticator.close()
            await broker.close()
    finally:
        workers.close()


@dataclass(frozen=True)
class Event:
    kind: str
    id: str
    data: Any

    @property
    def offset(self) -> int:
        return int(self.data["offset"])

    @property
    def text(self) -> str:
        return str(self.data["text"])


@dataclass
class Stream:
    """A reader of `/v1/stream` over a bare socket: it reads what it is asked to read, and no more."""

    address: str
    patterns: tuple[str, ...]
    query: dict[str, str]
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    last_id: str = ""
    retry_ms: int = 0
    comments: int = 0
    is_over: bool = False
    _lines: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        # Small, so that a reader that does not read is soon a slow one.
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=2**14)
        query = httpx.QueryParams(
            [*(("pattern", each) for each in self.patterns), *self.query.items()]
        )
        lines = [f"GET /v1/stream?{query} HTTP/1.1", f"Host: {self.address}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        self.status = int(head.split()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.vanish()

    def vanish(self) -> None:
        self._writer.transport.abort()

    async def _chunk(self) -> bytes:
        size = int((await self._reader.readline()).strip() or b"0", 16)
        data = await self._reader.readexactly(size + 2)
        if not size:
            self.is_over = True
        return data[:-2]

    async def block(self) -> list[str]:
        """The lines up to the next empty one; none once the stream is over."""
        while "" not in self._lines:
            if self.is_over:
                return []
            # Chunks end with whole events.
            self._lines += (await self._chunk()).decode().split("\n")[:-1]
        at = self._lines.index("")
        block, self._lines = self._lines[:at], self._lines[at + 1 :]
        return block

    async def event(self) -> Event | None:
        """The next event, past comments and such; None once the stream is over. Works as browsers do."""
        while block := await self.block():
            fields = {}
            for line in block:
                name, _, value = line.partition(":")
                if not name:
                    self.comments += 1
                else:
                    fields[name] = value.removeprefix(" ")
            self.last_id = fields.get("id", self.last_id)
            self.retry_ms = int(fields.get("retry", self.retry_ms))
            if "data" in fields:
                return Event(fields["event"], self.last_id, json.loads(fields["data"]))
        return None

    async def events(self, count: int) -> list[Event]:
        found = []
        for _ in range(count):
            event = await self.event()
            assert event is not None, "the stream is over"
            found.append(event)
        return found

    async def texts(self, count: int) -> list[str]:
        return [event.text for event in await self.events(count)]


async def given_up(awaitable: Awaitable[object]) -> bool:
    """Whether nothing has come for a little while."""
    try:
        async with asyncio.timeout(0.05):
            await awaitable
    except TimeoutError:
        return True
    return False
