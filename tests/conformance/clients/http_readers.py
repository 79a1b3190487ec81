"""Live subscriptions and consumers over HTTP: server-sent events, and requests that take messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from runnel.client import Gap
from runnel.errors import ConnectionLostError, LateAckError, UnknownSubscriptionError
from tests.conformance.clients.http_encoding import HttpTransport, error_of, message_of, segment
from tests.conformance.clients.remote_bus import RemoteBus
from tests.conformance.clients.remote_readers import (
    Arrival,
    RemoteConsumer,
    RemoteSubscription,
    RemoteWork,
)

_WAIT = "30s"


class ServerSentEvent(NamedTuple):
    kind: str
    data: str
    id: str | None


async def events(lines: AsyncIterator[str]) -> AsyncIterator[ServerSentEvent]:
    """Events as a browser reads them; an id without data is an event `id`. Comments and `retry` are left out."""
    kind, data, number = "message", "", None
    async for line in lines:
        if not line:
            if data or number is not None:
                yield ServerSentEvent(kind if data else "id", data, number)
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
    """One request of `/v1/stream`. Its position is the id of the last event."""

    def __init__(
        self,
        transport: HttpTransport,
        request: dict[str, Any],
        buffer_bytes: int,
        on_gap: Callable[[Gap], object] | None,
    ) -> None:
        super().__init__(request["position"], buffer_bytes, on_gap)
        self._transport = transport
        start = request["start"]
        self._params = [("pattern", pattern) for pattern in request["patterns"]]
        self._params += [("start", start.kind), ("overflow", request["overflow"])]
        if start.kind == "time":
            self._params.append(("time", start.time_ns))
        self._answer: httpx.Response | None = None

    async def _begin(self) -> AsyncIterator[Arrival]:
        headers = {"last-event-id": self.position} if self.position else None
        self._answer = await self._transport.listen("/v1/stream", self._params, headers)
        assert self._answer.headers["content-type"].startswith("text/event-stream")
        return self._arrivals(self._answer)

    async def _end(self) -> None:
        if self._answer is not None:
            await self._answer.aclose()
            # The listener sees that the connection has gone before it answers later requests.
            for _ in range(3):
                await self._transport.ask("GET", "/healthz")

    async def _arrivals(self, answer: httpx.Response) -> AsyncIterator[Arrival]:
        try:
            async for event in events(answer.aiter_lines()):
                if event.id is not None:
                    self.position = event.id
                told = msgspec.json.decode(event.data) if event.data else {}
                match event.kind:
                    case "message":
                        yield message_of(told)
                    case "gap":
                        yield Gap(**told)
                    case "ended":
                        raise error_of(told)
                    case "closing":
                        self.is_closing = True
        except httpx.TransportError as error:
            raise ConnectionLostError(str(error)) from None


class HttpConsumer(RemoteConsumer):
    """A polling consumer: it takes a message when the test asks for one, and never more than the window."""

    def __init__(
        self,
        bus: RemoteBus,
        transport: HttpTransport,
        subscription: str,
        definition: dict[str, Any],
        member: str | None,
        window_messages: int,
    ) -> None:
        super().__init__(window_messages)
        self._bus = bus
        self._transport = transport
        self._name = subscription
        self._path = f"/v1/subscriptions/{segment(subscription)}"
        self._definition = definition
        self._member = member
        self._window_messages = window_messages
        self._consumer = ""  # the name that the broker gave it
        self._is_open = False
        self._has_room = asyncio.Event()

    async def open(self) -> None:
        if self._is_open:
            return
        if self._definition["patterns"]:
            await self._bus.call("MakeSubscription", name=self._name, **self._definition)
        told = await self._transport.ask("GET", self._path)
        self.mode = told["mode"]
        if self._member is not None or self.mode == "multicast":
            await self._poll(limit=1, wait="0")  # a member's messages begin with its first request
        self._is_open = True

    async def close(self) -> None:
        if self._is_open and self._consumer:
            # The broker may have ended it: its subscription was deleted, or another consumer is the member now.
            with contextlib.suppress(UnknownSubscriptionError):
                path = f"{self._path}/consumers/{segment(self._consumer)}"
                await self._transport.ask("DELETE", path)
        self._is_open = False

    async def _poll(self, *, limit: int, wait: str) -> None:
        params: dict[str, str | int] = {"limit": limit, "wait": wait}
        if self._consumer:
            params["consumer"] = self._consumer
        if self._member is not None:
            params["member"] = self._member
        told = await self._transport.ask("POST", f"{self._path}/messages", params)
        self._consumer = told["consumer"]
        for each in told["messages"]:
            failures = each["attempt"] - 1
            first_ns = each.get("first_delivery_ns", 0) or self._bus.now_ns()
            work = RemoteWork(message_of(each), self, each["ack"], failures, first_ns)
            self._waiting.append(work)

    async def _fill(self, messages_max: int) -> None:
        await self.open()
        while not self._waiting:
            room = self._window_messages - len(self._begun)
            if room:
                await self._poll(limit=min(room, messages_max), wait=_WAIT)
            else:
                self._has_room.clear()
                await self._has_room.wait()

    async def _send_acks(self, works: Sequence[RemoteWork]) -> Sequence[RemoteWork]:
        try:
            late = (await self._settle("ack", works)).get("late", [])
        except (LateAckError, UnknownSubscriptionError):
            return works
        return [work for work in works if work.handle in late]

    async def ack_up_to(self, work: RemoteWork) -> None:
        place = (work.topic, work.partition)
        await self.ack(
            *(
                each
                for each in list(self._begun.values())
                if (each.topic, each.partition) == place and each.offset <= work.offset
            )
        )

    async def nack(
        self, *works: RemoteWork, delay_s: float | None = None, reason: str = ""
    ) -> None:
        delay = {} if delay_s is None else {"delay": delay_s}
        await self._settle("nack", works, reason=reason, **delay)

    async def extend(self, work: RemoteWork, seconds: float) -> None:
        await self._transport.ask(
            "POST", f"{self._path}/extend", json={"acks": [work.handle], "lease": seconds}
        )

    async def _settle(self, verb: str, works: Sequence[RemoteWork], **more: Any) -> dict[str, Any]:
        body = {"acks": [work.handle for work in works], **more}
        try:
            told: dict[str, Any] = await self._transport.ask(
                "POST", f"{self._path}/{verb}", json=body
            )
        finally:
            for work in works:
                self._begun.pop(work.handle, None)
            self._has_room.set()
        return told

    async def flush(self) -> None:
        """Nothing to do: an answered ack is stored."""
