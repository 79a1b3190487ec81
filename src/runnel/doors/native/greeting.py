"""Hello and welcome: how a connection must begin, and what the broker says of itself then."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Final

from runnel.config import Settings
from runnel.doors.native.requests import check_no_tail, name_of
from runnel.errors import HandshakeError
from runnel.formats import wire

_NS_PER_MS: Final = 1_000_000


def checked_hello(request: wire.Request, tail: memoryview) -> wire.Hello:
    """The first request of a connection, if it is what it must be."""
    if not isinstance(request, wire.Hello):
        raise HandshakeError(f"the first frame must be hello; this one is {name_of(request)!r}")
    check_no_tail(request, tail)
    if request.version != wire.VERSION:
        raise HandshakeError(
            f"the client speaks version {request.version} of the native protocol; "
            f"this broker speaks version {wire.VERSION}"
        )
    return request


def welcome_to(hello: wire.Hello, settings: Settings) -> wire.Welcome:
    return wire.Welcome(
        hello.id,
        wire.VERSION,
        (),
        settings.cluster,
        settings.node,
        _server_name(),
        settings.native.frame_bytes_max,
        settings.limits.batch_bytes_max,
        settings.limits.message_bytes_max,
        settings.native.idle_timeout_ns // _NS_PER_MS,
    )


@cache
def _server_name() -> str:
    return f"runnel/{metadata.version('runnel')}"
