"""Clients of a REST interface, as cheap as they can be: ready-made requests, and of answers only what is needed.

A client is a generator on a connection of its own that is kept alive: it yields a request and is sent the body of the
answer. All of them run in one process, which is less busy than the server it loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import cast

import msgspec
import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.phases import ACK, CONSUME, PAYLOAD, PUBLISH, TOGETHER, LoadPlan, Meter

# Phases of this listener alone.
PUBLISH_RAW, PUBLISH_LIVE, BULK = "publish raw", "publish live", "bulk"

Client = Generator[bytes, bytes, None]

_WARM_UP_CALLS = 20
_HELD_MAX = 20  # messages that a client has taken and not acknowledged
_JSON, _NDJSON, _RAW = "application/json", "application/x-ndjson", "application/octet-stream"
_MESSAGE = msgspec.json.encode({"text": PAYLOAD.decode()})
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length: "
_ACK = b'"ack":"'


# --- One connection ---


class LoadConnection(asyncio.Protocol):
    """Sends what its client yields, as soon as what it sent before is answered."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._client: Client | None = None
        self._finished: asyncio.Future[None] | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def start(self, client: Client) -> asyncio.Future[None]:
        assert self._transport is not None
        self._client = client
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(next(client))
        return self._finished

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        assert self._client is not None
        assert self._transport is not None
        try:
            head_end = data.find(_HEAD_END)
            body = head_end + len(_HEAD_END)
            if head_end < 0 or len(data) < (end := body + _length_of(data, head_end)):
                self._buffer = data
                return
            self._buffer = data[end:]
            if data[9:10] != b"2":
                raise ConnectionError(f"refused: {data.decode(errors='replace')}")
            self._transport.write(self._client.send(data[body:end]))
        except StopIteration:
            self._finish(None)
        except (ConnectionError, ValueError) as error:
            self._finish(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error or ConnectionResetError("the server closed the connection"))

    def _finish(self, error: Exception | None) -> None:
        if self._finished is None or self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _length_of(data: bytes, head_end: int) -> int:
    at = data.find(_LENGTH, 0, head_end)
    if at < 0:
        at = data.lower().find(_LENGTH, 0, head_end)
    if at < 0:
        raise ValueError(f"an answer without its length: {data[:head_end]!r}")
    begin = at + len(_LENGTH)
    return int(data[begin : data.index(b"\r\n", begin)])


# --- Requests ---


