"""The consumer without `await`: work is handed out in the calling thread, leases are kept by the loop's."""

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
    """Does something in the client's own loop, and waits for it here."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T: ...


class BlockingWork(WorkItem, frozen=True, eq=False, gc=True):
    """A message to be processed: `ack` it when that is done, `nack` it when that failed."""

    consumer: BlockingConsumer

    def ack(self, *, stored: bool = False) -> None:
        """It is done. Waits only for room; with `stored`, until the broker has stored it."""
        self.consumer.ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        """It failed: it comes again after a delay, this one or the subscription's."""
        self.consumer.nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> None:
        """Lease its delivery for so long from now on."""
        self.consumer.extend(self, seconds)


class BlockingWorkBatch(LeasedBatch):
    """A batch to be processed: `ack` it whole, or its `works()` one by one."""

    __slots__ = ("consumer",)

    def __init__(self, batch: Batch, delivery: HeldDelivery, consumer: BlockingConsumer) -> None:
        super().__init__(batch, delivery)
        self.consumer = consumer

    def works(self) -> Iterator[BlockingWork]:
        """Its messages, each to be acknowledged for itself."""
        return map(BlockingWork, self, repeat(self.delivery), repeat(self.consumer))

    def ack(self, *, stored: bool = False) -> None:
        """All of it is done."""
        self.consumer.ack(self, stored=stored)

    def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        """All of it failed that is not acknowledged."""
        self.consumer.nack(self, delay_s=delay_s, reason=reason)

    def extend(self, seconds: float) -> None:
        """Lease it for so long from now on."""
        self.consumer.extend(self, seconds)


BlockingFunction: TypeAlias = Callable[[BlockingWork], object]
BlockingBatchFunction: TypeAlias = Callable[[BlockingWorkBatch], object]
AsyncFunction: TypeAlias = Callable[[Work], Awaitable[object]]
AsyncBatchFunction: TypeAlias = Callable[[WorkBatch], Awaitable[object]]


class BlockingConsumer:
    """Iterate it for `BlockingWork`, `batches()` for batches, or give `process` a function. Use it in a `with`.

    One thread iterates; acks may come from any.
    """

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop, consumer: Consumer) -> None:
        self._runner = runner
        self._loop = loop
        self._consumer = consumer
        self._works: Iterator[Work] = iter(())  # arrived, and not begun
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
        """Wait until the broker has accepted it."""
        self._run(self._consumer.open)

    def close(self) -> None:
        """Wait until acks are stored, then leave: unfinished work goes back without counting as failed."""
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

    # --- Handing out ---

    def __iter__(self) -> Iterator[BlockingWork]:
        # What was not given yet stays here: breaking off loses nothing, and another loop goes on.
        while True:
            for work in self._works:
                if self._consumer.begin_nowait(work):
                    yield BlockingWork(work.message, work.delivery, self)
            arrived = self._run(self._consumer.next_works)
            if not arrived:
                return
            self._works = iter(arrived)

    def batches(self) -> Iterator[BlockingWorkBatch]:
        """The same work, a delivery at a time."""
        self._put_back()
        while (batch := self._run(self._consumer.next_batch)) is not None:
            yield BlockingWorkBatch(batch, batch.delivery, self)

    def _put_back(self) -> None:
        """What was not iterated is handed out in another way."""
        works, self._works = self._works, iter(())
        self._run(lambda: self._consumer.put_back(works))

    # --- Acknowledging ---

    def ack(self, *items: LeasedItem, stored: bool = False) -> None:
        """These are done: messages, or batches whole. Waits only for room.

        With `stored` it waits until the broker has stored that; LateAckError, if some came too late.
        """
        if stored:
            self._run(lambda: self._consumer.ack(*items, stored=True))
            return
        self._consumer.check_own(items)  # here: the loop would have nobody to tell
        with self._lock:
            self._acked += items
            if not self._is_waking:  # one call into the loop for all that come until it is served
                self._is_waking = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_over)
                except RuntimeError:
                    raise ClosedError("the bus has been closed") from None
        if not self._consumer.has_room:
            self._run(self._consumer.wait_room)

    def ack_up_to(self, item: WorkItem) -> None:
        """This message is done, and everything before it of its partition that is leased to this consumer."""
        self._run(lambda: self._consumer.ack_up_to(item))

    def nack(self, *items: LeasedItem, delay_s: float | None = None, reason: str = "") -> None:
        """These failed, and come again after a delay: this one, or the subscription's."""
        self._run(lambda: self._consumer.nack(*items, delay_s=delay_s, reason=reason))

    def extend(self, item: LeasedItem, seconds: float) -> None:
        """Lease an item's delivery for so long from now on, up to the subscription's longest processing time."""
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
        """Call a function for every message, in so many threads: acked when it returns, nacked when it raises.

        What it is given is what iterating gives, and may be acked, nacked or extended there: the first word counts.
        (An `async def` runs in the bus's own loop, and is given `Work`.) Goes on until `stop` is called, or this
        thread is interrupted: then nothing new is begun, and what runs has `drain_s` to finish. In key_shared mode
        messages of one key are processed one after the other.
        """

        def blocking(work: Work) -> BlockingWork:
            return BlockingWork(work.message, work.delivery, self)

        function, on_error = _given(blocking, function, on_error)
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
        """The same for whole batches. In key_shared mode those of one partition come one after the other."""

        def blocking(batch: WorkBatch) -> BlockingWorkBatch:
            return BlockingWorkBatch(batch, batch.delivery, self)

        function, on_error = _given(blocking, function, on_error)
        stop = self._new_stop()
        self._process(
            self._consumer.process_batches(
                function, concurrency=concurrency, stop=stop, drain_s=drain_s, on_error=on_error
            )
        )

    def stop(self) -> None:
        """Let `process` come to its end. From any thread, or a signal's handler."""
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
            if not future.done():  # interrupted here: what runs there may finish
                self.stop()
                future.result()
            raise

    # --- Reaching the loop ---

    def _run(self, verb: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Acks that were given before come first."""

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


def _given(
    blocking: Callable[[Any], object],
    function: Callable[[Any], object],
    on_error: OnError[Any] | None,
) -> tuple[Callable[[Any], object], OnError[Any] | None]:
    """The same two, given what may be used without `await`; those of an `async def` stay as they are."""
    if not callable(function) or is_async(function):
        return function, on_error

    def call(item: object) -> object:
        return function(blocking(item))

    def tell(item: object, error: BaseException, /) -> object:
        return None if on_error is None else on_error(blocking(item), error)

    return call, tell
