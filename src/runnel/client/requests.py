"""Sends the requests of a bus to the broker that it is connected to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from runnel.client.connection import Deadline, Router, Timers, Usual, backoff_s, sleep
from runnel.errors import ClientFault, ClosedError, MalformedError, MovedError
from runnel.formats import wire

_Wanted = TypeVar("_Wanted", bound=wire.Head)

PER_PAGE = 1000  # of lists: the broker returns no more at once


class BusRequests:
    """The base of all groups of verbs: sends requests with a deadline, until the bus is closed."""

    def __init__(self, router: Router, timers: Timers, *, deadline_s: float | None) -> None:
        self._router = router
        self._timers = timers
        self._deadline_s = deadline_s
        self._is_closed = False

    def _deadline(
        self, deadline_s: float | Usual | None = Usual.DEADLINE, *, extra_s: float = 0
    ) -> Deadline:
        if self._is_closed:
            raise ClosedError("the bus has been closed")
        seconds = self._seconds(deadline_s)
        return Deadline(self._timers, None if seconds is None else seconds + extra_s)

    def _seconds(self, deadline_s: float | Usual | None) -> float | None:
        """The given deadline, or that of the bus. None: no deadline."""
        return self._deadline_s if isinstance(deadline_s, Usual) else deadline_s

    async def _ask(
        self,
        kind: type[_Wanted],
        make: Callable[[int], wire.Head],
        what: str,
        *,
        is_repeatable: bool = True,
        topic: str = "",
    ) -> tuple[_Wanted, memoryview]:
        """Ask home, or the owner of a topic's first partition, as far as it is known."""
        _check_request(make, what)
        deadline, moves = self._deadline(), 0
        while True:
            try:
                link = self._router.link_of(topic, 0) if topic else self._router.home
                return await link.ask(
                    kind, make, deadline=deadline, what=what, is_repeatable=is_repeatable
                )
            except MovedError as error:
                # Nothing was done. A shard that moves is served again before long.
                self._router.learn(error.routes)
                moves += 1
                pause_s = backoff_s(moves)
                if pause_s >= deadline.left_s:
                    raise
                await sleep(self._timers, pause_s)

    async def _ask_shard(
        self,
        kind: type[_Wanted],
        journal: str,
        shard: int,
        make: Callable[[int], wire.Head],
        what: str,
    ) -> tuple[_Wanted, memoryview]:
        """Ask the owner of a shard."""
        _check_request(make, what)
        return await self._router.ask_shard(
            kind, journal, shard, make, deadline=self._deadline(), what=what
        )

    async def _do(self, make: Callable[[int], wire.Head], what: str) -> None:
        await self._ask(wire.Done, make, what, is_repeatable=False)


def _check_request(make: Callable[[int], wire.Head], what: str) -> None:
    """Refuse arguments of a wrong type: the broker would end the connection at each attempt."""
    try:
        wire.check_request(make(1))
    except MalformedError as error:
        raise ClientFault(f"{what}: an argument is of the wrong type: {error}") from None
