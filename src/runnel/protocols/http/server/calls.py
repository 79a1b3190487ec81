"""One authenticated request: what it may do, and when it has to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from runnel.broker.monitoring.topic_traffic import Flow
from runnel.errors import ConnectionLostError, RunnelError
from runnel.protocols.http.server.connection import HttpConnection
from runnel.protocols.http.server.http_server import HttpServer
from runnel.security.authenticator import AuthenticatedClient
from runnel.security.rights import Rights

if TYPE_CHECKING:
    from litestar import Request

_T = TypeVar("_T")

CALL: Final = "runnel.call"  # the call's key in a request's scope


def call_of(request: Request[Any, Any, Any]) -> HttpCall:
    """The call that a handler serves."""
    return cast("HttpCall", request.scope[CALL])  # type: ignore[typeddict-item]


class HttpCall:
    """An authenticated request while it is under way. Handlers use the broker through `access` only."""

    __slots__ = ("_client", "_ended", "access", "connection", "headers", "server", "why_ended")

    def __init__(
        self,
        server: HttpServer,
        connection: HttpConnection,
        admitted: AuthenticatedClient,
        headers: Mapping[bytes, bytes],
    ) -> None:
        self.server = server
        self.connection = connection
        self.access = server.make_access(admitted, connection.peer)
        self.headers = headers
        """By name in lower case; the last of several with the same name."""
        self.why_ended: RunnelError | None = None
        self._client = admitted
        self._ended: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """The token's name, for people; empty if the broker asks for no tokens."""
        return self._client.name

    @property
    def rights(self) -> Rights | None:
        """The token's rights; None if the broker asks for no tokens: then every request may do everything."""
        return self._client.rights

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def flow(self) -> Flow:
        """The connection's counts of messages and bytes, to which handlers add."""
        return self.connection.flow_of_messages

    # --- Ending ---

    @property
    def ended(self) -> asyncio.Event:
        """Set when the call has to end: the listener closes, the token was revoked, or the client has disconnected.

        `why_ended` says which. Only long calls use it.
        """
        if self._ended is None:
            self._ended = asyncio.Event()
            self._client.on_revoked(self.end)
            self.connection.on_lost = self._on_lost
            self.server.add_call(self)
            if self.connection.transport.is_closing():
                self._on_lost()
        return self._ended

    def end(self, error: RunnelError) -> None:
        if self.why_ended is None:
            self.why_ended = error
        if self._ended is not None:
            self._ended.set()

    def _on_lost(self) -> None:
        self.end(ConnectionLostError("the client has gone"))

    def check_not_ended(self) -> None:
        """Raise the reason if the call has to end. Only for calls that use `ended`."""
        if self.why_ended is not None:
            raise self.why_ended

    def check_admitted(self) -> None:
        """Raise the reason if the token is no longer valid: it may have been revoked while a body arrived."""
        why = self._client.why_over
        if why is not None:
            raise why

    async def unless_ended(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of work that may take long. When the call ends, the work is cancelled and the reason is raised.

        A result that is ready at the same moment is still returned, unless the token is no longer valid.
        """
        loop = self.server.loop
        working = loop.create_task(work)
        ending = loop.create_task(self.ended.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            self.check_admitted()
            if working.done():
                return working.result()
            assert self.why_ended is not None
            raise self.why_ended
        finally:
            working.cancel()
            ending.cancel()
            await asyncio.wait({working, ending})
            if not working.cancelled():
                working.exception()  # marks the exception as retrieved, even if it is not raised

    async def read(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a read. A read that is delayed by the token's rate is cancelled when the call ends."""
        return await (self.unless_ended(work) if self.access.is_slowed_out else work)

    def leave(self) -> None:
        """The call is over."""
        self._client.leave()
        if self._ended is not None:
            self.server.remove_call(self)
            self.connection.on_lost = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
