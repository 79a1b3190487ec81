"""The link to one address: connects, says hello, and connects again whenever the connection is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl as tls
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

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
# What OpenSSL calls an answer that is no TLS at all.
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
# How it says that nobody it trusts has signed a certificate: of an authority that is missing, or by itself.
_NOT_TRUSTED: Final = frozenset((2, 18, 19, 20, 21))

# A connection that the broker refuses so is not tried again: the answer would be the same.
_FINAL: Final = (HandshakeError, UnauthenticatedError)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of itself in its hello."""

    client: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"<Identity {self.client!r}>"  # a token is shown to nobody but the broker


class LinkListener(Protocol):
    """Works over a link: is told when it can, and when it cannot."""

    def link_up(self) -> None: ...

    def link_down(self) -> None: ...

    def link_writable(self) -> None: ...


def backoff_s(attempt: int) -> float:
    """Exponential with full jitter: a thousand clients of a broker that comes back do not come at once."""
    return random.uniform(0, min(_BACKOFF_MOST_S, _BACKOFF_FIRST_S * 2.0 ** min(attempt, 16)))


class Link:
    """One address and, most of the time, a connection to it."""

    def __init__(
        self,
        address: str,
        dial: Dial,
        identity: Identity,
        timers: Timers,
        *,
        connect_timeout_s: float,
        advice: str = "",
    ) -> None:
        self.address: Final = address
        self.connection: BrokerConnection | None = None
        self.welcome: wire.Welcome | None = None
        self.listeners: Final[dict[LinkListener, None]] = {}
        self._dial = dial
        self._identity = identity
        self._timers = timers
        self._connect_timeout_s = connect_timeout_s
        self._advice = advice
        self._numbers = itertools.count(1)
        self._attempts = 0
        self._problem: Exception | None = None
        self._failure: RunnelError | None = None  # for good: trying again cannot help
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<Link {self.state}>"

    @property
    def failure(self) -> RunnelError | None:
        """Why there will be no connection any more, whatever is tried: nobody need wait for one."""
        return None if self._failure is None or self._failure.retriable else self._failure

    @property
    def is_ended(self) -> bool:
        """Whether it was closed, or refused for good."""
        return self._failure is not None

    @property
    def state(self) -> str:
        """For error messages: "not connected to 127.0.0.1:7470: connection refused, tried 5 times"."""
        if self._failure is not None:
            return f"not connected to {self.address}: {self._failure}"
        if self.connection is not None:
            return f"connected to {self.address}"
        tried = f", tried {self._attempts} times" if self._attempts > 1 else ""
        return f"not connected to {self.address}: {_told(self._problem)}{tried}"

    def next_number(self) -> int:
        """An id for a request."""
        return next(self._numbers)

    # --- Connecting ---

    async def connect(self) -> None:
        """The first connection, tried once, or again while the broker is full. From then on it is kept up."""
        try:
            connection = await self._open_with_patience()
        except _FINAL:
            raise
        except TimeoutExpiredError as error:
            raise TimeoutExpiredError(self._not_reached(error)) from None
        except (OSError, RunnelError) as error:
            raise Unavailable(self._not_reached(error)) from error
        self._take_up(connection)
        self.keep_connected()

    async def _open_with_patience(self) -> BrokerConnection:
        deadline = Deadline(self._timers, self._connect_timeout_s)
        attempt = 0
        while True:
            try:
                return await self._open()
            except BusyError:
                attempt += 1
                pause_s = backoff_s(attempt)
                if pause_s >= deadline.left_s:
                    raise
            await sleep(self._timers, pause_s)

    def keep_connected(self) -> None:
        """Connect in the background, again and again, until the link is closed."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(
                self._keep_connected(), name=f"runnel link to {self.address}"
            )

    def _not_reached(self, error: Exception) -> str:
        is_nobody_there = isinstance(error, OSError) and not isinstance(error, tls.SSLError)
        advice = self._advice if is_nobody_there else ""
        if isinstance(error, tls.SSLCertVerificationError) and error.verify_code in _NOT_TRUSTED:
            advice = (
                "; `?ca=FILE` in the URL names the certificate of a private authority, or a broker's own: "
                f"runnels://{self.address}?ca=cert.pem"
            )
        return f"cannot connect to {self.address}: {_told(error)}{advice}"

    async def _keep_connected(self) -> None:
        while self._failure is None:
            if self.connection is not None:
                await asyncio.wait((self.connection.closed,))
                continue
            if self._attempts:
                await sleep(self._timers, backoff_s(self._attempts))
            self._attempts += 1
            try:
                connection = await self._open()
            except _FINAL as error:
                self._fail(error)
            except (OSError, RunnelError) as error:
                self._problem = error
            else:
                self._take_up(connection)

    async def _open(self) -> BrokerConnection:
        connection = BrokerConnection(self.address, self._timers, self)
        greeted: asyncio.Future[tuple[wire.Welcome, memoryview]]
        greeted = asyncio.get_running_loop().create_future()
        deadline = Deadline(self._timers, self._connect_timeout_s)
        dialling = asyncio.ensure_future(self._dial(lambda: connection))
        try:
            await deadline.wait(_followed(dialling), self._not_answered)
            number = self.next_number()
            identity = self._identity
            hello = wire.Hello(number, wire.VERSION, (), identity.client, identity.token)
            connection.request(number, hello, _settles(greeted, wire.Welcome))
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
                # A port with TLS does that to whoever does not begin with it.
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

    def _take_up(self, connection: BrokerConnection) -> None:
        if not connection.is_open or self.welcome is None:
            return  # lost in the same breath
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

    def connection_lost(self, connection: BrokerConnection, error: ConnectionLostError) -> None:
        self._problem = error
        if connection is self.connection:
            self.connection = None
            if isinstance(connection.final_error, _FINAL):
                self._fail(connection.final_error)  # a token that was revoked, for one
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
        """Say nothing more, and be gone soon whether or not the broker listens."""
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
        """Close without waiting, for an owner that was forgotten."""
        self._fail(ClosedError("this client has been closed"))
        if self._keeper is not None:
            self._keeper.cancel()
        if self.connection is not None:
            self.connection.abort("this client was forgotten")

    # --- Asking ---

    async def wait_connected(
        self, deadline: Deadline, what: str, refusal: RunnelError | None = None
    ) -> BrokerConnection:
        """The connection, or an error that says what waited for it in vain, and why."""
        while True:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self.connection is not None:
                return self.connection
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await deadline.wait(waiter, lambda: self.expired(what, deadline, refusal))
            finally:
                self._waiting.discard(waiter)

    def expired(
        self, what: str, deadline: Deadline, refusal: RunnelError | None = None
    ) -> TimeoutExpiredError:
        """What came of it in time: nothing, or the refusal that led to the last try."""
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
    ) -> tuple[_Wanted, memoryview]:
        """The answer, of the kind expected, and its tail.

        While the deadline allows, a request waits for the link, and is made again if the broker cannot do it now
        (then nothing was done); one that is repeatable also if the connection was lost under it.
        """
        attempt = losses = 0
        refusal: RunnelError | None = None
        while True:
            connection = await self.wait_connected(deadline, what, refusal)
            number = self.next_number()
            answered: asyncio.Future[tuple[_Wanted, memoryview]]
            answered = asyncio.get_running_loop().create_future()
            on_answer = _settles(answered, kind)
            connection.request(number, make(number), on_answer, tail, sum(map(len, tail)))
            try:
                return await deadline.wait(
                    answered,
                    lambda: self.expired(what, deadline, refusal),  # noqa: B023 - called within
                )
            except ConnectionLostError as error:
                if not is_repeatable:
                    raise _unsure(what, error) from None
                if losses:  # should it be this request that ends connections, it must not do so all the time
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
        """Send what is not answered, if there is a connection; otherwise it has lost its meaning."""
        if self.connection is not None:
            size = sum(map(len, tail))
            encoded = wire.encode(head, size)
            self.connection.check_size(len(encoded) + size)
            self.connection.send(encoded, tail, size)


class ConnectionWatch:
    """Tells of each loss of a link's connection, and of its return. That this client closed it is no loss."""

    def __init__(self, link: Link, on_change: Callable[[bool, str], object]) -> None:
        self._link = link
        self._on_change = on_change

    def link_up(self) -> None:
        self._on_change(True, self._link.state)  # noqa: FBT003 - as the callback is documented

    def link_down(self) -> None:
        if not self._link.is_ended:
            self._on_change(False, self._link.state)  # noqa: FBT003

    def link_writable(self) -> None:
        """Nothing is written here."""


