"""Answers that are bytes already: what a handler returns where Litestar's own responses would cost too much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from litestar.types import Receive, Scope, Send

JSON: Final = "application/json"

encode_json: Final = msgspec.json.Encoder().encode
_JSON_HEADER: Final = (b"content-type", b"application/json")


class Answer:
    """An ASGI application that sends these bytes. Header values must be Latin-1 without line ends."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        content_type: str | None = JSON,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.body = body
        self.status = status
        self.headers = [
            (b"content-length", b"%d" % len(body)),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers),
        ]
        if status == 204:
            self.headers[:1] = []
        elif content_type == JSON:
            self.headers.append(_JSON_HEADER)
        elif content_type is not None:
            self.headers.append((b"content-type", content_type.encode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})
