"""The common part of subscriptions and consumers, which are opened again after a lost connection.

Each sends its request when it begins and whenever the link comes up. It repeats requests that may succeed later, and
gives up when the broker has not accepted it for `deadline_s`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from runnel.client.connection import (
    BrokerConnection,
    Deadline,
    Handle,
    Link,
    Timers,
    backoff_s,
    warn_of_habits,
)
from runnel.errors import ConnectionLostError, MovedError, RunnelError, SlowReaderError
from runnel.formats import wire

# A retry cannot help these, even if they claim to be retriable.
_FINAL: Final = (SlowReaderError,)


class ReaderLinks(Protocol):
    """The nodes and the links to them, as readers use them: a client's `Router`."""

    @property
    def home(self) -> Link: ...
    @property
    def hinted(self) -> set[str]: ...
    @property
    def is_several(self) -> bool: ...
    @property
    def nodes(self) -> Sequence[wire.NodeState]: ...
    def node_addresses(self) -> Sequence[str]: ...
    def watch_nodes(self, on_change: Callable[[], object]) -> None: ...
    def unwatch_nodes(self, on_change: Callable[[], object]) -> None: ...
    def link(self, address: str) -> Link: ...
    def learn(self, routes: Sequence[object], link: Link) -> None:
        """Take routes that this link's node has sent."""


class ReconnectingReader(ABC):
    """Sends a request, and again after a lost connection. Subclasses define the request and handle its results."""

    def __init__(
        self,
        router: ReaderLinks,
        timers: Timers,
        *,
        what: str,
        deadline_s: float | None,
        patterns: Sequence[str] = (),
    ) -> None:
        self.patterns: Final = tuple(patterns)
        self._router = router
        self._timers = timers
        self._what = what  # for errors: "subscribing to a/*"
        self._deadline_s = deadline_s
        self._link: Link = router.home
        self._loop = asyncio.get_running_loop()
        self._is_begun = False
        self._is_attached = False  # the broker has accepted it over this connection
        self._was_attached = False  # the broker has accepted it at least once
        self._is_closed = False
        self._error: RunnelError | None = None
        self._refusals = 0
        self._retry: Handle | None = None
        self._give_up_timer: Handle | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    # --- For subclasses ---

    @abstractmethod
    def _ask(self, connection: BrokerConnection) -> None:
        """Send the request, unless it is under way. Its answer leads to `_accepted` or `_refused`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None:
        """Close without waiting, because the connection ends anyway."""

    @abstractmethod
    def link_writable(self) -> None: ...

    # --- Beginning and ending ---

    async def open(self) -> None:
        """Wait until the broker has accepted it."""
        self._begin()
        deadline = Deadline(self._timers, self._deadline_s)
        while not self._was_attached and self._error is None and not self._is_closed:
            await self._wait(deadline)
        if self._error is not None:
            await self.close()
            raise self._error
        if not self._is_closed:
            await warn_of_habits(self._router, self.patterns, deadline)

    def _begin(self) -> None:
        if not self._is_begun and not self._is_closed:
            self._is_begun = True
            self._link.listeners[self] = None
            self._attach()

    def _detach(self) -> None:
        """End: send no more requests, and wake all waiting calls."""
        self._is_closed = True
        self._is_attached = False
        self._link.listeners.pop(self, None)
        for timer in (self._retry, self._give_up_timer):
            if timer is not None:
                timer.cancel()
        self.wake()

    # --- Requesting, and again after a lost connection ---

    def _attach(self) -> None:
        connection = self._link.connection
        if connection is None:
            self._watch_or_fail()
        elif not self._is_closed and self._error is None:
            self._ask(connection)

    def _accepted(self) -> None:
        self._refusals = 0
        self._is_attached = self._was_attached = True
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None
        self.wake()

    def _refused(self, error: RunnelError) -> None:
        self._is_attached = False
        if isinstance(error, ConnectionLostError):
            return  # `link_up` sends the request again
        if isinstance(error, MovedError):
            self._move(error)
        elif not error.retriable or isinstance(error, _FINAL):
            self._fail(error)
            return
        self._watch()
        self._refusals += 1
        if self._retry is None:
            self._retry = self._timers.call_later(backoff_s(self._refusals), self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if not self._is_closed:
            self._attach()

    def _move(self, error: MovedError) -> None:
        self._router.learn(error.routes, self._link)
        for route in error.routes:
            assert isinstance(route, wire.Route)  # `learn` has checked it
            self._link.listeners.pop(self, None)
            self._link = self._router.link(route.owners[0].address)
            self._link.listeners[self] = None
            return

    def _fail(self, error: RunnelError) -> None:
        self._error = error
        self.wake()

    def _watch(self) -> None:
        """Start the timer that gives up, unless it runs."""
        if self._give_up_timer is None and self._deadline_s is not None:
            self._give_up_timer = self._timers.call_later(self._deadline_s, self._give_up)

    def _watch_or_fail(self) -> None:
        if self._link.failure is None:
            self._watch()
        elif self._error is None:
            self._fail(self._link.failure)

    def _give_up(self) -> None:
        self._fail(self._link.expired(self._what, Deadline(self._timers, self._deadline_s)))

    # --- Events of the link ---

    def link_up(self) -> None:
        self._attach()

    def link_down(self) -> None:
        self._is_attached = False
        self._watch_or_fail()

    # --- Waiting ---

    def wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, deadline: Deadline | None = None) -> None:
        """Wait until `wake` is called."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            if deadline is None:
                await waiter
            else:
                await deadline.wait(waiter, lambda: self._link.expired(self._what, deadline))
        finally:
            self._waiting.discard(waiter)
