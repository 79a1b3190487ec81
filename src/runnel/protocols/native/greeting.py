"""The start of a connection: checks the client's hello, and makes the broker's welcome."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Final

from runnel.broker.access import Scope
from runnel.broker.cluster_nodes import ClusterNodes
from runnel.config import Settings
from runnel.errors import HandshakeError
from runnel.formats import wire
from runnel.protocols.native.requests import check_no_tail, name_of

# Of clients; known where there are several nodes.
_FEATURES: Final = (wire.PARTS, wire.PART_ONLY)
_NS_PER_MS: Final = 1_000_000

# The first four bytes, which a frame uses for its length, of HTTP/1.1 requests and of the preface of HTTP/2.
_HTTP_BEGINNINGS: Final = frozenset(
    (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"PRI ")
)
_HTTP_TEXT: Final = b"this is Runnel's native listener; HTTP is usually at 7480\n"
_HTTP_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
    % (len(_HTTP_TEXT), _HTTP_TEXT)
)


def answer_to_http(beginning: memoryview) -> bytes | None:
    """The HTTP answer to a connection with this beginning; None if it is not HTTP."""
    return _HTTP_ANSWER if bytes(beginning[:4]) in _HTTP_BEGINNINGS else None


def checked_hello(request: wire.Request, tail: memoryview) -> wire.Hello:
    """The first request of a connection, if it is a valid hello; otherwise HandshakeError."""
    if not isinstance(request, wire.Hello):
        raise HandshakeError(f"the first frame must be hello; this one is {name_of(request)!r}")
    check_no_tail(request, tail)
    if request.version != wire.VERSION:
        raise HandshakeError(
            f"the client speaks version {request.version} of the native protocol; "
            f"this broker speaks version {wire.VERSION}"
        )
    return request


def scope_of(hello: wire.Hello) -> Scope:
    """For how much of a cluster the client wants to be answered."""
    if wire.PART_ONLY in hello.features:
        return Scope.NODE
    return Scope.PARTS if wire.PARTS in hello.features else Scope.CLUSTER


def welcome_to(hello: wire.Hello, settings: Settings, nodes: ClusterNodes) -> wire.Welcome:
    features: tuple[str, ...] = ()
    if nodes.is_several:
        features = (wire.NODES, *(each for each in _FEATURES if each in hello.features))
    return wire.Welcome(
        hello.id,
        wire.VERSION,
        features,
        settings.cluster.name,
        settings.cluster.node,
        _server_name(),
        settings.native.frame_bytes_max,
        settings.limits.batch_bytes_max,
        settings.limits.message_bytes_max,
        settings.native.idle_timeout_ns // _NS_PER_MS,
    )


@cache
def _server_name() -> str:
    return f"runnel/{metadata.version('runnel')}"
