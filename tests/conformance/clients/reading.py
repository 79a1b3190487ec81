"""A live subscription on top of any door: a task reads the door's stream, the reader takes messages from it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from runnel.client.results import Gap
from runnel.errors import ClientFault
from runnel.formats.message import Message

Arrival = Message | Gap


class RemoteSubscription(ABC):
    """What `bus.subscribe` gives. No more than `buffer_bytes` of payloads wait in it; then it stops to read."""

    def __init__(self, *, buffer_bytes: int, on_gap: Callable[[Gap], object] | None) -> None:
        if buffer_bytes < 1:
            raise ClientFault(f"buffer_bytes is {buffer_bytes}: at least 1 is needed")
        self.gaps: deque[Gap] = deque()
        self._buffer_bytes = buffer_bytes
        self._on_gap = on_gap
        self._arrived: deque[Arrival] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self._has_ended = False
        self._pumping: asyncio.Task[None] | None = None

    # --- For the door ---

    @abstractmethod
    async def _begin(self) -> AsyncIterator[Arrival]:
        """Subscribe. Returns once the broker has accepted it, with what comes."""

    @abstractmethod
    async def _end(self) -> None:
        """Unsubscribe, if it has begun. Returns once the broker knows."""

    # --- For the test ---

    async def open(self) -> None:
        if self._pumping is None:
            stream = await self._begin()
            self._pumping = asyncio.get_running_loop().create_task(self._pump(stream))

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
        except Exception as ended:  # noqa: BLE001 - whoever reads is told, whatever it was
            error = ended
        await self._finish(error)

    async def _finish(self, error: Exception | None) -> None:
        async with self._changed:
            self._has_ended = True
            self._error = error
            self._changed.notify_all()
