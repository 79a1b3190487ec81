"""The verbs of `Bus` over HTTP: each method of runnel.proto as a request of the REST interface."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from runnel.client import BatchReceipt, Gap
from runnel.client.results import Receipt
from runnel.errors import InvalidNameError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.clients.http_encoding import (
    HttpTransport,
    json_of,
    message_json,
    message_of,
    segment,
)
from tests.conformance.clients.http_readers import HttpConsumer, HttpSubscription
from tests.conformance.clients.remote_bus import Fields, RemoteBus, build
from tests.conformance.clients.remote_publisher import Outgoing
from tests.conformance.clients.remote_readers import RemoteConsumer, RemoteSubscription

# The largest page that may be asked for.
_PAGE_BYTES_MAX: Final = 4 * 2**20
# Requests of one publisher for different topics at the same time.
_AT_ONCE: Final = 8


class HttpRoute(NamedTuple):
    """A request: `{field}` in the path is a field's value. Other fields are parameters of a GET, else the body."""

    verb: str
    path: str
    answer: str = ""  # the field that the answer's JSON stands for, where it is not all of it


ROUTES: Final = {
    "Ping": HttpRoute("GET", "/healthz"),
    "Fetch": HttpRoute("GET", "/v1/topics/{topic}/messages"),
    "ListTopics": HttpRoute("GET", "/v1/topics"),
    "DescribeTopic": HttpRoute("GET", "/v1/topics/{name}", "topic"),
    "DeleteTopic": HttpRoute("DELETE", "/v1/topics/{name}"),
    "PurgeTopic": HttpRoute("DELETE", "/v1/topics/{name}/messages"),
    "ListCursors": HttpRoute("GET", "/v1/cursors"),
    "SetCursor": HttpRoute("PUT", "/v1/cursors/{name}"),
    "RemoveCursor": HttpRoute("DELETE", "/v1/cursors/{name}"),
    "MakeSubscription": HttpRoute("PUT", "/v1/subscriptions/{name}"),
    "ListSubscriptions": HttpRoute("GET", "/v1/subscriptions"),
    "DeleteSubscription": HttpRoute("DELETE", "/v1/subscriptions/{name}"),
    "PauseSubscription": HttpRoute("POST", "/v1/subscriptions/{name}/{action}"),
    "MoveSubscription": HttpRoute("POST", "/v1/subscriptions/{name}/move"),
    "RemoveMember": HttpRoute("DELETE", "/v1/subscriptions/{name}/members/{member}"),
    "ListDeadLetters": HttpRoute("GET", "/v1/subscriptions/{subscription}/dead"),
    "SettleDeadLetters": HttpRoute("POST", "/v1/subscriptions/{subscription}/dead/{action}"),
}
# Lists of which one element has a path of its own.
_LISTS: Final = {"ListCursors": "cursors", "ListSubscriptions": "subscriptions"}
# Parameters that are called otherwise than in runnel.proto.
_PARAMETERS: Final = {
    "messages_max": "limit",
    "bytes_max": "bytes",
    "time_ns": "time",
    "wait_ms": "wait",
}


class HttpPage(msgspec.Struct, frozen=True):
    """What a fetch found, as messages."""

    messages: Sequence[Message]
    next_offset: int
    first_offset: int
    end_offset: int
    gaps: Sequence[Gap]

    def __len__(self) -> int:
        return len(self.messages)


