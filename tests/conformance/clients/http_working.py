"""Acknowledged work over HTTP: a seat that asks for a message when it wants one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from runnel.errors import LateAckError, UnknownSubscriptionError
from tests.conformance.clients.http_forms import message_of
from tests.conformance.clients.http_line import HttpLine, segment
from tests.conformance.clients.working import RemoteBatch, RemoteConsumer, RemoteWork

_WAIT = "30s"


class HttpConsumer(RemoteConsumer):
    """No message is taken before somebody wants it, and no more of them than the window."""

    def __init__(
        self,
        line: HttpLine,
        subscription: str,
        make: dict[str, Any] | None,
        *,
        member: str | None,
        window_messages: int,
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__()
        self._line = line
        self._path = f"/v1/subscriptions/{segment(subscription)}"
        self._make = make
        self._member = member
        self._window_messages = window_messages
        self._now_ns = now_ns
        self._seat = ""
        self._is_open = False
        self._waiting: deque[RemoteWork] = deque()
        self._begun: dict[str, RemoteWork] = {}
        self._has_room = asyncio.Event()

    # --- Opening and closing ---

    async def open(self) -> None:
        if self._is_open:
            return
        if self._make is not None:
            await self._line.ask("PUT", self._path, json=self._make)
        told = await self._line.ask("GET", self._path)
        self.mode = told["mode"]
        if self._member is not None or self.mode == "multicast":
            await self._ask(limit=1, wait="0")  # what a member is owed begins when it first asks
        self._is_open = True

    async def close(self) -> None:
        if self._is_open and self._seat:
            # Perhaps the broker has ended it already: its subscription was deleted, or another is the member now.
            with contextlib.suppress(UnknownSubscriptionError):
                await self._line.ask("DELETE", f"{self._path}/consumers/{segment(self._seat)}")
        self._is_open = False

    # --- Handing out ---

    async def _ask(self, *, limit: int, wait: str) -> None:
        params: dict[str, str | int] = {"limit": limit, "wait": wait}
        if self._seat:
            params["consumer"] = self._seat
        if self._member is not None:
            params["member"] = self._member
        told = await self._line.ask("POST", f"{self._path}/messages", params)
        self._seat = told["consumer"]
        for each in told["messages"]:
            failures = each["attempt"] - 1
            first_ns = each.get("first_delivery_ns", 0) or self._now_ns()
            work = RemoteWork(message_of(each), self, each["ack"], failures, first_ns)
            self._waiting.append(work)

    async def _fill(self, messages_max: int) -> None:
        await self.open()
        while not self._waiting:
            room = self._window_messages - len(self._begun)
            if room:
                await self._ask(limit=min(room, messages_max), wait=_WAIT)
            else:
                self._has_room.clear()
                await self._has_room.wait()

    async def __anext__(self) -> RemoteWork:
        await self._fill(1)
        return self._begin(self._waiting.popleft())

    def _begin(self, work: RemoteWork) -> RemoteWork:
        self._begun[work.handle] = work
        return work

    async def batches(self) -> AsyncIterator[RemoteBatch]:
        while True:
            await self._fill(self._window_messages)
            works = [self._begin(work) for work in self._waiting]
            self._waiting.clear()
            yield RemoteBatch(works)

    # --- Giving back ---

    async def ack(self, *works: RemoteWork, stored: bool = False) -> None:
        try:
            late = await self._settle("ack", works)
        except (LateAckError, UnknownSubscriptionError):
            late = [work.handle for work in works]
        told = [self.was_late(work, "late") for work in works if work.handle in late]
        if told and stored:
            raise LateAckError(f"acknowledged too late, {len(told)} of them: {told[0]}")

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
        more: dict[str, Any] = {"reason": reason}
        if delay_s is not None:
            more["delay"] = delay_s
        await self._settle("nack", works, **more)

    async def extend(self, work: RemoteWork, seconds: float) -> None:
        await self._line.ask(
            "POST", f"{self._path}/extend", json={"acks": [work.handle], "lease": seconds}
        )

    async def _settle(self, verb: str, works: Sequence[RemoteWork], **more: Any) -> list[str]:
        """Those that came too late."""
        body = {"acks": [work.handle for work in works], **more}
        try:
            told = await self._line.ask("POST", f"{self._path}/{verb}", json=body)
        finally:
            for work in works:
                self._begun.pop(work.handle, None)
            self._has_room.set()
        late: list[str] = told.get("late", [])
        return late

    async def flush(self) -> None:
        """An answered ack is stored."""