async def _give_up(
    connection: BrokerConnection, dialling: asyncio.Future[asyncio.BaseTransport]
) -> None:
    """Leave nothing behind of a connection that is being made, however far that has come."""
    try:
        # First: uvloop does not tell a protocol of its end if the dial is cancelled after the connection was made.
        await connection.wait_aborted("it was given up while it was being made")
    finally:
        dialling.cancel()
    await asyncio.wait((dialling,))
    await asyncio.sleep(0)  # a transport that the dial has just closed is gone in the next turn


def _unsure(what: str, error: ConnectionLostError) -> ConnectionLostError:
    return ConnectionLostError(f"{what}: {error}; it may have been done or not")


def _told(error: Exception | None) -> str:
    if error is None:
        return "not yet tried"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, tls.SSLError) and error.reason in _NOT_TLS:
        return "what answers there does not speak TLS; try runnel:// in place of runnels://"
    if isinstance(error, tls.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _followed(task: asyncio.Future[asyncio.BaseTransport]) -> asyncio.Future[None]:
    """A future of our own that ends as the task does."""
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


def _settles(future: asyncio.Future[tuple[_Wanted, memoryview]], kind: type[_Wanted]) -> OnAnswer:
    def settle(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
        if future.done():
            return
        if isinstance(answer, kind):
            future.set_result((answer, tail))
        else:
            future.set_exception(_not_expected(answer, kind))

    return settle


def _not_expected(answer: wire.Answer | RunnelError, kind: type[wire.Head]) -> RunnelError:
    if isinstance(answer, RunnelError):
        return answer
    return MalformedError(
        "answer", f"{type(answer).__name__} where {kind.__name__} must come: {answer!r:.200}"
    )
