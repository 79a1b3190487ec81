"""Bodies of requests, read within their limits."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request

from runnel.errors import ConnectionLostError
from runnel.protocols.http.encoding.problems import TooLargeError
from runnel.protocols.http.server.calls import HttpCall

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"

CONTROL_BYTES_MAX: Final = 2**20
"""Of bodies that carry no messages. They are decoded at once, which holds up everybody else for so long."""


def content_type(call: HttpCall) -> str:
    """Without its parameters, in lower case; empty if there is none."""
    given = call.headers.get(b"content-type")
    if given is None:
        return ""
    if given == b"application/json":  # by far the most frequent
        return JSON
    return given.partition(b";")[0].strip().lower().decode("latin-1")


async def read_body(call: HttpCall, request: Request[Any, Any, Any]) -> bytes:
    """The whole body of messages. TooLargeError as soon as it is seen to be too large."""
    bytes_max = call.server.settings.http.body_bytes_max
    body = await _read(call, request, bytes_max)
    if body is None:
        raise TooLargeError(
            f"the body is larger than http.body_bytes_max = {bytes_max}; {NDJSON} has no limit but for a line"
        )
    return body


async def read_control_body(call: HttpCall, request: Request[Any, Any, Any]) -> bytes:
    """The same for a body without messages, which has a limit of its own."""
    bytes_max = min(call.server.settings.http.body_bytes_max, CONTROL_BYTES_MAX)
    body = await _read(call, request, bytes_max)
    if body is None:
        raise TooLargeError(f"the body is larger than the {bytes_max} bytes that are taken here")
    return body


async def _read(call: HttpCall, request: Request[Any, Any, Any], bytes_max: int) -> bytes | None:
    """None: it is larger. Whoever's token was revoked while it came has said nothing."""
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
