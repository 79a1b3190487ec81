"""Runs a function over a consumer's messages: with limited concurrency, in key order, drained at the end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from runnel.client.connection import Timers
from runnel.client.consumer.deliveries import HeldDelivery, LeasedItem, LeaseHolder
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.client.consumer.work import Work, WorkBatch
from runnel.errors import ClientFault
from runnel.formats.dead_letters import TRACEBACK_MARK

_Item = TypeVar("_Item", bound=LeasedItem)
_Begun = TypeVar("_Begun", bound=LeasedItem, covariant=True)
_Candidate = TypeVar("_Candidate")
_Argument = TypeVar("_Argument", contravariant=True)

MessageFunction: TypeAlias = Callable[[Work], Awaitable[object] | object]
BatchFunction: TypeAlias = Callable[[WorkBatch], Awaitable[object] | object]

_ERROR_CHARS_MAX: Final = 400
_TRACEBACK_CHARS_MAX: Final = 550  # with the error text: as much of a reason as a broker keeps
_FRAMES_MAX: Final = 8
# A worker whose function never waits lets other tasks run after this many items.
_YIELD_ITEMS: Final = 64


class OnError(Protocol[_Argument]):
    """A callback that gets each failed item and its error, before the item is nacked."""

    def __call__(self, item: _Argument, error: BaseException, /) -> object: ...


class PooledConsumer(LeaseHolder, Protocol):
    """The consumer, as the worker pool sees it."""

    @property
    def mode(self) -> str: ...

    async def wait_arrival(self) -> bool: ...

    def wake(self) -> None: ...


class WorkSource(Protocol[_Candidate, _Begun]):
    """A queue of candidates: messages or deliveries that are not begun."""

    def take_nowait(self) -> _Candidate | None: ...

    def begin_nowait(self, candidate: _Candidate) -> _Begun | None: ...

    def put_back(self, candidates: Iterable[_Candidate]) -> None: ...

    def order_key(self, candidate: _Candidate) -> Hashable | None:
        """Candidates of one order key are processed one after the other; None: in any order."""


class MessageSource:
    """Gives single messages; in key_shared mode messages of one key stay in order."""

    def __init__(self, queue: DeliveryQueue, consumer: PooledConsumer) -> None:
        self._queue = queue
        self._consumer = consumer
        self.take_nowait = queue.take_nowait
        self.begin_nowait = queue.begin_nowait

    def put_back(self, candidates: Iterable[Work]) -> None:
        self._queue.put_back(work.delivery for work in candidates)

    def order_key(self, candidate: Work) -> Hashable | None:
        message = candidate.message
        if message.key is None or self._consumer.mode != "key_shared":
            return None
        return (message.topic, message.partition, message.key)


class BatchSource:
    """Gives whole deliveries; in key_shared mode deliveries of one partition stay in order."""

    def __init__(self, queue: DeliveryQueue, consumer: PooledConsumer) -> None:
        self._consumer = consumer
        self.take_nowait = queue.take_delivery_nowait
        self.begin_nowait = queue.begin_batch_nowait
        self.put_back = queue.put_back

    def order_key(self, candidate: HeldDelivery) -> Hashable | None:
        if self._consumer.mode != "key_shared":
            return None
        return (candidate.topic, candidate.partition)


class WorkerPool(Generic[_Candidate, _Item]):
    """Workers that repeatedly take an item, call the function, and ack or nack the item.

    There is no task for each item. A plain function runs in a thread.
    """

    def __init__(
        self,
        consumer: PooledConsumer,
        source: WorkSource[_Candidate, _Item],
        function: Callable[[_Item], Awaitable[object] | object],
        timers: Timers,
        *,
        concurrency: int,
        on_error: OnError[_Item] | None,
    ) -> None:
        if type(concurrency) is not int or concurrency < 1:
            raise ClientFault(
                f"concurrency is {concurrency!r}: it must be a whole number from 1 on"
            )
        if not callable(function):
            raise ClientFault(
                f"{function!r} cannot be called: process needs a function of one item"
            )
        self._consumer = consumer
        self._source = source
        self._timers = timers
        self._concurrency = concurrency
        self._on_error = on_error
        self._is_stopping = False
        self._function = function
        self._threads: ThreadPoolExecutor | None = None
        if not is_async(function):
            self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="runnel work")
        # Order keys of the running items, and the candidates that wait behind them.
        self._queues: dict[Hashable, deque[_Candidate]] = {}
        self._unblocked: deque[_Candidate] = deque()  # their predecessors have ended

    async def run(self, stop: asyncio.Event | None, drain_s: float) -> None:
        """Run until `stop` is set, the caller is cancelled, or the consumer has ended; then drain."""
        loop = asyncio.get_running_loop()
        workers = [
            loop.create_task(self._work(), name="runnel worker") for _ in range(self._concurrency)
        ]
        stopping = set() if stop is None else {loop.create_task(stop.wait())}
        try:
            await asyncio.wait((*workers, *stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await self._drain(workers, drain_s)
            finally:
                for task in (*workers, *stopping):
                    task.cancel()
                await asyncio.wait((*workers, *stopping))
                if self._threads is not None:
                    self._threads.shutdown(wait=False, cancel_futures=True)
                self._source.put_back(chain(self._unblocked, *self._queues.values()))
                errors = [worker.exception() for worker in workers if not worker.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    async def _drain(self, workers: list[asyncio.Task[None]], drain_s: float) -> None:
        """Begin no new item. Running calls have `drain_s` to finish, then they are cancelled."""
        self._is_stopping = True
        self._consumer.wake()

        def cancel() -> None:
            for worker in workers:
                worker.cancel()

        timer = self._timers.call_later(drain_s, cancel)
        try:
            await asyncio.wait(workers)
        finally:
            timer.cancel()

    # --- One worker ---

    async def _work(self) -> None:
        done = 0
        while (candidate := await self._next()) is not None:
            item = self._source.begin_nowait(candidate)
            if item is not None:
                await self._do(item)
            self._finish(candidate)
            done += 1
            if done % _YIELD_ITEMS == 0:
                await asyncio.sleep(0)

    async def _next(self) -> _Candidate | None:
        """The next candidate that may begin; None: the pool stops, or the consumer is closed."""
        while not self._is_stopping:
            candidate = self._next_nowait()
            if candidate is not None:
                return candidate
            if not await self._consumer.wait_arrival():
                return None
        return None

    def _next_nowait(self) -> _Candidate | None:
        if self._unblocked:
            return self._unblocked.popleft()
        while (candidate := self._source.take_nowait()) is not None:
            order_key = self._source.order_key(candidate)
            if order_key is None:
                return candidate
            behind = self._queues.get(order_key)
            if behind is None:
                self._queues[order_key] = deque()
                return candidate
            behind.append(candidate)
        return None

    def _finish(self, candidate: _Candidate) -> None:
        order_key = self._source.order_key(candidate)
        behind = self._queues.get(order_key)
        if behind:
            self._unblocked.append(behind.popleft())
        elif behind is not None:
            del self._queues[order_key]

    async def _do(self, item: _Item) -> None:
        try:
            if self._threads is None:
                await self._function(item)  # type: ignore[misc]
            else:
                await self._do_in_thread(self._threads, item)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the drain took too long: the item goes back when the consumer is closed
            await self._failed(item, error)  # something that the function awaited was cancelled
        except Exception as error:  # noqa: BLE001 - the user's code ends here; whatever it raises is a failed message
            await self._failed(item, error)
        else:
            await self._consumer.ack(item)

    async def _do_in_thread(self, threads: ThreadPoolExecutor, item: _Item) -> None:
        context = contextvars.copy_context()
        call = functools.partial(context.run, self._function, item)
        result = await asyncio.get_running_loop().run_in_executor(threads, call)
        if inspect.isawaitable(result):  # a plain function that made a coroutine
            await result

    async def _failed(self, item: _Item, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error(item, error)
        await self._consumer.nack(item, reason=_reason_of(error))


def _reason_of(error: BaseException) -> str:
    """The error's text, and the last lines of the traceback: its innermost frames."""
    name = type(error).__qualname__
    module = type(error).__module__
    if module != "builtins":
        name = f"{module}.{name}"
    frames = traceback.extract_tb(error.__traceback__, limit=-_FRAMES_MAX)
    of_function = [frame for frame in frames if frame.filename != __file__]
    lines = "".join(traceback.format_list(of_function)).splitlines()
    length = len(name)
    kept = [name]
    while lines and (length := length + len(lines[-1]) + 1) <= _TRACEBACK_CHARS_MAX:
        kept.insert(0, lines.pop())
    return "\n".join((_error_text(error)[:_ERROR_CHARS_MAX], TRACEBACK_MARK, *kept))


def _error_text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error!s}"
    except Exception:  # noqa: BLE001 - an error without a readable text is a failed message all the same
        return name


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it makes a coroutine, which runs in the loop. Other functions run in threads."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object whose __call__ is async
    )
