"""The consumer without `await`: the calling thread gets the work, the loop's thread renews its leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import repeat
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from runnel.client.consumer import (
    Consumer,
    ConsumerStatistics,
    HeldDelivery,
    LateWork,
    LeasedBatch,
    LeasedItem,
    OnError,
    Work,
    WorkBatch,
    WorkItem,
    is_async,
)
from runnel.errors import ClosedError
from runnel.formats.batch import Batch

_T = TypeVar("_T")


class Runner(Protocol):
    """Runs a coroutine in the client's own loop, and waits for it in the calling thread."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T: ...


class BlockingWork(WorkItem, frozen=True, eq=False, gc=True):
    """A message to be processed: `ack` it when it is done, `nack` it when it failed."""

    consumer: BlockingConsumer

    def ack(self, *, stored: bool = False) -> None:
        """Acknowledge the message. Waits only for room; with `stored`, until the broker has stored the ack."""
        self.consumer.ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        """Report a failure: the message comes again after this delay, or that of the subscription."""
        self.consumer.nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> None:
        """Extend the lease of its delivery to this long from now."""
        self.consumer.extend(self, seconds)


class BlockingWorkBatch(LeasedBatch):
    """A batch to be processed: `ack` it whole, or its `works()` one by one."""

    __slots__ = ("consumer",)

    def __init__(self, batch: Batch, delivery: HeldDelivery, consumer: BlockingConsumer) -> None:
        super().__init__(batch, delivery)
        self.consumer = consumer

    def works(self) -> Iterator[BlockingWork]:
        """Its messages, each to be acknowledged by itself."""
        return map(BlockingWork, self, repeat(self.delivery), repeat(self.consumer))

    def ack(self, *, stored: bool = False) -> None:
        """Acknowledge the whole batch."""
        self.consumer.ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        """Report a failure of all its messages that are not acknowledged."""
        self.consumer.nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> None:
        """Extend its lease to this long from now."""
        self.consumer.extend(self, seconds)


BlockingFunction: TypeAlias = Callable[[BlockingWork], object]
BlockingBatchFunction: TypeAlias = Callable[[BlockingWorkBatch], object]
AsyncFunction: TypeAlias = Callable[[Work], Awaitable[object]]
AsyncBatchFunction: TypeAlias = Callable[[WorkBatch], Awaitable[object]]


