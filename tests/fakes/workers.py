"""Workers that run on the event loop; a seed decides their timing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar, TypeVarTuple

from runnel.errors import ClosedError
from tests.fakes.power import PowerLoss

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedWorkers:
    """Runs each function after a random number of turns of the loop, and answers some turns later.

    Functions never overlap, but their order and the order of their answers are as free as with
    threads, and the same for the same seed.

    A function that raises PowerLoss ends the simulated process: `power_lost` holds the error, no
    function runs any more, and the function's future, all unanswered futures and all later ones
    fail with it. (Futures that never resolve would be closer to a real power loss, but a task
    that waits for one while it is cancelled would hang the simulation.)
    """

    def __init__(self, random: Random, *, turns_max: int = 4) -> None:
        self.power_lost: PowerLoss | None = None
        self.calls_run = 0
        self._random = random
        self._turns_max = turns_max
        self._closed = False
        # A dict keeps its order; the order of a set differs from run to run.
        self._waiting: dict[Callable[[], None], None] = {}

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if self._closed:
            raise ClosedError("these workers have been closed and take no more calls")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            if call not in self._waiting:
                return  # close ran it before its turn
            del self._waiting[call]
            if self.power_lost is not None:
                self._fail(future, self.power_lost)
                return
            self.calls_run += 1
            try:
                result = function(*args)
            except PowerLoss as loss:
                self.power_lost = loss
                self._fail(future, loss)
            except Exception as error:  # noqa: BLE001 - all of them belong to the caller
                self._later(loop, partial(self._fail, future, error))
            else:
                self._later(loop, partial(self._succeed, future, result))

        if self.power_lost is not None:
            self._fail(future, self.power_lost)
        else:
            self._waiting[call] = None
            self._later(loop, call)
        return future

    @property
    def is_busy(self) -> bool:
        """Whether a function waits to run. Answers may still be pending."""
        return bool(self._waiting)

    def close(self) -> None:
        """Run all waiting functions now, in any order. Their answers come later."""
        self._closed = True
        calls = list(self._waiting)
        self._random.shuffle(calls)
        for call in calls:
            call()

    def _succeed(self, future: asyncio.Future[T], result: T) -> None:
        # The function ran before the power loss, but no process is left to get its result.
        if self.power_lost is not None:
            self._fail(future, self.power_lost)
        elif not future.done():
            future.set_result(result)

    def _fail(self, future: asyncio.Future[T], error: BaseException) -> None:
        if not future.done():
            future.set_exception(self.power_lost or error)
            if self.power_lost is not None:
                future.exception()  # asyncio does not report the error then

    def _later(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        turns = self._random.randint(0, self._turns_max)

        def turn() -> None:
            nonlocal turns
            if turns:
                turns -= 1
                loop.call_soon(turn)
            else:
                action()

        loop.call_soon(turn)
