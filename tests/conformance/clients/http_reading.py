"""Live reading over HTTP: server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import httpx
import msgspec

from runnel.client.results import Gap
from runnel.errors import ConnectionLostError
from tests.conformance.clients.http_forms import gap_of, message_of
from tests.conformance.clients.http_line import HttpLine, error_of
from tests.conformance.clients.reading import Arrival, RemoteSubscription


class Event(NamedTuple):
    kind: str
    data: str
    id: str | None


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """As a browser would read them, and an id without data as an event `id`. Comments and `retry` are passed over."""
    kind, data, number = "message", "", None
    async for line in lines:
        if not line:
            if data or number is not None:
                yield Event(kind if data else "id", data, number)
            kind, data, number = "message", "", None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data += value
        elif field == "id":
            number = value


class HttpSubscription(RemoteSubscription):
    """One request of `/v1/stream`; `last_id` is where another one goes on."""

    def __init__(
        self,
        line: HttpLine,
        params: Sequence[tuple[str, str | int]],
        *,
        buffer_bytes: int,
        on_gap: Callable[[Gap], object] | None,
        last_id: str = "",
    ) -> None:
        super().__init__(buffer_bytes=buffer_bytes, on_gap=on_gap)
        self.last_id = last_id
        self.is_closing = False  # the broker said that it is about to go
        self._line = line
        self._params = params
        self._answer: httpx.Response | None = None

    async def _begin(self) -> AsyncIterator[Arrival]:
        headers = {"last-event-id": self.last_id} if self.last_id else None
        self._answer = await self._line.listen("/v1/stream", self._params, headers)
        assert self._answer.headers["content-type"].startswith("text/event-stream")
        return self._arrivals(self._answer)

    async def _end(self) -> None:
        if self._answer is not None:
            await self._answer.aclose()
            # The door sees that the connection has gone before it answers what comes later.
            for _ in range(3):
                await self._line.ask("GET", "/healthz")

    async def _arrivals(self, answer: httpx.Response) -> AsyncIterator[Arrival]:
        try:
            async for event in events(answer.aiter_lines()):
                if event.id is not None:
                    self.last_id = event.id
                told = msgspec.json.decode(event.data) if event.data else {}
                match event.kind:
                    case "message":
                        yield message_of(told)
                    case "gap":
                        yield gap_of(told)
                    case "ended":
                        raise error_of(told)
                    case "closing":
                        self.is_closing = True
        except httpx.TransportError as error:
            raise ConnectionLostError(str(error)) from None
