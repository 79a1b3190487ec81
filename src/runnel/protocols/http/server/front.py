"""The first step of every request: it is counted, its browser headers, path and token are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast
from urllib.parse import parse_qsl, urlencode

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from runnel.errors import ClientFault, RunnelError, UnauthenticatedError
from runnel.platform.diagnostics import get_logger
from runnel.protocols.http.encoding.problems import (
    PROBLEM_TYPE,
    NotTakenError,
    problem_bytes,
    problem_of,
)
from runnel.protocols.http.server.answers import Answer, add_fields
from runnel.protocols.http.server.browsers import (
    BrowserPolicy,
    is_preflight,
    preflight_fields,
    shown,
)
from runnel.protocols.http.server.calls import CALL, HttpCall
from runnel.protocols.http.server.connection import AUTHORITY, CONNECTION, HttpConnection
from runnel.protocols.http.server.http_server import HttpServer
from runnel.protocols.http.server.paths import routed_path
from runnel.security.authenticator import AuthenticatedClient

logger = get_logger("runnel.http")

# These need no token: health and documentation.
_OPEN_PATHS: Final = frozenset(("/", "/healthz", "/readyz", "/openapi.json", "/docs"))
# Headers that may be given only once: of several, a proxy may use another one than the broker.
_SINGLE: Final = (
    b"host",
    b"transfer-encoding",
    b"authorization",
    b"origin",
    b"sec-fetch-site",
    b"sec-fetch-mode",
)
# A browser's EventSource cannot send an authorization header, so the query of a stream may contain the token.
_STREAM_PATH: Final = "/v1/stream"
_QUERY_TOKEN: Final = "access_token"

_ANONYMOUS: Final = AuthenticatedClient(None, None)


class _AmbiguousError(ClientFault):
    """A head that a proxy before the broker may read differently. The connection is closed after the answer."""


class Front:
    """The ASGI application that connections run. It passes authenticated requests to `app`."""

    def __init__(self, server: HttpServer, app: ASGIApp, browsers: BrowserPolicy) -> None:
        self._server = server
        self._app = app
        self._counters = server.broker.metrics.counters
        self._browsers = browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = cast("HttpConnection", scope[CONNECTION])  # type: ignore[typeddict-item]
        self._counters.requests += 1
        try:
            fields = cast("Sequence[tuple[bytes, bytes]]", scope["headers"])
            headers = dict(fields)
            method = cast("HTTPScope", scope)["method"]
            if b"origin" in headers and (cors := self._browsers.cors_fields(headers[b"origin"])):
                add_fields(scope, cors)
                if is_preflight(method, headers):
                    answer = Answer(status=204, headers=preflight_fields(headers))
                    await answer(scope, receive, send)
                    return
            path = scope["path"] = routed_path(scope["raw_path"])
            if len(headers) < len(fields):
                _check_single(fields)
            self._check(scope, method, headers)
            if path in _OPEN_PATHS:
                admitted = _ANONYMOUS
            else:
                admitted = self._server.authenticator.admit(_token(scope, path, headers))
        except RunnelError as error:
            if isinstance(error, UnauthenticatedError):
                await self._server.authenticator.penalty(error, connection.peer_host)
            is_last = isinstance(error, _AmbiguousError)
            await problem_answer(error, connection, is_last=is_last)(scope, receive, send)
            return
        with HttpCall(self._server, connection, admitted, headers) as call:
            connection.token_name = call.name
            connection.agent = headers.get(b"user-agent", b"")
            scope[CALL] = call  # type: ignore[typeddict-unknown-key]
            try:
                await self._app(scope, receive, send)
            except Exception:  # the boundary of a request
                # Litestar answers failures before an answer has begun. Later ones cannot be reported to the client.
                if not connection.transport.is_closing():
                    logger.exception(
                        "an answer was aborted by an error", peer=connection.peer, path=path
                    )
                connection.transport.abort()

    def _check(self, scope: Scope, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse encodings that no resource takes, ambiguous hosts, and what the browser policy forbids."""
        transfer = headers.get(b"transfer-encoding")
        if transfer is not None and transfer.lower() != b"chunked":
            raise _AmbiguousError(
                f"transfer-encoding {shown(transfer)}: bodies come as they are, or chunked"
            )
        encoding = headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise NotTakenError(
                f"content-encoding {shown(encoding)}: bodies are taken as they are, not compressed"
            )
        if self._server.authenticator.asks:
            return
        authority = cast("bytes | None", scope.get(AUTHORITY))
        host = headers.get(b"host", b"")
        if authority is not None and authority.lower() != host.lower():
            raise _AmbiguousError(
                f"the target is of the host {shown(authority)}, and host is {shown(host)}"
            )
        self._browsers.check(method, headers)


def problem_answer(
    error: BaseException, connection: HttpConnection, *, is_last: bool = False
) -> Answer:
    """The answer to a failed request, which is counted. `is_last`: the connection is closed after it."""
    connection.http_server.broker.metrics.counters.requests_failed += 1
    problem, headers = problem_of(error)
    if is_last:
        headers = (*headers, ("connection", "close"))
    return Answer(
        problem_bytes(problem), status=problem.status, content_type=PROBLEM_TYPE, headers=headers
    )


def _check_single(fields: Sequence[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in fields]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise _AmbiguousError(f"{name.decode()} is given {names.count(name)} times")


def _token(scope: Scope, path: str, headers: Mapping[bytes, bytes]) -> str | None:
    """The token of a request. A token in the query is removed from it, so that nothing logs or checks it later."""
    given = headers.get(b"authorization")
    if path == _STREAM_PATH and _QUERY_TOKEN.encode() in scope["query_string"]:
        parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        rest = [(name, value) for name, value in parameters if name != _QUERY_TOKEN]
        scope["query_string"] = urlencode(rest).encode()
        if given is None:
            return dict(parameters).get(_QUERY_TOKEN)
    if given is None:
        return None
    scheme, _, token = given.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("authorization: what is needed is `Bearer runnel_…`, a token")
    return token.strip()
