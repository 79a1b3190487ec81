"""Requests to the HTTP door, and problems as the errors of Runnel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from runnel.errors import ClosedError, ConnectionLostError, RunnelError, from_details

Param = str | int | float | bool | None
Params = Sequence[tuple[str, str | int]] | Mapping[str, str | int]

# Tests have a patience of their own.
_TIMEOUT = httpx.Timeout(None)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class HttpLine:
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
        """The answer's JSON; None where there is no body."""
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
        check(answer.status_code, answer.headers, answer.content)
        return msgspec.json.decode(answer.content) if answer.content else None

    async def listen(
        self, path: str, params: Params, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """An answer whose body is read as it comes. Close it."""
        self.check_open()
        request = self._client.build_request("GET", path, params=_params(params), headers=headers)
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from None
        if answer.status_code >= 400:
            content = await answer.aread()
            check(answer.status_code, answer.headers, content)
        return answer


def check(status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Raise what a problem tells; it must be one if the status says so."""
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
    """A name as one segment of a path. Dots as well: clients, and what stands between, take `..` for a step up."""
    return quote(name, safe="").replace(".", "%2E")


def _params(params: Params) -> list[tuple[str, Param]]:
    return list(params.items() if isinstance(params, Mapping) else params)