class BlockingConsumer:
    """A consumer: iterate it for `BlockingWork`, `batches()` for batches, or give `process` a function.

    Use it in a `with`. One thread iterates; any thread may ack.
    """

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop, consumer: Consumer) -> None:
        self._runner = runner
        self._loop = loop
        self._consumer = consumer
        self._works: Iterator[Work] = iter(())  # received, and not yielded yet
        self._lock = threading.Lock()
        self._acked: list[LeasedItem] = []  # on their way to the loop
        self._is_waking = False
        self._stop = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._consumer)[1:]}"

    @property
    def subscription(self) -> str:
        return self._consumer.subscription

    @property
    def mode(self) -> str:
        return self._consumer.mode

    @property
    def statistics(self) -> ConsumerStatistics:
        return self._consumer.statistics

    @property
    def late(self) -> list[LateWork]:
        """Acks that came too late; the newest of them."""
        return list(self._consumer.late)

    # --- Opening and closing ---

    def open(self) -> None:
        """Wait until the broker has accepted the consumer."""
        self._run(self._consumer.open)

    def close(self) -> None:
        """Wait until acks are stored, then leave. Unfinished work is returned without counting as failed."""
        self._run(self._consumer.close)

    def __enter__(self) -> Self:
        self._run(self._consumer.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(lambda: self._consumer.__aexit__(kind, error, traceback))

    # --- Iterating ---

    def __iter__(self) -> Iterator[BlockingWork]:
        # Work that was not yielded stays here: a `break` loses nothing, and the next loop continues.
        while True:
            for work in self._works:
                if self._consumer.begin_nowait(work):
                    yield BlockingWork(work.message, work.delivery, self)
            arrived = self._run(self._consumer.next_works)
            if not arrived:
                return
            self._works = iter(arrived)

    def batches(self) -> Iterator[BlockingWorkBatch]:
        """Iterate over the work in batches: one delivery at a time."""
        self._put_back()
        while (batch := self._run(self._consumer.next_batch)) is not None:
            yield BlockingWorkBatch(batch, batch.delivery, self)

    def _put_back(self) -> None:
        """Return work that was not yielded, so that batches or `process` get it."""
        works, self._works = self._works, iter(())
        self._run(lambda: self._consumer.put_back(works))

    # --- Acknowledging ---

    def ack(self, *items: LeasedItem, stored: bool = False) -> None:
        """Acknowledge messages or whole batches. Waits only for room.

        With `stored`, wait until the broker has stored the acks. LateAckError: some came too late.
        """
        if stored:
            self._run(lambda: self._consumer.ack(*items, stored=True))
            return
        self._consumer.check_own(items)  # here: an error in the loop would reach no caller
        with self._lock:
            self._acked += items
            if not self._is_waking:  # one call serves all acks that come until it runs
                self._is_waking = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_over)
                except RuntimeError:
                    raise ClosedError("the bus has been closed") from None
        if not self._consumer.has_room:
            self._run(self._consumer.wait_room)

    def ack_up_to(self, item: WorkItem) -> None:
        """Acknowledge this message and all earlier ones of its partition that are leased to this consumer."""
        self._run(lambda: self._consumer.ack_up_to(item))

    def nack(self, *items: LeasedItem, delay_s: float | None = None, reason: str = "") -> None:
        """Report failures: the messages come again after this delay, or that of the subscription."""
        self._run(lambda: self._consumer.nack(*items, delay_s=delay_s, reason=reason))

    def extend(self, item: LeasedItem, seconds: float) -> None:
        """Extend the lease of an item's delivery to this long from now, up to the subscription's processing limit."""
        self._run(lambda: self._consumer.extend(item, seconds))

    def flush(self) -> None:
        """Wait until everything acked so far is stored."""
        self._run(self._consumer.flush)

    # --- Processing ---

    def process(
        self,
        function: BlockingFunction | AsyncFunction,
        *,
        concurrency: int = 8,
        drain_s: float = 30,
        on_error: OnError[Any] | None = None,
    ) -> None:
        """Call a function for every message, in `concurrency` threads: acked when it returns, nacked when it raises.

        The function gets `BlockingWork`, which it may ack, nack or extend itself; the first ack or nack counts. (An
        `async def` runs in the bus's own loop, and gets `Work`.) This continues until `stop` is called or this thread
        is interrupted. Then no new calls begin, and running ones have `drain_s` to finish. In key_shared mode messages
        of one key are processed one after the other.
        """

        def blocking(work: Work) -> BlockingWork:
            return BlockingWork(work.message, work.delivery, self)

        function, on_error = _adapt(blocking, function, on_error)
        stop = self._new_stop()
        self._process(
            self._consumer.process(
                function, concurrency=concurrency, stop=stop, drain_s=drain_s, on_error=on_error
            )
        )

    def process_batches(
        self,
        function: BlockingBatchFunction | AsyncBatchFunction,
        *,
        concurrency: int = 8,
        drain_s: float = 30,
        on_error: OnError[Any] | None = None,
    ) -> None:
        """As `process`, for whole batches. In key_shared mode batches of one partition come one after the other."""

        def blocking(batch: WorkBatch) -> BlockingWorkBatch:
            return BlockingWorkBatch(batch, batch.delivery, self)

        function, on_error = _adapt(blocking, function, on_error)
        stop = self._new_stop()
        self._process(
            self._consumer.process_batches(
                function, concurrency=concurrency, stop=stop, drain_s=drain_s, on_error=on_error
            )
        )

    def stop(self) -> None:
        """Let `process` finish. May be called from any thread, or from a signal handler."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def _new_stop(self) -> asyncio.Event:
        self._put_back()
        self._stop = asyncio.Event()
        return self._stop

    def _process(self, processing: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(processing, self._loop)
        try:
            future.result()
        except BaseException:
            if not future.done():  # this thread was interrupted: running calls may finish
                self.stop()
                future.result()
            raise

    # --- Calls into the loop ---

    def _run(self, verb: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a verb of the consumer in the loop, after the acks that were given before."""

        async def run() -> _T:
            self._hand_over()
            return await verb()

        return self._runner.run(run())

    def _hand_over(self) -> None:
        with self._lock:
            self._is_waking = False
            acked, self._acked = self._acked, []
        if acked:
            self._consumer.ack_nowait(acked)


def _adapt(
    blocking: Callable[[Any], object],
    function: Callable[[Any], object],
    on_error: OnError[Any] | None,
) -> tuple[Callable[[Any], object], OnError[Any] | None]:
    """Make both functions take blocking items. With an `async def`, both stay as they are."""
    if not callable(function) or is_async(function):
        return function, on_error

    def call(item: object) -> object:
        return function(blocking(item))

    def report(item: object, error: BaseException, /) -> object:
        return None if on_error is None else on_error(blocking(item), error)

    return call, report
