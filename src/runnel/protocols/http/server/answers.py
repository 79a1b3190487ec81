"""Answers that are bytes already, for handlers where Litestar's own responses cost too much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from litestar.types import Receive, Scope, Send

from runnel.protocols.http.server.connection import CONNECTION, CYCLE, HttpConnection

JSON: Final = "application/json"

encode_json: Final = msgspec.json.Encoder().encode
_JSON_FIELD: Final = b"content-type: application/json\r\n"
_HAS_FIELDS: Final = "runnel.has_fields"


def add_fields(scope: Scope, fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Add these headers to the answer to this request, whichever code makes it."""
    cycle = scope[CYCLE]  # type: ignore[typeddict-item]
    cycle.default_headers = [*cycle.default_headers, *fields]
    scope[_HAS_FIELDS] = True  # type: ignore[typeddict-unknown-key]


class Answer:
    """An ASGI application that sends these bytes. Header values must be Latin-1 without line ends."""

    __slots__ = ("_content_type", "_headers", "_status", "body")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        content_type: str | None = JSON,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.body = body
        self._status = status
        self._content_type = content_type
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        is_plain = self._content_type is JSON and self._status == 200 and not self._headers
        if is_plain and _HAS_FIELDS not in scope:
            connection: HttpConnection = scope[CONNECTION]  # type: ignore[typeddict-item]
            if connection.answer(scope[CYCLE], 200, _JSON_FIELD, self.body):  # type: ignore[typeddict-item]
                return
        await send(
            {"type": "http.response.start", "status": self._status, "headers": self._fields()}
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": False})

    def _fields(self) -> list[tuple[bytes, bytes]]:
        given = list(self._headers)
        if self._status != 204:
            given.append(("content-length", str(len(self.body))))
            if self._content_type is not None:
                given.append(("content-type", self._content_type))
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given]
