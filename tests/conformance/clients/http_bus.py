"""The verbs of `Bus` over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec

from runnel.client.intake import as_bytes
from runnel.client.places import StartAt, start_of, time_ns_of
from runnel.client.results import BatchReceipt, Gap, Receipt
from runnel.client.work_verbs import DeadLetterPage
from runnel.errors import ClientFault, InvalidNameError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, CursorState, TopicState
from runnel.formats.work_heads import SubscriptionState
from tests.conformance.clients import http_forms as forms
from tests.conformance.clients.http_line import HttpLine, segment
from tests.conformance.clients.http_reading import HttpSubscription
from tests.conformance.clients.http_working import HttpConsumer
from tests.conformance.clients.publishing import Outgoing, RemotePublisher, outgoing
from tests.conformance.clients.remote_bus import (
    DEAD_LETTERS_PER_PAGE,
    TOPICS_PER_PAGE,
    RemoteBus,
)
from tests.conformance.clients.working import work_options

# A page may not be asked to be larger.
_PAGE_BYTES_MAX = 4 * 2**20
# Requests of one publisher to different topics that are under way at once.
_AT_ONCE = 8


class HttpPage(msgspec.Struct, frozen=True):
    """What a fetch found, as messages."""

    messages: list[Message]
    next_offset: int
    first_offset: int
    end_offset: int
    gaps: list[Gap]

    def __len__(self) -> int:
        return len(self.messages)


class HttpBus(RemoteBus):
    """A pool of connections. What has to keep its order is asked one after the other."""

    def __init__(self, address: str, token: str | None, now_ns: Callable[[], int]) -> None:
        self.line = HttpLine(address, token)
        self._now_ns = now_ns
        self._publishing = asyncio.Lock()

    async def close(self) -> None:
        await self.line.close()

    async def ping(self) -> float:
        begin = time.monotonic()
        await self.line.ask("GET", "/healthz")
        return time.monotonic() - begin

    async def statistics(self) -> dict[str, Any]:
        told: dict[str, Any] = await self.line.ask("GET", "/v1/statistics")
        return told

    # --- Publishing ---

    async def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
        level: str | None = None,
    ) -> Receipt:
        # What JSON would carry as something else.
        payload = as_bytes("payload", payload)
        key = None if key is None else as_bytes("key", key)
        sent = outgoing(
            topic,
            payload,
            key=key,
            tags=tags,
            event_time_ns=event_time_ns,
            partition=partition,
            partition_key=partition_key,
            uid=uid,
        )
        async with self._publishing:
            told = await self._post(topic, forms.message_in(sent), level, partition)
        if level == "none":
            return Receipt(topic, 0, 0, 0, 0, "none")
        return forms.receipt_of(told)

    async def _post(
        self, topic: str, body: object, level: str | None, partition: int | None = None
    ) -> Any:
        params: dict[str, str | int] = {}
        if level is not None:
            params["level"] = level
        if partition is not None:
            params["partition"] = partition
        path = f"/v1/topics/{segment(topic)}/messages"
        return await self.line.ask("POST", path, params, json=body)

    async def publish_batch(self, batch: Batch, *, level: str | None = None) -> BatchReceipt:
        """An array of its messages, for one topic and partition: more does not go into one request."""
        (run,) = batch.runs()
        body = [forms.message_in(Outgoing(message)) for message in batch.messages()]
        async with self._publishing:
            told = await self._post(run.topic, body, level, run.partition)
        first = told["receipts"][0]
        where = first["epoch"], first["receive_time_ns"], first["level"]
        return BatchReceipt([first["offset"]], 0, *where, receivers=first.get("receivers"))

    def publisher(
        self,
        topic: str | None = None,
        *,
        level: str | None = None,
        batch_messages_max: int = 1000,
        batch_bytes_max: int = 256 * 2**10,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
    ) -> RemotePublisher:
        self.line.check_open()
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def publish_topic(name: str, group: list[Outgoing]) -> list[Receipt | RunnelError]:
            try:
                async with at_once:
                    body = [forms.message_in(sent) for sent in group]
                    told = await self._post(name, body, level)
                return [forms.receipt_of(each) for each in told["receipts"]]
            except ClientFault as error:  # one of them is wrong: which?
                if len(group) == 1:
                    return [error]
            return [answer for sent in group for answer in await publish_topic(name, [sent])]

        async def publish_group(group: Sequence[Outgoing]) -> list[Receipt | RunnelError]:
            by_topic: dict[str, list[int]] = {}
            for number, sent in enumerate(group):
                by_topic.setdefault(sent.message.topic, []).append(number)
            found: dict[int, Receipt | RunnelError] = {}
            told = await asyncio.gather(
                *(
                    publish_topic(name, [group[number] for number in numbers])
                    for name, numbers in by_topic.items()
                )
            )
            for numbers, of_topic in zip(by_topic.values(), told, strict=True):
                found |= dict(zip(numbers, of_topic, strict=True))
            return [found[number] for number in range(len(group))]

        return RemotePublisher(
            publish_group,
            topic,
            batch_messages_max=batch_messages_max,
            buffer_bytes_max=buffer_bytes_max,
        )

    # --- Reading ---

    def subscribe(
        self,
        *patterns: str,
        start: StartAt = "latest",
        overflow: str = "drop_oldest",
        buffer_bytes: int = 8 * 2**20,
        on_gap: Callable[[Gap], object] | None = None,
        last_id: str = "",
    ) -> HttpSubscription:
        self.line.check_open()
        params: list[tuple[str, str | int]] = [("pattern", pattern) for pattern in patterns]
        chosen = start_of(start, patterns)
        params += [("start", chosen.kind), ("overflow", overflow)]
        if chosen.kind == "time":
            params.append(("time", chosen.time_ns))
        return HttpSubscription(
            self.line, params, buffer_bytes=buffer_bytes, on_gap=on_gap, last_id=last_id
        )

    async def fetch(
        self,
        topic: str,
        offset: int | None = None,
        *,
        partition: int | None = None,
        time: datetime | int | None = None,
        messages_max: int | None = None,
        bytes_max: int | None = None,
        wait_s: float = 0,
    ) -> HttpPage:
        given: dict[str, str | int | None] = {
            "offset": offset,
            "partition": partition,
            "time": time_ns_of(time) if isinstance(time, datetime) else time,
            "limit": messages_max,
            "bytes": None if bytes_max is None else min(bytes_max, _PAGE_BYTES_MAX),
            "wait": str(wait_s) if wait_s else None,
        }
        params: dict[str, str | int] = {
            name: value for name, value in given.items() if value is not None
        }
        told = await self.line.ask("GET", f"/v1/topics/{segment(topic)}/messages", params)
        return HttpPage(
            [forms.message_of(message) for message in told["messages"]],
            told["next_offset"],
            told["first_offset"],
            told["end_offset"],
            [forms.gap_of(gap) for gap in told["gaps"]],
        )

    # --- Topics ---

    async def topics_page(self, pattern: str, after: str) -> tuple[list[TopicState], bool]:
        params: dict[str, str | int] = {
            "pattern": pattern,
            "after": after,
            "limit": TOPICS_PER_PAGE,
        }
        told = await self.line.ask("GET", "/v1/topics", params)
        return [forms.topic_of(topic) for topic in told["topics"]], told["is_complete"]

    async def topic(self, name: str) -> TopicState:
        if not name:  # that path leads to the list of all
            raise InvalidNameError("the topic name is empty")
        return forms.topic_of(await self.line.ask("GET", f"/v1/topics/{segment(name)}"))

    async def delete_topic(self, name: str) -> None:
        await self.line.ask("DELETE", f"/v1/topics/{segment(name)}")

    async def purge_topic(self, name: str) -> None:
        await self.line.ask("DELETE", f"/v1/topics/{segment(name)}/messages")

    # --- Cursors ---

    async def cursors(self) -> list[CursorState]:
        told = await self.line.ask("GET", "/v1/cursors")
        return [forms.cursor_of(cursor) for cursor in told["cursors"]]

    async def cursor(self, name: str) -> CursorState | None:
        try:
            return forms.cursor_of(await self.line.ask("GET", f"/v1/cursors/{segment(name)}"))
        except UnknownTopicError:
            return None

    async def put_cursor(self, name: str, places: Sequence[CursorPlace]) -> None:
        body = {"places": [forms.place_json(place) for place in places]}
        await self.line.ask("PUT", f"/v1/cursors/{segment(name)}", json=body)

    async def remove_cursor(self, name: str) -> None:
        await self.line.ask("DELETE", f"/v1/cursors/{segment(name)}")

    # --- Acknowledged work ---

    def consume(
        self,
        subscription: str,
        *patterns: str,
        mode: str | None = None,
        member: str | None = None,
        start: StartAt | None = None,
        window_messages: int = 256,
        **options: Any,
    ) -> HttpConsumer:
        self.line.check_open()
        if not window_messages:
            raise ClientFault("window_messages is 0: nothing could be delivered")
        make = _definition(patterns, mode, start, options) if patterns else None
        return HttpConsumer(
            self.line,
            subscription,
            make,
            member=member,
            window_messages=window_messages,
            now_ns=self._now_ns,
        )

    async def make_subscription(
        self,
        name: str,
        *patterns: str,
        mode: str = "shared",
        start: StartAt | None = None,
        **options: Any,
    ) -> None:
        await self.line.ask(
            "PUT", _subscription(name), json=_definition(patterns, mode, start, options)
        )

    async def subscriptions(self) -> list[SubscriptionState]:
        told = await self.line.ask("GET", "/v1/subscriptions")
        return [forms.subscription_of(each) for each in told["subscriptions"]]

    async def subscription(self, name: str) -> SubscriptionState:
        return forms.subscription_of(await self.line.ask("GET", _subscription(name)))

    async def delete_subscription(self, name: str) -> None:
        await self.line.ask("DELETE", _subscription(name))

    async def set_paused(self, name: str, *, is_paused: bool) -> None:
        await self.line.ask("POST", f"{_subscription(name)}/{'pause' if is_paused else 'resume'}")

    async def move_subscription(
        self, name: str, start: StartAt, *, member: str | None = None
    ) -> None:
        body: dict[str, Any] = {"start": forms.start_json(start, ())}
        if member is not None:
            body["member"] = member
        await self.line.ask("POST", f"{_subscription(name)}/move", json=body)

    async def remove_member(self, name: str, member: str) -> None:
        await self.line.ask("DELETE", f"{_subscription(name)}/members/{segment(member)}")

    async def dead_letter_page(
        self, name: str, offset: int = 0, *, messages_max: int = DEAD_LETTERS_PER_PAGE
    ) -> DeadLetterPage:
        params = {"offset": offset, "limit": messages_max}
        told = await self.line.ask("GET", f"{_subscription(name)}/dead", params)
        messages = [forms.message_of(message) for message in told["messages"]]
        return DeadLetterPage(messages, told["next_offset"] or 0)

    async def settle_dead(
        self, name: str, offsets: Sequence[int], *, is_all: bool, is_redriven: bool
    ) -> int:
        verb = "redrive" if is_redriven else "drop"
        body = {"all": True} if is_all else {"offsets": offsets}
        told = await self.line.ask("POST", f"{_subscription(name)}/dead/{verb}", json=body)
        settled: int = told["settled"]
        return settled


def _subscription(name: str) -> str:
    return f"/v1/subscriptions/{segment(name)}"


def _definition(
    patterns: Sequence[str], mode: str | None, start: StartAt | None, options: dict[str, Any]
) -> dict[str, Any]:
    """What `PUT` takes."""
    told: dict[str, Any] = {"patterns": patterns}
    if mode is not None:
        told["mode"] = mode
    if start is not None:
        told["start"] = forms.start_json(start, patterns)
    chosen = work_options(**options)
    if chosen is not None:
        told["options"] = forms.options_json(chosen)
    return told


@asynccontextmanager
async def connect_http(
    address: str, token: str | None = None, now_ns: Callable[[], int] = time.time_ns
) -> AsyncIterator[HttpBus]:
    """A client that is closed at the end of the `async with`."""
    async with HttpBus(address, token, now_ns) as bus:
        yield bus
