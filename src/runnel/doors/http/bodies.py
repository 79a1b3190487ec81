"""Bodies of requests, read within their limits."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request

from runnel.doors.http.calls import Call
from runnel.doors.http.problems import TooLargeError
from runnel.errors import ConnectionLostError

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"


def content_type(call: Call) -> str:
    """Without its parameters, in lower case; empty if there is none."""
    given = call.headers.get(b"content-type")
    if given is None:
        return ""
    if given == b"application/json":  # by far the most frequent
        return JSON
    return given.partition(b";")[0].strip().lower().decode("latin-1")


async def read_body(call: Call, request: Request[Any, Any, Any]) -> bytes:
    """The whole body. TooLargeError as soon as it is seen to be too large."""
    bytes_max = call.door.settings.http.body_bytes_max
    length = call.headers.get(b"content-length")
    if length is not None and int(length) > bytes_max:
        raise _too_large(bytes_max)
    event = await request.receive()
    if event["type"] == "http.request" and not event["more_body"]:
        body = event["body"]
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        return body
    whole = bytearray()
    while event["type"] == "http.request":
        whole += event["body"]
        if len(whole) > bytes_max:
            raise _too_large(bytes_max)
        if not event["more_body"]:
            return bytes(whole)
        event = await request.receive()
    raise ConnectionLostError("the client has gone before its request was there")


def _too_large(bytes_max: int) -> TooLargeError:
    return TooLargeError(
        f"the body is larger than http.body_bytes_max = {bytes_max}; {NDJSON} has no limit but for a line"
    )
