"""The link to one address: connects, sends the hello, and reconnects whenever the connection is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl as tls
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from runnel.client.connection.connection import BrokerConnection, Buffer, OnAnswer
from runnel.client.connection.timers import Deadline, Timers, sleep
from runnel.errors import (
    BusyError,
    ClosedError,
    ConnectionLostError,
    HandshakeError,
    MalformedError,
    MovedError,
    RunnelError,
    TimeoutExpiredError,
    UnauthenticatedError,
    Unavailable,
)
from runnel.formats import wire

Dial: TypeAlias = Callable[
    [Callable[[], asyncio.BufferedProtocol]], Awaitable[asyncio.BaseTransport]
]
_Wanted = TypeVar("_Wanted", bound=wire.Head)

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MOST_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 2.0
# OpenSSL's reasons for an answer that is not TLS.
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
# OpenSSL's codes for a certificate that no trusted authority has signed: its authority is missing, or it is
# self-signed.
_NOT_TRUSTED: Final = frozenset((2, 18, 19, 20, 21))

# Refusals after which the link does not try again: the answer would be the same.
_FINAL: Final = (HandshakeError, UnauthenticatedError)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The client's name, token and features, for its hello."""

    client: str
    token: str | None = None
    features: Sequence[str] = (wire.PARTS,)

    def __repr__(self) -> str:
        return f"<Identity {self.client!r}>"  # never the token


class DialTarget(NamedTuple):
    """An address, and how to connect to it."""

    address: str
    dial: Dial


class UnreachableError(Exception):
    """The link is not connected. An impatient request raises it if nothing was done, or if it may be repeated."""


class LinkListener(Protocol):
    """Uses a link, and is called when it is connected, disconnected or writable again."""

    def link_up(self) -> None: ...

    def link_down(self) -> None: ...

    def link_writable(self) -> None: ...


def backoff_s(attempt: int) -> float:
    """Exponential with full jitter, so that a thousand clients do not reconnect to a restarted broker at once."""
    return random.uniform(0, min(_BACKOFF_MOST_S, _BACKOFF_FIRST_S * 2.0 ** min(attempt, 16)))