def _post(plan: LoadPlan, path: str, body: bytes = b"", content_type: str = _JSON) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {plan.address}", f"content-length: {len(body)}"]
    if body:
        lines.append(f"content-type: {content_type}")
    if plan.token is not None:
        lines.append(f"authorization: Bearer {plan.token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _publishing(plan: LoadPlan, topic: str, body: bytes, content_type: str = _JSON) -> bytes:
    return _post(plan, f"/v1/topics/{topic}/messages", body, content_type)


def _consuming(plan: LoadPlan, place: int) -> bytes:
    query = f"limit=1&wait=10&lease=60&consumer=client-{place:02}"
    return _post(plan, f"/v1/subscriptions/{plan.name}/messages?{query}")


def _ack_in(answer: bytes) -> bytes:
    begin = answer.index(_ACK) + len(_ACK)
    return answer[begin : answer.index(b'"', begin)]


# --- What clients do ---


def _repeat(request: bytes, calls: int) -> Client:
    for _ in range(calls):
        yield request


def _consume(request: bytes, calls: int, acks: list[bytes]) -> Client:
    for _ in range(calls):
        answer = yield request
        acks.append(_ack_in(answer))


def _acknowledge(acknowledging: Callable[[bytes], bytes], acks: list[bytes]) -> Client:
    for ack in acks:
        yield acknowledging(ack)


def _all_three(
    publish: bytes, consume: bytes, acknowledging: Callable[[bytes], bytes], calls: int
) -> Client:
    for _ in range(calls):
        yield publish
        answer = yield consume
        yield acknowledging(_ack_in(answer))


class _Requests:
    """Everything that the clients of a run send."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self.publish = _publishing(plan, f"work-{plan.name}", _MESSAGE)
        self.publish_raw = _publishing(plan, f"raw-{plan.name}", PAYLOAD, _RAW)
        self.publish_live = _publishing(plan, f"live-{plan.name}", _MESSAGE)
        self.consume = [_consuming(plan, place) for place in range(plan.clients)]
        # What stands around the id of a delivery, by the length of the body: made once.
        self._ack_path = f"/v1/subscriptions/{plan.name}/ack"
        self._ack_heads: dict[int, bytes] = {}

    def acknowledge(self, ack: bytes) -> bytes:
        body = b'{"acks":["%b"]}' % ack
        head = self._ack_heads.get(len(body))
        if head is None:
            whole = _post(self._plan, self._ack_path, body)
            head = self._ack_heads[len(body)] = whole[: -len(body)]
        return head + body


# --- Roles ---


async def _connected(plan: LoadPlan) -> list[LoadConnection]:
    host, _, port = plan.address.rpartition(":")
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(LoadConnection, host, int(port)) for _ in range(plan.clients)
    ]
    return [connection for _, connection in opened]


async def _run(connections: Sequence[LoadConnection], clients: Iterable[Client]) -> None:
    await asyncio.gather(
        *(connection.start(client) for connection, client in zip(connections, clients, strict=True))
    )


def work(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Single messages: published by all clients, then consumed and acknowledged by turns; then message by message."""

    async def load() -> RoleReport:
        connections = await _connected(plan)
        requests = _Requests(plan)
        meter = Meter(plan.pid)
        calls, total = plan.calls, plan.calls * plan.clients

        def everywhere(request: bytes) -> Iterable[Client]:
            return (_repeat(request, calls) for _ in connections)

        def all_three(calls: int) -> Iterable[Client]:
            return (
                _all_three(requests.publish, consume, requests.acknowledge, calls)
                for consume in requests.consume
            )

        await _run(connections, all_three(_WARM_UP_CALLS))
        authenticator.ready()
        authenticator.wait_go()
        with meter.phase(PUBLISH, total):
            await _run(connections, everywhere(requests.publish))
        for begin in range(0, calls, _HELD_MAX):
            held = min(_HELD_MAX, calls - begin)
            acks: list[list[bytes]] = [[] for _ in connections]
            taking = zip(requests.consume, acks, strict=True)
            with meter.phase(CONSUME, held * plan.clients):
                await _run(connections, (_consume(each, held, taken) for each, taken in taking))
            with meter.phase(ACK, held * plan.clients):
                settling = (_acknowledge(requests.acknowledge, taken) for taken in acks)
                await _run(connections, settling)
        with meter.phase(TOGETHER, total):
            await _run(connections, all_three(calls))
        with meter.phase(PUBLISH_RAW, total):
            await _run(connections, everywhere(requests.publish_raw))
        with meter.phase(PUBLISH_LIVE, total):
            await _run(connections, everywhere(requests.publish_live))
        for connection in connections:
            connection.close()
        return meter.report((_WARM_UP_CALLS + 2 * calls) * plan.clients)

    return uvloop.run(load())


def singles(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """One message in each request."""
    return _posted(plan, authenticator, PUBLISH, _publishing(plan, f"single-{plan.name}", _MESSAGE))


def bulk(plan: LoadPlan, authenticator: RolePipe) -> RoleReport:
    """Many messages in each request, a line for each."""
    lines = (_MESSAGE + b"\n") * plan.messages
    return _posted(
        plan, authenticator, BULK, _publishing(plan, f"bulk-{plan.name}", lines, _NDJSON)
    )


def _posted(plan: LoadPlan, authenticator: RolePipe, phase: str, request: bytes) -> RoleReport:
    async def load() -> RoleReport:
        connections = await _connected(plan)
        meter = Meter(plan.pid)
        warm_up = max(1, plan.calls // 10)
        await _run(connections, (_repeat(request, warm_up) for _ in connections))
        authenticator.ready()
        authenticator.wait_go()
        with meter.phase(phase, plan.calls * plan.clients * plan.messages):
            await _run(connections, (_repeat(request, plan.calls) for _ in connections))
        for connection in connections:
            connection.close()
        return meter.report()

    return uvloop.run(load())
