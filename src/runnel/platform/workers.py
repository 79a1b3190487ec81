"""Workers: threads that run blocking calls (mostly of the disk) and hand the results to the event loop.

Measured beside `loop.run_in_executor` over a `ThreadPoolExecutor`, a `SimpleQueue` and
`call_soon_threadsafe` carried a call there and back, 64 in flight, at two fifths of the cost on
asyncio's loop and three tenths on uvloop: no second future, no lock for each call.

A loop that never rests starves every thread of the GIL: it lets go of the GIL when it polls its
sockets, but takes it back before the waiting thread has woken, and each such moment also restarts
the patience (`sys.getswitchinterval`) after which the thread may insist. With a loop kept busy by
callbacks of 0.5 ms, one write-and-sync then took seconds. So while calls are under way the loop
really sleeps for a moment when a call is submitted, and then once a millisecond: the same call then
took 2 to 3 ms, and the loop still did its own work for nine tenths of the time.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

from runnel.errors import ClosedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

GIVE_WAY_EVERY_SECONDS = 0.001
# Any real sleep will do: the kernel's timer slack makes it long enough for a thread to wake.
GIVE_WAY_FOR_SECONDS = 0.000_001


class Workers(Protocol):
    """Runs functions that may block, off the event loop."""

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `function(*args)` off the loop; the future belongs to the running loop.

        Never refuses for being busy: callers bound themselves. Cancelling the future does not
        stop the function, which always runs to its end.
        """
        ...

    def close(self) -> None:
        """Wait until everything submitted has run, then take no more. May be called again."""
        ...


class ThreadWorkers:
    """Workers that are threads of this process.

    They are not daemons, since the interpreter's exit must not cut a write short: their owner
    closes them.
    """

    def __init__(self, count: int, *, name: str = "runnel-worker") -> None:
        if count < 1:
            raise ValueError(f"count: {count} workers can do nothing; at least 1 is needed")
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._way: _WayForThreads | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=False)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if self._closed:
            raise ClosedError("these workers have been closed and take no more calls")
        loop = asyncio.get_running_loop()
        way = self._way
        if way is None or way.loop is not loop:
            way = self._way = _WayForThreads(loop)
        future: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 - all of them belong to the caller
                _answer(loop, way.fail, future, error)
            else:
                _answer(loop, way.succeed, future, result)

        self._calls.put(call)
        way.begin()
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # The queue is first in, first out: each thread ends after all submitted calls.
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle worker must not keep the last call's buffers alive


def _answer(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[asyncio.Future[T], *Ts], None],
    future: asyncio.Future[T],
    *outcome: *Ts,
) -> None:
    try:
        loop.call_soon_threadsafe(settle, future, *outcome)
    except RuntimeError:
        # Once the loop is closed, nothing waits for the answer.
        if not loop.is_closed():
            raise


class _WayForThreads:
    """Counts the calls under way of one loop, and lets that loop sleep briefly so that threads get the GIL.

    Everything here runs on the loop's own thread.
    """

    __slots__ = ("_calls_under_way", "_timer_runs", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls_under_way = 0
        self._timer_runs = False

    def begin(self) -> None:
        self._calls_under_way += 1
        if not self._timer_runs:
            self._timer_runs = True
            self._give_way()  # at once, so that the call begins before the loop's next callback

    def succeed(self, future: asyncio.Future[T], result: T) -> None:
        self._calls_under_way -= 1
        if not future.done():  # it was cancelled; the function ran to its end all the same
            future.set_result(result)

    def fail(self, future: asyncio.Future[T], error: BaseException) -> None:
        self._calls_under_way -= 1
        if future.done():
            return
        if isinstance(error, StopIteration):  # a future cannot carry one: it would end a coroutine
            wrapped = RuntimeError("a function run by workers raised StopIteration")
            wrapped.__cause__ = error
            error = wrapped
        future.set_exception(error)

    def _give_way(self) -> None:
        if not self._calls_under_way:
            self._timer_runs = False
            return
        time.sleep(GIVE_WAY_FOR_SECONDS)
        self.loop.call_later(GIVE_WAY_EVERY_SECONDS, self._give_way)
