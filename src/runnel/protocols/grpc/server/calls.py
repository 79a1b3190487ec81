"""One gRPC call: its client, its rights, its tasks, and its end when the listener closes or the token is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

from runnel.broker.access import Access
from runnel.broker.broker import ConnectionStats
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.errors import MalformedError, RunnelError, TimeoutExpiredError
from runnel.formats.traces import TRACEPARENT, TRACESTATE
from runnel.platform.diagnostics import get_logger
from runnel.protocols.grpc.server.grpc_server import GrpcServer
from runnel.security.authenticator import AuthenticatedClient

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

T = TypeVar("T")

logger = get_logger("runnel.grpc")

_CLIENT_CHARACTERS_MAX: Final = 200


class GrpcCall:
    """One admitted call. It is made within the call's own task."""

    __slots__ = (
        "_authenticated",
        "_beginning",
        "_is_over",
        "_on_closing",
        "_since_ns",
        "_task",
        "access",
        "client",
        "context",
        "end",
        "flow",
        "id",
        "peer",
        "queued_bytes",
        "server",
        "subscriptions",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        server: GrpcServer,
        context: Context,
        peer: str,
        call_id: int,
        authenticated: AuthenticatedClient,
    ) -> None:
        self.server: Final = server
        self.context: Final = context
        self.peer: Final = peer
        self.id: Final = call_id
        self.access: Final[Access] = server.make_access(authenticated, peer)
        metadata = dict(_text_metadata(context))
        self.client: Final = metadata.get("user-agent", "")[:_CLIENT_CHARACTERS_MAX]
        self.traceparent: Final = metadata.get(TRACEPARENT)
        self.tracestate: Final = metadata.get(TRACESTATE)
        self.end: BaseException | None = None
        """Why the broker ends the call, once it does."""
        self._on_closing: Callable[[], object] | None = None
        # The traffic of a stream, for the metrics.
        self.flow: Final = Flow()
        self.subscriptions = 0
        self.queued_bytes: Callable[[], int] | None = None
        self._since_ns = server.broker.clock.time_ns()
        self._beginning: asyncio.Task[None] | None = None
        self._is_over = False
        self._authenticated = authenticated
        task = asyncio.current_task()
        assert task is not None
        self._task: Final = task
        authenticated.on_revoked(self.finish_with)

    @property
    def is_stream(self) -> bool:
        return self.queued_bytes is not None

    def finish_with(self, error: BaseException) -> None:
        """End the call at once: its task is cancelled, and the client gets this error."""
        if self.end is None and not self._is_over:
            self.end = error
            self._task.cancel()

    async def begin_stream(self) -> None:
        """Send the initial metadata before any response.

        grpcio would send it with the first write, but a call that is cancelled during that write cannot be refused.
        """
        self._beginning = self.server.tasks.start_awaited(_begin(self.context))
        await self.uninterrupted(self._beginning)

    async def wait_begun(self) -> None:
        if self._beginning is not None:
            await asyncio.wait({self._beginning})

    def uncancel(self) -> None:
        """Clear the cancellation once the call's end is handled, so that its task may wait again."""
        self._task.uncancel()

    def when_closing(self, react: Callable[[], object]) -> None:
        """Call `react`, once, when the broker begins to shut down. A call without a reaction may finish."""
        self._on_closing = react
        if self.server.is_closing:
            self.closing()

    def closing(self) -> None:
        """React to the broker's shutdown."""
        react, self._on_closing = self._on_closing, None
        if react is not None:
            react()

    def log_bug(self, error: BaseException) -> None:
        """Log a bug of the broker. It ends only this call."""
        logger.error("a call failed", peer=self.peer, exc_info=error)

    def leave(self) -> None:
        self._is_over = True
        self._on_closing = None
        self._authenticated.leave()
        self.server.remove(self)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of this call. If it fails, the call ends with its error."""
        task = self.server.tasks.start_awaited(work)
        task.add_done_callback(self._on_ended)
        return task

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.finish_with(error)

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that changes something, to its end, even if the client leaves meanwhile."""
        return await self.uninterrupted(self.server.tasks.start_awaited(work))

    async def uninterrupted(self, future: asyncio.Future[T]) -> T:
        """Wait for a future without cancelling it when the client leaves."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._on_abandoned)
            raise

    def _on_abandoned(self, future: asyncio.Future[Any]) -> None:
        """Log a bug in work whose client has left. All other outcomes are of no interest."""
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, RunnelError | grpc.aio.InternalError):
            self.log_bug(error)

    def row(self) -> ConnectionStats:
        """The call as the metrics show it."""
        return ConnectionStats(
            self.id,
            "grpc",
            self.peer,
            self.client,
            self._since_ns,
            self.subscriptions,
            0 if self.queued_bytes is None else self.queued_bytes(),
            self.flow,
            self._authenticated.name,
        )


async def _begin(context: Context) -> None:
    await context.send_initial_metadata(())


async def single_request(context: Context, *, seconds_max: float) -> Any:
    """The request of a method that takes one request."""
    try:
        async with asyncio.timeout(seconds_max):
            request = await context.read()
    except TimeoutError:
        raise TimeoutExpiredError(
            f"the request did not come whole within {seconds_max:g} seconds"
        ) from None
    if request is grpc.aio.EOF:
        raise MalformedError("the call", "it has no request; this method takes one")
    return request


def token_of(context: Context) -> str | None:
    """The text after `Bearer` in the metadata `authorization`."""
    for name, value in _text_metadata(context):
        if name == "authorization":
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def peer_of(context: Context) -> str:
    """`127.0.0.1:5000` or `[::1]:5000`, of `ipv4:127.0.0.1:5000` and `ipv6:%5B::1%5D:5000`."""
    _, _, address = str(context.peer()).partition(":")
    return address.replace("%5B", "[").replace("%5D", "]").replace("%25", "%")


def _text_metadata(context: Context) -> Iterator[tuple[str, str]]:
    """The metadata whose values are text. Names that end in -bin have bytes, which are not used here."""
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield name, value
