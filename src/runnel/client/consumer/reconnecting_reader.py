"""What the broker serves over a connection, and again over the next one: subscriptions and consumers.

Each asks for itself when it begins and whenever the link comes up, tries again what may succeed later, and gives up
after a while without the broker.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from runnel.client.connection import (
    BrokerConnection,
    Deadline,
    Handle,
    Link,
    Router,
    Timers,
    backoff_s,
    warn_of_habits,
)
from runnel.errors import ConnectionLostError, MovedError, RunnelError, SlowReaderError
from runnel.formats import wire

# Trying again cannot help these, whatever they say.
_FINAL: Final = (SlowReaderError,)


class ReconnectingReader(ABC):
    """Asks to be served, and again after a loss. What for, and what comes then, is the heir's to say."""

    def __init__(
        self,
        router: Router,
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
        self._is_attached = False  # the broker serves it now
        self._was_attached = False  # it has done so once
        self._is_closed = False
        self._error: RunnelError | None = None
        self._refusals = 0
        self._retry: Handle | None = None
        self._give_up_timer: Handle | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    # --- The heir's ---

    @abstractmethod
    def _ask(self, connection: BrokerConnection) -> None:
        """Ask to be served, if that is not under way. Its answer leads to `_accepted` or `_refused`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None:
        """Close without waiting: its connection ends anyway."""

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
        """Closed: nothing is asked for any more, and nobody waits."""
        self._is_closed = True
        self._is_attached = False
        self._link.listeners.pop(self, None)
        for timer in (self._retry, self._give_up_timer):
            if timer is not None:
                timer.cancel()
        self.wake()

    # --- Asking, and again after a loss ---

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
            return  # the link comes back, and asks again
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
        self._router.learn(error.routes)
        for route in error.routes:
            assert isinstance(route, wire.Route)  # learn has looked
            self._link.listeners.pop(self, None)
            self._link = self._router.link(route.owners[0].address)
            self._link.listeners[self] = None
            return

    def _fail(self, error: RunnelError) -> None:
        self._error = error
        self.wake()

    def _watch(self) -> None:
        """Without being served, give up after a while."""
        if self._give_up_timer is None and self._deadline_s is not None:
            self._give_up_timer = self._timers.call_later(self._deadline_s, self._give_up)

    def _watch_or_fail(self) -> None:
        if self._link.failure is None:
            self._watch()
        elif self._error is None:
            self._fail(self._link.failure)

    def _give_up(self) -> None:
        self._fail(self._link.expired(self._what, Deadline(self._timers, self._deadline_s)))

    # --- What the link tells ---

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
        """Until something has changed."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            if deadline is None:
                await waiter
            else:
                await deadline.wait(waiter, lambda: self._link.expired(self._what, deadline))
        finally:
            self._waiting.discard(waiter)
