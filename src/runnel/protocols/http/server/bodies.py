"""Reads the bodies of requests within their limits."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request

from runnel.errors import ConnectionLostError
from runnel.protocols.http.encoding.problems import TooLargeError
from runnel.protocols.http.server.calls import HttpCall

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"

CONTROL_BYTES_MAX: Final = 2**20
"""Limit of bodies without messages. Each is decoded in one step, which blocks all other requests meanwhile."""


def content_type(call: HttpCall) -> str:
    """The content type without its parameters, in lower case; empty if there is none."""
    given = call.headers.get(b"content-type")
    if given is None:
        return ""
    if given == b"application/json":  # by far the most frequent
        return JSON
    return given.partition(b";")[0].strip().lower().decode("latin-1")


async def read_body(call: HttpCall, request: Request[Any, Any, Any]) -> bytes:
    """The whole body of a request with messages. TooLargeError is raised as soon as the limit is exceeded."""
    bytes_max = call.server.settings.http.body_bytes_max
    body = await _read(call, request, bytes_max)
    if body is None:
        raise TooLargeError(
            f"the body is larger than http.body_bytes_max = {bytes_max}; {NDJSON} has no limit but for a line"
        )
    return body


async def read_control_body(call: HttpCall, request: Request[Any, Any, Any]) -> bytes:
    """The whole body of a request without messages, which has its own limit."""
    bytes_max = min(call.server.settings.http.body_bytes_max, CONTROL_BYTES_MAX)
    body = await _read(call, request, bytes_max)
    if body is None:
        raise TooLargeError(f"the body is larger than the {bytes_max} bytes that are taken here")
    return body


async def _read(call: HttpCall, request: Request[Any, Any, Any], bytes_max: int) -> bytes | None:
    """None: the body is larger. Refuses a body whose token was revoked while it arrived."""
    length = call.headers.get(b"content-length")
    if length is not None and int(length) > bytes_max:
        return None
    event = await request.receive()
    if event["type"] == "http.request" and not event["more_body"]:
        body = event["body"]
        call.check_admitted()
        return body if len(body) <= bytes_max else None
    whole = bytearray()
    while event["type"] == "http.request":
        whole += event["body"]
        if len(whole) > bytes_max:
            return None
        if not event["more_body"]:
            call.check_admitted()
            return bytes(whole)
        event = await request.receive()
    raise ConnectionLostError("the client has gone before its request was there")
