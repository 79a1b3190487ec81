"""A publisher for every protocol: it takes messages at once, and sends them in groups and in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from runnel.client.results import Receipt
from runnel.errors import ClientFault, ClosedError, ProducerFault, RunnelError
from runnel.formats.message import NO_TAGS, Message
from tests.conformance.clients.remote_readers import Closable


class Outgoing(msgspec.Struct, frozen=True):
    """A message to publish, and the partition that it was given, if any."""

    message: Message
    partition: int | None = None


def outgoing(
    topic: str,
    payload: bytes,
    *,
    key: bytes | None = None,
    tags: Mapping[str, str] | None = None,
    event_time_ns: int | None = None,
    partition: int | None = None,
    partition_key: bytes | None = None,
    uid: bytes | None = None,
) -> Outgoing:
    """A message that is sent now."""
    now_ns = time.time_ns()
    message = Message(
        topic,
        payload,
        key=key,
        tags=tags or NO_TAGS,
        event_time_ns=now_ns if event_time_ns is None else event_time_ns,
        transmit_time_ns=now_ns,
        uid=uid,
        partition_key=partition_key,
    )
    return Outgoing(message, partition)


# Publishes a group, in order within each topic. Returns for each message its receipt, or why it was refused.
PublishMany = Callable[[Sequence[Outgoing]], Awaitable[Sequence[Receipt | RunnelError]]]


class RemotePublisher(Closable):
    """The result of `bus.publisher`. It sends whatever it has at once, without lingering."""

    def __init__(
        self,
        publish_many: PublishMany,
        topic: str | None,
        *,
        batch_messages_max: int,
        buffer_bytes_max: int,
        open_first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.buffered_bytes = 0
        self.publish_many = publish_many
        self._topic = topic
        self._group_messages_max = batch_messages_max
        self._buffer_bytes_max = buffer_bytes_max
        self.open_first = open_first
        self._waiting: deque[tuple[Outgoing, asyncio.Future[Receipt]]] = deque()
        self._failure: RunnelError | None = None  # the first failure since the last flush
        self._end: RunnelError | None = None  # once set, nothing can be sent
        self._sending: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self.open_first is not None:
            opening, self.open_first = self.open_first, None
            await opening()

    async def close(self) -> None:
        try:
            await self.flush()
        finally:
            self._end = self._end or ClosedError("the publisher has been closed")

    def send(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.submit(payload, topic, key, tags)

    def submit(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> asyncio.Future[Receipt]:
        if self.open_first is not None:
            raise ClientFault("a named publisher is used in an `async with`, which gets its term")
        if self._end is not None:
            raise self._end
        chosen = topic or self._topic
        if chosen is None:
            raise ClientFault("no topic: give send() one, or the publisher a default")
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.append((outgoing(chosen, payload, key=key, tags=tags), future))
        self.buffered_bytes += len(payload)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())
        return future

    async def _send_all(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), self._group_messages_max)
            group = [self._waiting.popleft() for _ in range(count)]
            try:
                answers = await self.publish_many([each for each, _ in group])
            except RunnelError as error:
                answers = [error] * count
            for (sent, future), answer in zip(group, answers, strict=True):
                self.buffered_bytes -= len(sent.message.payload)
                if isinstance(answer, Receipt):
                    future.set_result(answer)
                else:
                    self._failure = self._failure or answer
                    if isinstance(answer, ProducerFault):
                        self._end = answer
                    future.set_exception(answer)
                    future.exception()  # `flush` raises it, whether or not the future is awaited

    async def ready(self) -> None:
        while self.buffered_bytes > self._buffer_bytes_max and self._sending is not None:
            await asyncio.wait({self._sending})

    async def flush(self) -> None:
        while self._sending is not None and not self._sending.done():
            with contextlib.suppress(RunnelError):
                await self._sending
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
