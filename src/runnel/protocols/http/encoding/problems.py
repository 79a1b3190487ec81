"""Errors as problem details (RFC 9457): the code, the field, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from litestar import exceptions as litestar

from runnel.errors import (
    ClientFault,
    InvalidNameError,
    LimitExceededError,
    MalformedError,
    RunnelError,
    UnauthenticatedError,
    details_of,
)
from runnel.platform.diagnostics import get_logger

logger = get_logger("runnel.http")

PROBLEM_TYPE: Final = "application/problem+json"
_TYPE_PREFIX: Final = "urn:runnel:problem:"
_RETRY_AFTER_SECONDS: Final = "1"
_TEXT_CHARS_MAX: Final = 2000

Headers = Sequence[tuple[str, str]]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a failed request. `code` is stable; `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retriable: bool
    field: str | None = None
    details: Mapping[str, str | int] | None = None


# By code: the status, and the title, which is the same for every problem of its type.
_BY_CODE: Final[Mapping[str, tuple[int, str]]] = {
    "bad_request": (400, "The request is wrong as it stands"),
    "malformed": (400, "Not in the format that is expected here"),
    "invalid_name": (400, "Not a name that is allowed"),
    "settings": (400, "Settings that cannot be used"),
    "handshake": (400, "Not HTTP as it is spoken here"),
    "unauthenticated": (401, "A token is needed"),
    "forbidden": (403, "Not allowed"),
    "unknown_topic": (404, "No such topic, partition or cursor"),
    "unknown_subscription": (404, "No such subscription"),
    "not_found": (404, "Nothing is here"),
    "method_not_allowed": (405, "Not a method of this resource"),
    "late_ack": (409, "The lease has ended, or it was settled otherwise"),
    "subscription_differs": (409, "The subscription exists and differs"),
    "member_replaced": (409, "Another consumer has taken the member's place"),
    "producer_gap": (409, "Not the next batch of its publisher"),
    "producer_fenced": (409, "A newer publisher has the name"),
    "producer_forgotten": (409, "The publisher is no longer known"),
    "offset_gone": (410, "The messages are gone"),
    "unsupported_media_type": (415, "Not a content type that is taken here"),
    "offset_ahead": (416, "The offset has not been reached"),
    "limit_exceeded": (429, "Beyond a limit"),
    "quota_exceeded": (429, "Beyond a quota"),
    "unavailable": (503, "Not now"),
    "busy": (503, "Too busy now"),
    "read_only": (503, "Nothing can be stored here now"),
    "closed": (503, "Connect again"),
    "locked": (503, "In use by another process"),
    "connection_lost": (503, "The connection was lost"),
    "timeout": (503, "It took too long"),
    "slow_reader": (503, "The reader has fallen too far behind"),
    "moved": (503, "Another node has it now"),
    "disk_full": (507, "The disk is full"),
    "corruption": (500, "Stored data is damaged"),
    "format_version": (500, "Stored data is of a newer Runnel"),
    "internal": (500, "A fault of the broker"),
}


class FieldFault(ClientFault):
    """A parameter, a header or a place in the body that is wrong: `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field

    def __reduce__(self) -> tuple[type[FieldFault], tuple[str, str]]:
        return (type(self), (self.field, str(self).removeprefix(f"{self.field}: ")))


class FieldNameFault(InvalidNameError):
    """A name in the path that is not allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


class TooLargeError(LimitExceededError):
    """A body or a message is too large. Its status is 413; other errors with this code are about counts."""


class NoLastMessageError(ClientFault):
    """The last message of a partition that has none."""

    code = "not_found"


class NotTakenError(ClientFault):
    """A content type, or an encoding, that this resource does not take."""

    code = "unsupported_media_type"


class BulkError(RunnelError):
    """A bulk publish that ended early: `published` messages came before, `line` is where it ended."""

    def __init__(self, cause: RunnelError, line: int | None, published: int) -> None:
        where = "" if line is None else f"line {line}: "
        super().__init__(f"{where}{cause}; {published} messages before it were published")
        self.cause = cause
        self.line = line
        self.published = published


def problem_of(error: BaseException, peer: str = "") -> tuple[Problem, Headers]:
    """The answer to any failure, and its headers. A bug of the broker is logged, with the client's address `peer`."""
    if isinstance(error, BulkError):
        problem, headers = problem_of(error.cause, peer)
        details = {**(problem.details or {}), "published": error.published}
        if error.line is not None:
            details["line"] = error.line
        return (
            msgspec.structs.replace(problem, detail=_shortened(str(error)), details=details),
            headers,
        )
    if isinstance(error, RunnelError):
        return _of_error(error)
    if isinstance(error, litestar.HTTPException):
        return _of_litestar(error, peer)
    return _of_bug(error, peer)


def problem_bytes(problem: Problem) -> bytes:
    return _encoder.encode(problem)


_encoder: Final = msgspec.json.Encoder()


def _of_error(error: RunnelError) -> tuple[Problem, Headers]:
    status = None
    field = None
    headers: list[tuple[str, str]] = []
    match error:
        case FieldFault() | FieldNameFault():
            field = error.field
        case MalformedError():
            field = error.place
        case TooLargeError():
            status = 413
        case UnauthenticatedError():
            headers.append(("www-authenticate", "Bearer"))
    problem = _problem(
        error.code,
        str(error),
        status=status,
        retriable=error.retriable,
        field=field,
        details=details_of(error) or None,
    )
    if problem.status in (429, 503, 507):
        headers.append(("retry-after", _RETRY_AFTER_SECONDS))
    return problem, headers


def _of_litestar(error: litestar.HTTPException, peer: str) -> tuple[Problem, Headers]:
    """The answer to a request that Litestar refuses before it calls a handler."""
    match error:
        case litestar.NotFoundException():
            detail = (
                "no such resource; /openapi.json lists what there is, /docs shows it in a browser"
            )
            return _problem("not_found", detail), ()
        case litestar.MethodNotAllowedException():
            allowed = (error.headers or {}).get("allow", "")
            detail = f"this resource has the methods {allowed}"
            return _problem("method_not_allowed", detail), (("allow", allowed),)
        case litestar.ValidationException():
            field, detail = _field_of(error)
            return _problem("bad_request", detail, field=field), ()
        case _ if error.status_code == 413:
            detail = "the body is larger than http.body_bytes_max allows"
            return _problem("limit_exceeded", detail, status=413), ()
        case _ if error.status_code >= 500:
            return _of_bug(error, peer)
    return _problem("bad_request", error.detail, status=error.status_code), ()


def _of_bug(error: BaseException, peer: str) -> tuple[Problem, Headers]:
    logger.error("a request failed because of a bug", peer=peer, exc_info=error)
    return _problem("internal", "the broker could not answer; its diagnostics say why"), ()


def _field_of(error: litestar.ValidationException) -> tuple[str | None, str]:
    """The first invalid field, and what is wrong with it."""
    if isinstance(error.extra, list) and error.extra and isinstance(error.extra[0], dict):
        first = error.extra[0]
        field, message = first.get("key"), first.get("message", error.detail)
        return field, f"{field}: {message}" if field else str(message)
    if missing := re.match(r"Missing required (\w+) parameter '([^']+)'", error.detail):
        return missing[2], f"the {missing[1]} parameter {missing[2]!r} is needed"
    return None, error.detail


def _problem(
    code: str,
    detail: str,
    *,
    status: int | None = None,
    retriable: bool = False,
    field: str | None = None,
    details: Mapping[str, str | int] | None = None,
) -> Problem:
    usual, title = _BY_CODE.get(code, _BY_CODE["internal"])
    return Problem(
        type=_TYPE_PREFIX + code,
        title=title,
        status=usual if status is None else status,
        detail=_shortened(detail),
        code=code,
        retriable=retriable,
        field=field,
        details=details,
    )


def _shortened(text: str) -> str:
    # JSON has no lone surrogates, but an error may quote some that a client sent.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _TEXT_CHARS_MAX else text[:_TEXT_CHARS_MAX] + "…"
