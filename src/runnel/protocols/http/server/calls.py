"""One request of somebody who was let in: what it may do, and how long it may last."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from runnel.broker.access import Access
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.errors import ConnectionLostError, RunnelError
from runnel.protocols.http.server.connection import HttpConnection
from runnel.protocols.http.server.http_server import HttpServer
from runnel.security.authenticator import AuthenticatedClient
from runnel.security.rights import Rights

if TYPE_CHECKING:
    from litestar import Request

_T = TypeVar("_T")

CALL: Final = "runnel.call"  # its key in a request's scope


def call_of(request: Request[Any, Any, Any]) -> HttpCall:
    """The call that a handler serves."""
    return cast("HttpCall", request.scope[CALL])  # type: ignore[typeddict-item]


class HttpCall:
    """An admitted request, as long as it is under way. Handlers reach the broker through `access` alone."""

    __slots__ = ("_ended", "_pass", "access", "connection", "headers", "server", "why_ended")

    def __init__(
        self,
        server: HttpServer,
        connection: HttpConnection,
        admitted: AuthenticatedClient,
        headers: Mapping[bytes, bytes],
    ) -> None:
        self.server = server
        self.connection = connection
        self.access = Access(server.broker, admitted.rights, connection.peer)
        self.headers = headers
        """By name in lower case; the last of several, as they came."""
        self.why_ended: RunnelError | None = None
        self._pass = admitted
        self._ended: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """The token's, for people; empty where nobody has to show one."""
        return self._pass.name

    @property
    def rights(self) -> Rights | None:
        """The token's; None where nobody has to show one, and everybody may do everything."""
        return self._pass.rights

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def flow(self) -> Flow:
        """What the connection has moved, for handlers to add to."""
        return self.connection.flow_of_messages

    # --- Its end ---

    @property
    def ended(self) -> asyncio.Event:
        """Set when it has to end: the listener closes, the token was revoked, or the client has gone.

        `why_ended` says which. Only calls that last ask for it.
        """
        if self._ended is None:
            self._ended = asyncio.Event()
            self._pass.on_revoked(self.end)
            self.connection.on_lost = self._on_lost
            self.server.watch(self)
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

    def check_going_on(self) -> None:
        """Raise why it has to end, if it has to. Only of calls that asked for `ended`."""
        if self.why_ended is not None:
            raise self.why_ended

    def check_admitted(self) -> None:
        """Raise why, if the token is no longer good: what took a while to arrive may be too late."""
        why = self._pass.why_over
        if why is not None:
            raise why

    async def unless_ended(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of something that may take long; it is given up, and the reason raised, when the call ends.

        What was ready in the same moment is given all the same, unless the token is no longer good.
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
                working.exception()  # it has been seen, whether it is raised or not

    async def read(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a read. One that the token's rate holds back is given up when the call ends."""
        return await (self.unless_ended(work) if self.access.is_slowed_out else work)

    def leave(self) -> None:
        """It is over."""
        self._pass.leave()
        if self._ended is not None:
            self.server.forget(self)
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
