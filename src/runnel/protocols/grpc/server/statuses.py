"""Translates errors to gRPC: the table from error codes to status codes, and the metadata of a status."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, NamedTuple, NoReturn

import grpc.aio
from grpc import StatusCode

from runnel.errors import RunnelError, details_of
from runnel.protocols.grpc.generated import runnel_pb2 as pb

CODE: Final = "runnel-code"
RETRIABLE: Final = "runnel-retriable"
DETAILS: Final = "runnel-details"

# Some errors quote the value that they refuse. Text and details go into metadata, which clients limit to 8 KiB.
_TEXT_CHARACTERS_MAX: Final = 500

_INTERNAL_TEXT: Final = "an internal error of the broker; its diagnostics say more"

_STATUSES: Final = {
    "bad_request": StatusCode.INVALID_ARGUMENT,
    "malformed": StatusCode.INVALID_ARGUMENT,
    "invalid_name": StatusCode.INVALID_ARGUMENT,
    "settings": StatusCode.INVALID_ARGUMENT,
    "handshake": StatusCode.INVALID_ARGUMENT,
    "unauthenticated": StatusCode.UNAUTHENTICATED,
    "forbidden": StatusCode.PERMISSION_DENIED,
    "unknown_topic": StatusCode.NOT_FOUND,
    "unknown_subscription": StatusCode.NOT_FOUND,
    "late_ack": StatusCode.FAILED_PRECONDITION,
    "subscription_differs": StatusCode.FAILED_PRECONDITION,
    "member_replaced": StatusCode.ABORTED,
    "producer_gap": StatusCode.FAILED_PRECONDITION,
    "producer_fenced": StatusCode.ABORTED,
    "producer_forgotten": StatusCode.FAILED_PRECONDITION,
    "offset_gone": StatusCode.OUT_OF_RANGE,
    "offset_ahead": StatusCode.OUT_OF_RANGE,
    "limit_exceeded": StatusCode.RESOURCE_EXHAUSTED,
    "quota_exceeded": StatusCode.RESOURCE_EXHAUSTED,
    "disk_full": StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": StatusCode.UNAVAILABLE,
    "busy": StatusCode.UNAVAILABLE,
    "read_only": StatusCode.UNAVAILABLE,
    "closed": StatusCode.UNAVAILABLE,
    "locked": StatusCode.UNAVAILABLE,
    "connection_lost": StatusCode.UNAVAILABLE,
    "timeout": StatusCode.UNAVAILABLE,
    "slow_reader": StatusCode.UNAVAILABLE,
    "moved": StatusCode.UNAVAILABLE,
    "corruption": StatusCode.DATA_LOSS,
    "format_version": StatusCode.INTERNAL,
    "internal": StatusCode.INTERNAL,
}

WITHOUT_CODE: Final = (StatusCode.CANCELLED, StatusCode.UNIMPLEMENTED, StatusCode.DEADLINE_EXCEEDED)
"""Statuses of gRPC itself, without our metadata: the client cancelled the call or was cut off, named a method
that does not exist, or set a deadline that has passed."""


class Status(NamedTuple):
    """The status that a call ends with."""

    code: StatusCode
    text: str
    metadata: tuple[tuple[str, str], ...]


def status_of(error: BaseException) -> Status:
    """The status of an error. An error that is no RunnelError is a bug, and its text is not sent to the client."""
    sent = error_of(error)
    return Status(
        _STATUSES.get(sent.code, StatusCode.INTERNAL),
        sent.text,
        (
            (CODE, sent.code),
            (RETRIABLE, "true" if sent.retriable else "false"),
            (DETAILS, sent.details or "{}"),
        ),
    )


async def refused(context: grpc.aio.ServicerContext[Any, Any], failure: BaseException) -> NoReturn:
    """End a call with the status of a failure."""
    status = status_of(failure)
    try:
        await context.abort(status.code, status.text, status.metadata)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error  # the client has left meanwhile
    raise AssertionError("abort raises by itself")


def error_of(error: BaseException) -> pb.Error:
    """The message for an error within a stream that continues."""
    if not isinstance(error, RunnelError):
        return pb.Error(code=RunnelError.code, text=_INTERNAL_TEXT)
    details = {name: _short(value) for name, value in details_of(error).items()}
    return pb.Error(
        code=error.code,
        text=_shortened(str(error)),
        retriable=error.retriable,
        details=json.dumps(details) if details else "",  # ASCII: everything else is escaped
    )


def _short(value: str | int) -> str | int:
    return _shortened(value) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    # UTF-8 has no surrogates, but the text of an error that refuses a name with one contains it.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"
