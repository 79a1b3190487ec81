"""Requests to the HTTP listener, the JSON of their bodies, and problems as the errors of Runnel."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from runnel.errors import ClosedError, ConnectionLostError, RunnelError, from_details
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.wire import CursorPlace, Start
from runnel.formats.work_heads import WorkOptions
from tests.conformance.clients.remote_publisher import Outgoing

Param = str | int | float | bool | None
Params = Sequence[tuple[str, str | int]] | Mapping[str, str | int]

# The tests limit their own time.
_TIMEOUT = httpx.Timeout(None)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class HttpTransport:
    """Connections to one address, with one token. Close it when it is no longer needed."""

    def __init__(self, address: str, token: str | None = None) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}",
            headers=headers,
            timeout=_TIMEOUT,
            limits=_LIMITS,
            verify=False,  # nothing to verify, and making a context takes longer than a test
            trust_env=False,
        )
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        await self._client.aclose()

    def check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the bus has been closed")

    async def ask(
        self,
        method: str,
        path: str,
        params: Params = (),
        *,
        json: object = msgspec.UNSET,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON of the answer; None if it has no body."""
        self.check_open()
        sent = dict(headers or {})
        if json is not msgspec.UNSET:
            content = msgspec.json.encode(json)
            sent["content-type"] = "application/json"
        try:
            answer = await self._client.request(
                method, path, params=_params(params), content=content, headers=sent
            )
        except httpx.TransportError as error:
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from None
        _check(answer.status_code, answer.headers, answer.content)
        return msgspec.json.decode(answer.content) if answer.content else None

    async def listen(
        self, path: str, params: Params, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """An answer whose body is read as it arrives. Close it."""
        self.check_open()
        request = self._client.build_request("GET", path, params=_params(params), headers=headers)
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from None
        if answer.status_code >= 400:
            content = await answer.aread()
            _check(answer.status_code, answer.headers, content)
        return answer


def _params(params: Params) -> list[tuple[str, Param]]:
    return list(params.items() if isinstance(params, Mapping) else params)


def _check(status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Raise the error of a problem. A status from 400 on must come with one."""
    if status < 400:
        return
    assert headers["content-type"] == "application/problem+json", (status, headers, content)
    raise error_of(msgspec.json.decode(content), status)


def error_of(problem: Mapping[str, Any], status: int | None = None) -> RunnelError:
    """The error that a problem was made from."""
    error = from_details(problem["code"], problem["detail"], problem.get("details") or {})
    assert problem["type"] == f"urn:runnel:problem:{problem['code']}"
    assert problem["retriable"] == error.retriable, problem
    assert status is None or problem["status"] == status
    # For tests that look at the protocol itself.
    error.status = problem["status"]  # type: ignore[attr-defined]
    return error


def segment(name: str) -> str:
    """A name as one segment of a path. Dots are quoted, too: clients and proxies take `..` for a step up."""
    return quote(name, safe="").replace(".", "%2E")


# --- JSON ---


def json_of(value: object) -> object:
    """A field of a request as JSON."""
    if isinstance(value, Start):
        told: dict[str, Any] = {"kind": value.kind}
        if value.kind == "time":
            told["time"] = value.time_ns
        if value.partitions:
            told["places"] = [
                {"topic": place.topic, "partition": place.partition, "offset": place.offset}
                for place in value.partitions
            ]
        return told
    if isinstance(value, WorkOptions | CursorPlace):
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name != "lag"}
        default = type(value)()
        return {name: each for name, each in fields.items() if each != getattr(default, name)}
    if isinstance(value, list | tuple):
        return [json_of(each) for each in value]
    return value


def message_json(sent: Outgoing) -> dict[str, Any]:
    """A message to publish."""
    message = sent.message
    told: dict[str, Any] = {
        "event_time": message.event_time_ns,
        "transmit_time": message.transmit_time_ns,
    }
    told |= _either("text", "base64", message.payload)
    told |= _either("key", "key_base64", message.key)
    told |= _either("partition_key", "partition_key_base64", message.partition_key)
    if message.tags:
        told["tags"] = dict(message.tags)
    if message.uid is not None:
        told["uid"] = base64.b64encode(message.uid).decode()
    return told


def _either(text: str, encoded: str, value: bytes | None) -> dict[str, str]:
    if value is None:
        return {}
    try:
        return {text: value.decode()}
    except UnicodeDecodeError:
        return {encoded: base64.b64encode(value).decode()}


def message_of(told: dict[str, Any]) -> Message:
    payload = _bytes(told, "text", "base64")
    assert payload is not None, told
    assert told["size"] == len(payload), told
    uid = told.get("uid")
    return Message(
        told["topic"],
        payload,
        key=_bytes(told, "key", "key_base64"),
        tags=told.get("tags") or NO_TAGS,
        event_time_ns=told.get("event_time_ns", 0),
        transmit_time_ns=told.get("transmit_time_ns", 0),
        receive_time_ns=told["receive_time_ns"],
        partition=told["partition"],
        offset=told["offset"],
        uid=None if uid is None else base64.b64decode(uid),
        partition_key=_bytes(told, "partition_key", "partition_key_base64"),
    )


def _bytes(told: dict[str, Any], text: str, encoded: str) -> bytes | None:
    if encoded in told:
        return base64.b64decode(told[encoded], validate=True)
    value = told.get(text)
    return None if value is None else value.encode()