class Link:
    """One address, and the connection to it while there is one. With several endpoints, it uses one after the other."""

    def __init__(
        self,
        address: str,
        dial: Dial,
        identity: Identity,
        timers: Timers,
        *,
        connect_timeout_s: float,
        advice: str = "",
        others: Sequence[DialTarget] = (),
    ) -> None:
        self.endpoints: list[DialTarget] = [DialTarget(address, dial), *others]
        """Where a connection is tried, in their order. They may be replaced at any time."""
        self.address = address  # of the present connection, or the last attempt
        self.on_nodes: Callable[[wire.NodeList], None] | None = None
        self.connection: BrokerConnection | None = None
        self.welcome: wire.Welcome | None = None
        self.listeners: Final[dict[LinkListener, None]] = {}
        self._identity = identity
        self._timers = timers
        self._connect_timeout_s = connect_timeout_s
        self._advice = advice
        self._numbers = itertools.count(1)
        self._attempts = 0
        self._problem: Exception | None = None
        self._failure: RunnelError | None = None  # final: trying again cannot help
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}  # in their order, which publishes keep

    def __repr__(self) -> str:
        return f"<Link {self.state}>"

    @property
    def failure(self) -> RunnelError | None:
        """The error that rules out any further connection, so that waiting for one is pointless."""
        return None if self._failure is None or self._failure.retriable else self._failure

    @property
    def is_ended(self) -> bool:
        """Whether the link was closed, or the broker refused it finally."""
        return self._failure is not None

    @property
    def state(self) -> str:
        """For error messages: "not connected to 127.0.0.1:7470: connection refused, tried 5 times"."""
        if self._failure is not None:
            return f"not connected to {self.address}: {self._failure}"
        if self.connection is not None:
            return f"connected to {self.address}"
        tried = f", tried {self._attempts} times" if self._attempts > 1 else ""
        others = len(self.endpoints) - 1
        beside = f" and {others} more" if others else ""
        return f"not connected to {self.address}{beside}: {_describe(self._problem)}{tried}"

    def next_number(self) -> int:
        """A new request id."""
        return next(self._numbers)

    # --- Connecting ---

    async def connect(self) -> None:
        """Make the first connection: one attempt, repeated only while the broker is full. Then keep it connected."""
        self._adopt(await self._open_first())
        self.keep_connected()

    async def _open_first(self) -> BrokerConnection:
        """A connection to the first endpoint that answers."""
        problems: list[str] = []
        errors: list[Exception] = []
        last = self.endpoints[-1]
        for endpoint in list(self.endpoints):
            self.address = endpoint.address
            try:
                return await self._open_with_patience(endpoint)
            except _FINAL:
                raise
            except (OSError, RunnelError) as error:
                advice = self._advice if endpoint is last else ""
                problems.append(self._not_reached(error, advice))
                errors.append(error)
        text = "; ".join(problems)
        if isinstance(errors[-1], TimeoutExpiredError):
            raise TimeoutExpiredError(text) from None
        raise Unavailable(text) from errors[-1]

    async def _open_with_patience(self, endpoint: DialTarget) -> BrokerConnection:
        deadline = Deadline(self._timers, self._connect_timeout_s)
        attempt = 0
        while True:
            try:
                return await self._open(endpoint)
            except BusyError:
                attempt += 1
                pause_s = backoff_s(attempt)
                if pause_s >= deadline.left_s:
                    raise
            await sleep(self._timers, pause_s)

    def keep_connected(self) -> None:
        """Connect in the background, and reconnect until the link is closed."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(
                self._keep_connected(), name=f"runnel link to {self.address}"
            )

    def _not_reached(self, error: Exception, advice: str) -> str:
        is_unreachable = isinstance(error, OSError) and not isinstance(error, tls.SSLError)
        advice = advice if is_unreachable else ""
        if isinstance(error, tls.SSLCertVerificationError) and error.verify_code in _NOT_TRUSTED:
            advice = (
                "; `?ca=FILE` in the URL names the certificate of a private authority, or a broker's own: "
                f"runnels://{self.address}?ca=cert.pem"
            )
        return f"cannot connect to {self.address}: {_describe(error)}{advice}"

    async def _keep_connected(self) -> None:
        while self._failure is None:
            if self.connection is not None:
                await asyncio.wait((self.connection.closed,))
                continue
            rounds, position = divmod(self._attempts, len(self.endpoints))
            if rounds and not position:
                await sleep(self._timers, backoff_s(rounds))
            self._attempts += 1
            endpoint = self._next_endpoint()
            self.address = endpoint.address
            try:
                connection = await self._open(endpoint)
            except _FINAL as error:
                if isinstance(error, HandshakeError) and len(self.endpoints) > 1:
                    self._failed(error)  # perhaps another program listens there now
                else:
                    self._fail(error)
            except (OSError, RunnelError) as error:
                self._failed(error)
            else:
                self._adopt(connection)

    def _next_endpoint(self) -> DialTarget:
        """The endpoint after the last one that was tried, or connected."""
        addresses = [endpoint.address for endpoint in self.endpoints]
        last = addresses.index(self.address) if self.address in addresses else -1
        is_first = self._problem is None  # nothing was tried yet
        return self.endpoints[max(0, last) if is_first else (last + 1) % len(self.endpoints)]

    def _failed(self, error: Exception) -> None:
        """An attempt has failed. Impatient requests wait no longer."""
        self._problem = error
        self._wake()

    async def _open(self, endpoint: DialTarget) -> BrokerConnection:
        connection = BrokerConnection(self.address, self._timers, self)
        greeted: asyncio.Future[tuple[wire.Welcome, memoryview]]
        greeted = asyncio.get_running_loop().create_future()
        deadline = Deadline(self._timers, self._connect_timeout_s)
        dialling = asyncio.ensure_future(endpoint.dial(lambda: connection))
        try:
            await deadline.wait(_follower_of(dialling), self._not_answered)
            number = self.next_number()
            identity = self._identity
            hello = wire.Hello(
                number, wire.VERSION, identity.features, identity.client, identity.token
            )
            connection.request(number, hello, _settler(greeted, wire.Welcome))
            welcome, _ = await deadline.wait(greeted, self._not_answered)
        except BaseException as error:
            await _give_up(connection, dialling)
            if isinstance(error, ConnectionLostError) and connection.other_listener is not None:
                raise HandshakeError(
                    f"cannot connect to {self.address}: this is {connection.other_listener}, not the native one, "
                    f"which usually listens on {wire.DEFAULT_PORT}"
                ) from None
            if isinstance(error, ConnectionLostError) and isinstance(
                connection.final_error, BusyError
            ):
                raise connection.final_error from None
            if isinstance(error, ConnectionLostError) and connection.was_closed_without_reason:
                # A TLS port closes a connection that does not begin with TLS.
                raise ConnectionLostError(
                    f"{error}, without an answer; does it speak TLS? Then try runnels://"
                ) from None
            raise
        if welcome.version != wire.VERSION:
            connection.abort("the broker speaks another version of the protocol")
            raise HandshakeError(
                f"{self.address} speaks version {welcome.version} of the protocol; "
                f"this client speaks version {wire.VERSION}"
            )
        self.welcome = welcome
        return connection

    def _not_answered(self) -> TimeoutExpiredError:
        return TimeoutExpiredError(f"no answer within {self._connect_timeout_s:g} s")

    def _adopt(self, connection: BrokerConnection) -> None:
        if not connection.is_open or self.welcome is None:
            return  # lost already
        self.connection = connection
        connection.frame_bytes_max = self.welcome.frame_bytes_max
        self._attempts = 0
        self._problem = None
        connection.keep_alive(self.welcome.idle_timeout_ms, self.next_number)
        self._wake()
        for listener in list(self.listeners):
            listener.link_up()

    def connection_writable(self) -> None:
        for listener in list(self.listeners):
            listener.link_writable()

    def nodes_changed(self, connection: BrokerConnection, nodes: wire.NodeList) -> None:
        if self.on_nodes is not None and connection is self.connection:
            self.on_nodes(nodes)

    def connection_lost(self, connection: BrokerConnection, error: ConnectionLostError) -> None:
        self._problem = error
        if connection is self.connection:
            self.connection = None
            if isinstance(connection.final_error, _FINAL):
                self._fail(connection.final_error)  # for example, a revoked token
                return
            for listener in list(self.listeners):
                listener.link_down()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, error: RunnelError) -> None:
        self._failure = error
        self._wake()
        for listener in list(self.listeners):
            listener.link_down()

    async def close(self) -> None:
        """Close the connection. The wait for it is short, even if the broker does not answer."""
        if self._failure is None:
            self._fail(ClosedError("this client has been closed"))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if connection := self.connection:
            connection.close()
            await asyncio.wait((connection.closed,), timeout=_CLOSE_TIMEOUT_S)
            connection.abort("this client closed it")

    def abandon(self) -> None:
        """Close without waiting, for a client that was never closed."""
        self._fail(ClosedError("this client has been closed"))
        if self._keeper is not None:
            self._keeper.cancel()
        if self.connection is not None:
            self.connection.abort("this client was forgotten")

    # --- Requests ---

    async def wait_connected(
        self,
        deadline: Deadline,
        what: str,
        refusal: RunnelError | None = None,
        *,
        is_patient: bool = True,
    ) -> BrokerConnection:
        """Wait for the connection. The error at the deadline names the request that waited, and the reason.

        Without patience, UnreachableError once an attempt to connect has failed.
        """
        while True:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self.connection is not None:
                return self.connection
            if not is_patient and self._problem is not None:
                raise UnreachableError(self.state)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await deadline.wait(waiter, lambda: self.expired(what, deadline, refusal))
            finally:
                self._waiting.pop(waiter, None)

    def expired(
        self, what: str, deadline: Deadline, refusal: RunnelError | None = None
    ) -> TimeoutExpiredError:
        """The error of a request that was not done in time, with the refusal before its last attempt."""
        refused = "" if refusal is None else f"; before, it was refused: {refusal}"
        error = TimeoutExpiredError(
            f"{what}: not done within {deadline.seconds:g} s; {self.state}{refused}"
        )
        error.__cause__ = refusal
        return error

    async def ask(
        self,
        kind: type[_Wanted],
        make: Callable[[int], wire.Head],
        *,
        deadline: Deadline,
        what: str,
        is_repeatable: bool = True,
        tail: Sequence[Buffer] = (),
        is_patient: bool = True,
    ) -> tuple[_Wanted, memoryview]:
        """Send a request; returns the answer, of the expected kind, and its tail.

        Until the deadline, the request waits for the connection, and is repeated if the broker cannot do it now
        (then nothing was done). A repeatable request is also repeated if the connection is lost before its answer.
        Without patience it is left to the caller to ask another node: UnreachableError.
        """
        attempt = losses = 0
        refusal: RunnelError | None = None
        while True:
            connection = await self.wait_connected(deadline, what, refusal, is_patient=is_patient)
            number = self.next_number()
            answered: asyncio.Future[tuple[_Wanted, memoryview]]
            answered = asyncio.get_running_loop().create_future()
            on_answer = _settler(answered, kind)
            connection.request(number, make(number), on_answer, tail, sum(map(len, tail)))
            try:
                return await deadline.wait(
                    answered,
                    lambda: self.expired(what, deadline, refusal),  # noqa: B023 - called within
                )
            except ConnectionLostError as error:
                if not is_repeatable:
                    raise _outcome_unknown(what, error) from None
                if not is_patient:
                    raise UnreachableError(self.state) from None
                if losses:  # this request may be what ends connections: slow it down
                    await sleep(self._timers, min(backoff_s(losses), max(0.0, deadline.left_s)))
                losses += 1
            except (MovedError, TimeoutExpiredError):
                raise
            except Unavailable as error:
                attempt += 1
                pause_s = backoff_s(attempt)
                if pause_s >= deadline.left_s or self._failure is not None:
                    raise
                refusal = error
                await sleep(self._timers, pause_s)

    def tell(self, head: wire.Head, tail: Sequence[Buffer] = ()) -> None:
        """Send a frame that has no answer. Without a connection it is dropped: it has lost its meaning."""
        if self.connection is not None:
            size = sum(map(len, tail))
            encoded = wire.encode(head, size)
            self.connection.check_size(len(encoded) + size)
            self.connection.send(encoded, tail, size)


class ConnectionWatch:
    """Calls `on_change` on each loss of a link's connection, and on its return. A close by this client is no loss."""

    def __init__(self, link: Link, on_change: Callable[[bool, str], object]) -> None:
        self._link = link
        self._on_change = on_change

    def link_up(self) -> None:
        self._on_change(True, self._link.state)  # noqa: FBT003 - as the callback is documented

    def link_down(self) -> None:
        if not self._link.is_ended:
            self._on_change(False, self._link.state)  # noqa: FBT003

    def link_writable(self) -> None:
        """Does nothing: this listener writes nothing."""


