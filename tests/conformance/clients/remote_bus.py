"""What the clients of all doors have in common: the verbs that are made of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from runnel.client.places import OffsetMap, partition_places
from runnel.client.work_verbs import DeadLetterPage, Offsets
from runnel.errors import ClientFault
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, TopicState

TOPICS_PER_PAGE = 1000
DEAD_LETTERS_PER_PAGE = 100


class RemoteBus(ABC):
    """The rest of the verbs is each door's own."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- Topics and cursors ---

    @abstractmethod
    async def topics_page(self, pattern: str, after: str) -> tuple[list[TopicState], bool]:
        """Some of them, and whether that was all."""

    async def topics(self, pattern: str = "*") -> list[TopicState]:
        found, is_complete = await self.topics_page(pattern, "")
        while not is_complete:
            more, is_complete = await self.topics_page(pattern, found[-1].name)
            found += more
        return found

    @abstractmethod
    async def put_cursor(self, name: str, places: Sequence[CursorPlace]) -> None: ...

    async def set_cursor(self, name: str, places: OffsetMap | Sequence[CursorPlace]) -> None:
        if isinstance(places, Mapping):
            places = [
                CursorPlace(place.topic, place.partition, place.offset)
                for place in partition_places(places)
            ]
        await self.put_cursor(name, places)

    # --- Acknowledged work ---

    @abstractmethod
    async def set_paused(self, name: str, *, is_paused: bool) -> None: ...

    async def pause_subscription(self, name: str) -> None:
        await self.set_paused(name, is_paused=True)

    async def resume_subscription(self, name: str) -> None:
        await self.set_paused(name, is_paused=False)

    @abstractmethod
    async def dead_letter_page(
        self, name: str, offset: int = 0, *, messages_max: int = DEAD_LETTERS_PER_PAGE
    ) -> DeadLetterPage: ...

    async def dead_letters(self, name: str, *, offset: int = 0) -> AsyncIterator[Message]:
        while True:
            page = await self.dead_letter_page(name, offset)
            for message in page.messages:
                yield message
            offset = page.next_offset
            if not offset:
                return

    @abstractmethod
    async def settle_dead(
        self, name: str, offsets: Sequence[int], *, is_all: bool, is_redriven: bool
    ) -> int: ...

    async def redrive(self, name: str, offsets: Offsets) -> int:
        return await self._settle(name, offsets, is_redriven=True)

    async def drop_dead(self, name: str, offsets: Offsets) -> int:
        return await self._settle(name, offsets, is_redriven=False)

    async def _settle(self, name: str, offsets: Offsets, *, is_redriven: bool) -> int:
        if isinstance(offsets, str):
            if offsets != "all":
                raise ClientFault(f"{offsets!r} are no offsets: give numbers, or 'all'")
            return await self.settle_dead(name, (), is_all=True, is_redriven=is_redriven)
        return await self.settle_dead(name, tuple(offsets), is_all=False, is_redriven=is_redriven)
