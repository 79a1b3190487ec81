"""What every request passes first: counted, kept from other people's web pages, given its path, asked for its token.

Where nobody is asked for a token, a web page in somebody's browser must not be the way in: neither from another site
(the browser then sends `Origin`), nor, at a door for this machine alone, by a name of the page's own that leads here
(DNS rebinding: the browser then sends that name as `Host`). With tokens neither can do anything: a page has
none to show.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from litestar.types import ASGIApp, Receive, Scope, Send

from runnel.doors.http.answers import Answer
from runnel.doors.http.calls import CALL, Call
from runnel.doors.http.connection import AUTHORITY, CONNECTION, Connection
from runnel.doors.http.door import HttpDoor
from runnel.doors.http.paths import routed_path
from runnel.doors.http.problems import (
    PROBLEM_TYPE,
    NotTakenError,
    problem_bytes,
    problem_of,
)
from runnel.errors import ClientFault, ForbiddenError, RunnelError, UnauthenticatedError
from runnel.security.gate import Pass
from runnel.world.addresses import parse_address
from runnel.world.diagnostics import get_logger

logger = get_logger("runnel.http")

# For everybody: whether it lives, and what it can do.
_OPEN_PATHS: Final = frozenset(("/healthz", "/readyz", "/openapi.json", "/docs"))
# Of these there is one, or none: with several, nobody knows which one others go by.
_SINGLE: Final = (b"host", b"transfer-encoding", b"authorization")
# A browser's EventSource sends no headers of ours: there a token may stand in the query, for want of a better place.
_STREAM_PATH: Final = "/v1/stream"
_QUERY_TOKEN: Final = "access_token"

_NOBODY: Final = Pass(None, None)
_SHOWN_CHARS_MAX: Final = 100


class _AmbiguousError(ClientFault):
    """A head that others may read otherwise, a proxy before the broker for one: nothing after it is heard."""


class Front:
    """The ASGI application that connections run; `app` is behind it."""

    def __init__(self, door: HttpDoor, app: ASGIApp) -> None:
        self._door = door
        self._app = app
        self._counters = door.broker.metrics.counters
        http = door.settings.http
        self._is_for_this_machine = not door.gate.asks and not http.allow_remote
        # Hosts that have been found to be ours, as clients spell them.
        self._own_hosts: set[bytes] = set()
        self._own_name = parse_address(http.listen or "", key="http.listen")[0].lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = cast("Connection", scope[CONNECTION])  # type: ignore[typeddict-item]
        self._counters.requests += 1
        try:
            fields = cast("Sequence[tuple[bytes, bytes]]", scope["headers"])
            headers = dict(fields)
            path = scope["path"] = routed_path(scope["raw_path"])
            if len(headers) < len(fields):
                _check_single(fields)
            self._check(scope, headers)
            if path in _OPEN_PATHS:
                admitted = _NOBODY
            else:
                admitted = self._door.gate.admit(_token(scope, path, headers))
        except RunnelError as error:
            if isinstance(error, UnauthenticatedError):
                await self._door.gate.penalty(error, connection.peer_host)
            is_last = isinstance(error, _AmbiguousError)
            await problem_answer(error, connection, is_last=is_last)(scope, receive, send)
            return
        with Call(self._door, connection, admitted, headers) as call:
            connection.token_name = call.name
            connection.agent = headers.get(b"user-agent", b"")
            scope[CALL] = call  # type: ignore[typeddict-unknown-key]
            try:
                await self._app(scope, receive, send)
            except Exception:  # the boundary of a request
                # Litestar answers whatever fails before an answer has begun; the rest cannot be told any more.
                if not connection.transport.is_closing():
                    logger.exception("an answer broke off", peer=connection.peer, path=path)
                connection.transport.abort()

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what no resource takes."""
        transfer = headers.get(b"transfer-encoding")
        if transfer is not None and transfer.lower() != b"chunked":
            raise _AmbiguousError(
                f"transfer-encoding {_shown(transfer)}: bodies come as they are, or chunked"
            )
        encoding = headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise NotTakenError(
                f"content-encoding {_shown(encoding)}: bodies are taken as they are, not compressed"
            )
        if self._door.gate.asks:
            return
        host = headers.get(b"host", b"")
        authority = cast("bytes | None", scope.get(AUTHORITY))
        if authority is not None and authority.lower() != host.lower():
            raise _AmbiguousError(
                f"the target is of the host {_shown(authority)}, and host is {_shown(host)}"
            )
        if self._is_for_this_machine and host not in self._own_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None and not _is_same_site(origin, host):
            raise ForbiddenError(
                f"origin {_shown(origin)} is another site than {_shown(host)}: without tokens, pages of other sites "
                "may not use the broker"
            )

    def _check_host(self, host: bytes) -> None:
        try:
            name = (urlsplit(b"//" + host).hostname or b"").decode("ascii").lower()
        except (ValueError, UnicodeDecodeError):
            raise ClientFault(f"host {_shown(host)} is not a host") from None
        if name not in (self._own_name, "localhost") and not name.endswith(".localhost"):
            try:
                ipaddress.ip_address(name.partition("%")[0])  # a page's own name is no address
            except ValueError:
                raise ForbiddenError(
                    f"host {_shown(host)} is not this machine's: without tokens the broker answers to localhost, to "
                    "IP addresses and to the name in http.listen, so that no web page comes in by a name of its own"
                ) from None
        if len(self._own_hosts) < 100:
            self._own_hosts.add(host)


def problem_answer(
    error: BaseException, connection: Connection, *, is_last: bool = False
) -> Answer:
    """The answer to a request that failed; it is counted. `is_last`: of this connection."""
    connection.door.broker.metrics.counters.requests_failed += 1
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
    """The token that a request shows. One in the query is taken out of it: whoever looks at it later sees none."""
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


def _is_same_site(origin: bytes, host: bytes) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _shown(value: bytes) -> str:
    return repr(value[:_SHOWN_CHARS_MAX].decode("latin-1"))