class HttpBus(RemoteBus):
    """A pool of connections. Requests that must keep their order are made one after the other."""

    def __init__(self, address: str, token: str | None, now_ns: Callable[[], int]) -> None:
        super().__init__(now_ns)
        self.transport = HttpTransport(address, token)
        self._publishing = asyncio.Lock()
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def close(self) -> None:
        await self.transport.close()

    def check_open(self) -> None:
        self.transport.check_open()

    async def call(self, method: str, **fields: Any) -> Fields:
        fields = {name: value for name, value in fields.items() if value is not None}
        if method in _LISTS and "name" in fields:
            path = f"{ROUTES[method].path}/{segment(fields['name'])}"
            return {_LISTS[method]: [await self.transport.ask("GET", path)]}
        if "is_paused" in fields:
            fields["action"] = "pause" if fields.pop("is_paused") else "resume"
        route = ROUTES[method]
        in_path = {name for name in fields if f"{{{name}}}" in route.path}
        if route.path.endswith("{name}") and not fields["name"]:  # the path of the list
            raise InvalidNameError("the name is empty")
        path = route.path.format(**{name: segment(fields[name]) for name in in_path})
        rest = {name: value for name, value in fields.items() if name not in in_path}
        if route.verb == "GET":
            told = await self.transport.ask("GET", path, _parameters(rest))
        elif rest:
            body = {name: json_of(value) for name, value in rest.items()}
            told = await self.transport.ask(route.verb, path, json=body)
        else:
            told = await self.transport.ask(route.verb, path)
        return {route.answer: told} if route.answer else told or {}

    def message_of(self, fields: Fields) -> Message:
        return message_of(fields)

    async def statistics(self) -> Fields:
        told: Fields = await self.transport.ask("GET", "/v1/statistics")
        return told

    # --- Publishing ---

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        async with self._publishing:
            return await super().publish(*arguments, **options)

    async def publish_messages(
        self, group: Sequence[Outgoing], level: str | None
    ) -> Sequence[Receipt]:
        """Messages of one topic, and of one partition if they have any: a request takes no more."""
        topic, partition = group[0].message.topic, group[0].partition
        body = [message_json(sent) for sent in group]
        async with self._at_once:
            told = await self._post(topic, body if len(body) > 1 else body[0], level, partition)
        if level == "none":
            return [Receipt(topic, 0, 0, 0, 0, "none") for _ in group]
        return [build(Receipt, each) for each in (told["receipts"] if len(body) > 1 else [told])]

    async def publish_group(
        self, group: Sequence[Outgoing], level: str | None
    ) -> Sequence[Receipt | RunnelError]:
        """A request for each topic."""
        by_topic: dict[str, list[int]] = {}
        for number, sent in enumerate(group):
            by_topic.setdefault(sent.message.topic, []).append(number)
        if len(by_topic) == 1:
            return await super().publish_group(group, level)
        answers = await asyncio.gather(
            *(
                self.publish_group([group[number] for number in numbers], level)
                for numbers in by_topic.values()
            )
        )
        found: dict[int, Receipt | RunnelError] = {}
        for numbers, of_topic in zip(by_topic.values(), answers, strict=True):
            found |= dict(zip(numbers, of_topic, strict=True))
        return [found[number] for number in range(len(group))]

    async def publish_batch(self, batch: Batch, *, level: str | None = None) -> BatchReceipt:
        """An array of its messages, for one topic and partition: a request takes no more."""
        (run,) = batch.runs()
        body = [message_json(Outgoing(message)) for message in batch.messages()]
        async with self._publishing:
            told = await self._post(run.topic, body, level, run.partition)
        first = told["receipts"][0]
        where = first["epoch"], first["receive_time_ns"], first["level"]
        return BatchReceipt([first["offset"]], 0, *where, receivers=first.get("receivers"))

    async def _post(
        self, topic: str, body: object, level: str | None, partition: int | None
    ) -> Any:
        params = {"level": level, "partition": partition}
        return await self.transport.ask(
            "POST",
            f"/v1/topics/{segment(topic)}/messages",
            {name: value for name, value in params.items() if value is not None},
            json=body,
        )

    # --- Reading and consuming ---

    async def fetch_page(self, **fields: Any) -> HttpPage:
        told = await self.call("Fetch", **fields)
        return HttpPage(
            [message_of(message) for message in told["messages"]],
            told["next_offset"],
            told["first_offset"],
            told["end_offset"],
            [build(Gap, gap) for gap in told["gaps"]],
        )

    def new_subscription(
        self, request: Fields, buffer_bytes: int, on_gap: Callable[[Gap], object] | None
    ) -> RemoteSubscription:
        return HttpSubscription(self.transport, request, buffer_bytes, on_gap)

    def new_consumer(
        self, subscription: str, definition: Fields, member: str | None, window_messages: int
    ) -> RemoteConsumer:
        return HttpConsumer(self, self.transport, subscription, definition, member, window_messages)


def _parameters(fields: Fields) -> dict[str, str | int]:
    told = {_PARAMETERS.get(name, name): value for name, value in fields.items()}
    if "bytes" in told:
        told["bytes"] = min(told["bytes"], _PAGE_BYTES_MAX)
    if "wait" in told:
        told["wait"] = str(told["wait"] / 1000)
    return told


@asynccontextmanager
async def connect_http(
    address: str, token: str | None = None, now_ns: Callable[[], int] = time.time_ns
) -> AsyncIterator[HttpBus]:
    """A client that is closed at the end of the `async with`."""
    async with HttpBus(address, token, now_ns) as bus:
        yield bus