async def _give_up(
    connection: BrokerConnection, dialling: asyncio.Future[asyncio.BaseTransport]
) -> None:
    """Discard a connection that is being made, at any stage."""
    try:
        # First: if the dial is cancelled after the connection was made, uvloop does not call `connection_lost`.
        await connection.wait_aborted("it was given up while it was being made")
    finally:
        dialling.cancel()
    await asyncio.wait((dialling,))
    await asyncio.sleep(
        0
    )  # a transport that the dial has just closed ends in the next turn of the loop


def _outcome_unknown(what: str, error: ConnectionLostError) -> ConnectionLostError:
    return ConnectionLostError(f"{what}: {error}; it may have been done or not")


def _describe(error: Exception | None) -> str:
    if error is None:
        return "not yet tried"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, tls.SSLError) and error.reason in _NOT_TLS:
        return "what answers there does not speak TLS; try runnel:// in place of runnels://"
    if isinstance(error, tls.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _follower_of(task: asyncio.Future[asyncio.BaseTransport]) -> asyncio.Future[None]:
    """A new future that ends as the task does, and may be cancelled without it."""
    follower: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def follow(ended: asyncio.Future[asyncio.BaseTransport]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if follower.done():
            return
        if ended.cancelled():
            follower.cancel()
        elif error is not None:
            follower.set_exception(error)
        else:
            follower.set_result(None)

    task.add_done_callback(follow)
    return follower


def _settler(future: asyncio.Future[tuple[_Wanted, memoryview]], kind: type[_Wanted]) -> OnAnswer:
    def settle(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
        if future.done():
            return
        if isinstance(answer, kind):
            future.set_result((answer, tail))
        else:
            future.set_exception(_unexpected(answer, kind))

    return settle


def _unexpected(answer: wire.Answer | RunnelError, kind: type[wire.Head]) -> RunnelError:
    if isinstance(answer, RunnelError):
        return answer
    return MalformedError(
        "answer", f"{type(answer).__name__} where {kind.__name__} must come: {answer!r:.200}"
    )
