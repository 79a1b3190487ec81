"""Acknowledged work on top of any door: what a consumer hands out, and what it can do with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from runnel.client.work import LateWork
from runnel.formats.message import Message
from runnel.formats.work_heads import WorkOptions


class RemoteWork(msgspec.Struct, frozen=True, eq=False):
    """A message under a lease; `handle` is what the door knows it by."""

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


class RemoteConsumer(ABC):
    """What `bus.consume` gives."""

    def __init__(self) -> None:
        self.late: deque[LateWork] = deque()
        self.mode = ""  # until the broker has accepted it

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def __anext__(self) -> RemoteWork: ...

    @abstractmethod
    async def ack(self, *works: RemoteWork, stored: bool = False) -> None: ...

    @abstractmethod
    async def nack(
        self, *works: RemoteWork, delay_s: float | None = None, reason: str = ""
    ) -> None: ...

    @abstractmethod
    async def extend(self, work: RemoteWork, seconds: float) -> None: ...

    @abstractmethod
    async def flush(self) -> None: ...

    @abstractmethod
    def batches(self) -> AsyncIterator[RemoteBatch]:
        """What comes together, at least one message."""

    async def __aiter__(self) -> AsyncIterator[RemoteWork]:
        while True:
            yield await self.__anext__()

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

    def was_late(self, work: RemoteWork, reason: str) -> LateWork:
        """Remember that this one was acknowledged too late."""
        message = work.message
        place = (message.topic, message.partition, message.offset, message.offset + 1)
        late = LateWork(*place, 0, reason)
        self.late.append(late)
        return late


class RemoteBatch:
    """Several messages, to be acknowledged at once."""

    def __init__(self, works: Sequence[RemoteWork]) -> None:
        self._works = works

    def __iter__(self) -> Iterator[RemoteWork]:
        return iter(self._works)

    async def ack(self, *, stored: bool = False) -> None:
        await self._works[0].consumer.ack(*self._works, stored=stored)


def work_options(
    *,
    lease_s: float | None = None,
    processing_max_s: float | None = None,
    deliveries_max: int | None = None,
    retry_delay_s: float | None = None,
    retry_delay_max_s: float | None = None,
    backoff: float | None = None,
    absent_max_s: float | None = None,
) -> WorkOptions | None:
    """As the broker has them; None if nothing is said."""

    def ms(seconds: float | None) -> int | None:
        return None if seconds is None else round(seconds * 1000)

    options = WorkOptions(
        ms(lease_s),
        ms(processing_max_s),
        deliveries_max,
        ms(retry_delay_s),
        ms(retry_delay_max_s),
        backoff,
        ms(absent_max_s),
    )
    return None if options == WorkOptions() else options
