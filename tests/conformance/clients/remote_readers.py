"""Live subscriptions and consumers of acknowledged work, for every protocol."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from runnel.client import Gap
from runnel.client.consumer import LateWork
from runnel.errors import ClientFault, LateAckError
from runnel.formats.message import Message

Arrival = Message | Gap


class Closable(ABC):
    """Used in `async with`, which opens it and closes it."""

    async def open(self) -> None:  # noqa: B027 - most have nothing to open
        """May be called again."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class RemoteSubscription(Closable):
    """The result of `bus.subscribe`. A task reads the stream; it stops while `buffer_bytes` of payloads wait here."""

    def __init__(
        self, position: Any, buffer_bytes: int, on_gap: Callable[[Gap], object] | None
    ) -> None:
        if buffer_bytes < 1:
            raise ClientFault(f"buffer_bytes is {buffer_bytes}: at least 1 is needed")
        self.position = position  # where another subscription can continue
        self.is_closing = False  # the broker announced that it shuts down
        self.gaps: deque[Gap] = deque()
        self._buffer_bytes = buffer_bytes
        self._on_gap = on_gap
        self._arrived: deque[Arrival] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self._has_ended = False
        self._pumping: asyncio.Task[None] | None = None

    # --- For the protocol ---

    @abstractmethod
    async def _begin(self) -> AsyncIterator[Arrival]:
        """Subscribe. Returns what arrives, once the broker has accepted the subscription."""

    @abstractmethod
    async def _end(self) -> None:
        """Unsubscribe, if it has begun. Returns once the broker knows that."""

    # --- For the test ---

    async def open(self) -> None:
        if self._pumping is None:
            stream = await self._begin()
            self._pumping = asyncio.get_running_loop().create_task(self._pump(stream))

    async def close(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.wait({self._pumping})
        await self._end()
        self._arrived.clear()
        await self._finish(None)

    async def __anext__(self) -> Message:
        await self.open()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._arrived or self._has_ended)
                if not self._arrived:
                    if self._error is not None:
                        raise self._error
                    raise StopAsyncIteration
                arrived = self._arrived.popleft()
                if isinstance(arrived, Message):
                    self._held_bytes -= len(arrived.payload)
                    self._changed.notify_all()
            if isinstance(arrived, Message):
                return arrived
            self.gaps.append(arrived)
            if self._on_gap is not None:
                self._on_gap(arrived)

    async def __aiter__(self) -> AsyncIterator[Message]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self.__anext__()

    # --- Between them ---

    async def _pump(self, stream: AsyncIterator[Arrival]) -> None:
        error: Exception | None = None
        try:
            async for arrival in stream:
                async with self._changed:
                    self._arrived.append(arrival)
                    if isinstance(arrival, Message):
                        self._held_bytes += len(arrival.payload)
                    self._changed.notify_all()
                    await self._changed.wait_for(lambda: self._held_bytes < self._buffer_bytes)
        except Exception as ended:  # noqa: BLE001 - the reader gets every error
            error = ended
        await self._finish(error)

    async def _finish(self, error: Exception | None) -> None:
        async with self._changed:
            self._has_ended = True
            self._error = error
            self._changed.notify_all()


class RemoteWork(msgspec.Struct, frozen=True, eq=False):
    """A leased message. `handle` identifies the lease in the protocol."""

    message: Message
    consumer: RemoteConsumer
    handle: Any
    failures: int
    first_delivery_ns: int

    @property
    def topic(self) -> str:
        return self.message.topic

    @property
    def partition(self) -> int:
        return self.message.partition

    @property
    def offset(self) -> int:
        return self.message.offset

    @property
    def key(self) -> bytes | None:
        return self.message.key

    @property
    def payload(self) -> bytes:
        return self.message.payload

    @property
    def tags(self) -> Mapping[str, str]:
        return self.message.tags

    @property
    def receive_time_ns(self) -> int:
        return self.message.receive_time_ns

    @property
    def delivery_count(self) -> int:
        return self.failures + 1

    async def ack(self, *, stored: bool = False) -> None:
        await self.consumer.ack(self, stored=stored)

    async def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        await self.consumer.nack(self, delay_s=delay_s, reason=reason)

    async def extend(self, seconds: float) -> None:
        await self.consumer.extend(self, seconds)


class RemoteConsumer(Closable):
    """The result of `bus.consume`."""

    def __init__(self, batch_messages_max: int) -> None:
        self.late: deque[LateWork] = deque()
        self._batch_messages_max = batch_messages_max
        self.mode = ""  # until the broker has accepted it
        self._waiting: deque[RemoteWork] = deque()
        self._begun: dict[Any, RemoteWork] = {}  # by handle

    # --- For the protocol ---

    @abstractmethod
    async def _fill(self, messages_max: int) -> None:
        """Return when messages wait. Raises StopAsyncIteration if no more come."""

    @abstractmethod
    async def _send_acks(self, works: Sequence[RemoteWork]) -> Sequence[RemoteWork]:
        """Acknowledge them. Returns those that came too late, once the others are stored."""

    @abstractmethod
    async def nack(
        self, *works: RemoteWork, delay_s: float | None = None, reason: str = ""
    ) -> None: ...

    @abstractmethod
    async def extend(self, work: RemoteWork, seconds: float) -> None: ...

    @abstractmethod
    async def flush(self) -> None: ...

    # --- For the test ---

    async def __anext__(self) -> RemoteWork:
        await self._fill(1)
        return self._take()

    async def __aiter__(self) -> AsyncIterator[RemoteWork]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self.__anext__()

    async def batches(self) -> AsyncIterator[RemoteBatch]:
        """The messages that come together, at least one."""
        while True:
            await self._fill(self._batch_messages_max)
            yield RemoteBatch([self._take() for _ in range(len(self._waiting))])

    async def ack(self, *works: RemoteWork, stored: bool = False) -> None:
        late = [self.was_late(work) for work in await self._send_acks(works)]
        if late and stored:
            raise LateAckError(f"acknowledged too late, {len(late)} of them: {late[0]}")

    # --- Between them ---

    def _take(self) -> RemoteWork:
        work = self._waiting.popleft()
        self._begun[work.handle] = work
        return work

    def was_late(self, work: RemoteWork) -> LateWork:
        """Remember that this one was acknowledged too late."""
        place = (work.topic, work.partition, work.offset, work.offset + 1)
        late = LateWork(*place, 0, "the lease had ended")
        self.late.append(late)
        return late


class RemoteBatch:
    """Several messages that are acknowledged at once."""

    def __init__(self, works: Sequence[RemoteWork]) -> None:
        self._works = works

    def __iter__(self) -> Iterator[RemoteWork]:
        return iter(self._works)

    async def ack(self, *, stored: bool = False) -> None:
        await self._works[0].consumer.ack(*self._works, stored=stored)
