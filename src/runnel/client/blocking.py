"""The client without `await`: the same bus, on an event loop in a thread of its own.

It works wherever threads do, even in a notebook, where the calling thread already runs a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from runnel.client.blocking_consumer import BlockingConsumer
from runnel.client.bus import Bus
from runnel.client.consumer import Consumer, Subscription
from runnel.client.producer import PendingRows, Publisher, SendBuffer
from runnel.client.results import Gap, Receipt
from runnel.errors import ClientFault, ClosedError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import NodeState, Welcome

if TYPE_CHECKING:
    import pyarrow

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop: Final = _new_loop()
        self._thread = threading.Thread(target=self._run, name="runnel client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop's thread, and wait for it. If the wait is interrupted, it is cancelled."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientFault(
                "this would wait for itself: callbacks cannot use the blocking client"
            )
        if self.loop.is_closed():
            work.close()
            raise ClosedError("the bus has been closed")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _blocking(
    verb: Callable[Concatenate[Bus, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[BlockingBus, _P], _T]:
    """Make a verb of the bus block the calling thread."""

    @functools.wraps(verb)
    def wait(self: BlockingBus, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.run(verb(self.bus, *args, **kwargs))

    return wait


class BlockingBus:
    """Publish, subscribe, fetch, consume: `Bus` without `await`, from any thread. Get one with `connect_blocking`."""

    def __init__(self, open_bus: Callable[[], Coroutine[Any, Any, Bus]]) -> None:
        self._thread = LoopThread()
        self._is_closed = False
        try:
            self.bus: Final = self._thread.run(open_bus())
        except BaseException:
            self._is_closed = True
            self._thread.stop()
            raise
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return f"<Blocking{repr(self.bus)[1:]}"

    def __del__(self) -> None:
        if not self._is_closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            atexit.unregister(self._at_exit)
            asyncio.run_coroutine_threadsafe(_close_forgotten(self.bus), self._thread.loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the bus's own loop, and wait for it."""
        return self._thread.run(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(is_flushing=error is None)

    def close(self, *, is_flushing: bool = True) -> None:
        """Flush publishers and consumers that are still open, end subscriptions, disconnect, end the thread."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self._at_exit)
            try:
                self._thread.run(self.bus.close(is_flushing=is_flushing))
            finally:
                self._thread.stop()

    @property
    def server(self) -> Welcome:
        return self.bus.server

    @property
    def nodes(self) -> Sequence[NodeState]:
        return self.bus.nodes

    @property
    def is_connected(self) -> bool:
        return self.bus.is_connected

    publish = _blocking(Bus.publish)
    publish_batch = _blocking(Bus.publish_batch)
    fetch = _blocking(Bus.fetch)
    shards = _blocking(Bus.shards)
    fetch_shard = _blocking(Bus.fetch_shard)
    topics = _blocking(Bus.topics)
    topic = _blocking(Bus.topic)
    routes = _blocking(Bus.routes)
    delete_topic = _blocking(Bus.delete_topic)
    purge_topic = _blocking(Bus.purge_topic)
    cursors = _blocking(Bus.cursors)
    cursor = _blocking(Bus.cursor)
    set_cursor = _blocking(Bus.set_cursor)
    remove_cursor = _blocking(Bus.remove_cursor)
    checkpoint = _blocking(Bus.checkpoint)
    subscriptions = _blocking(Bus.subscriptions)
    subscription = _blocking(Bus.subscription)
    make_subscription = _blocking(Bus.make_subscription)
    delete_subscription = _blocking(Bus.delete_subscription)
    pause_subscription = _blocking(Bus.pause_subscription)
    resume_subscription = _blocking(Bus.resume_subscription)
    move_subscription = _blocking(Bus.move_subscription)
    remove_member = _blocking(Bus.remove_member)
    dead_letter_page = _blocking(Bus.dead_letter_page)
    redrive = _blocking(Bus.redrive)
    drop_dead = _blocking(Bus.drop_dead)
    cluster = _blocking(Bus.cluster)
    move_shard = _blocking(Bus.move_shard)
    drain_node = _blocking(Bus.drain_node)
    balance_cluster = _blocking(Bus.balance_cluster)
    ping = _blocking(Bus.ping)
    statistics = _blocking(Bus.statistics)

    def publisher(self, topic: str | None = None, **options: Any) -> BlockingPublisher:
        """A publisher for many messages, from any thread. It has the options of `Bus.publisher`."""
        return BlockingPublisher(self, topic, options)

    def subscribe(self, *patterns: str, **options: Any) -> BlockingSubscription:
        """Subscribe to the messages of all topics that match. It has the options of `Bus.subscribe`."""

        async def subscribe() -> Subscription:
            return self.bus.subscribe(*patterns, **options)

        return BlockingSubscription(self, self.run(subscribe()))

    def consume(self, subscription: str, *patterns: str, **options: Any) -> BlockingConsumer:
        """Consume from a subscription. It has the options of `Bus.consume`."""

        async def consume() -> Consumer:
            return self.bus.consume(subscription, *patterns, **options)

        return BlockingConsumer(self, self.bus.loop, self.run(consume()))

    def dead_letters(self, name: str, *, offset: int = 0) -> Iterator[Message]:
        """Messages of a subscription that failed too often, oldest first."""
        while True:
            page = self.dead_letter_page(name, offset)
            yield from page.messages
            offset = page.next_offset
            if not offset:
                return


def _close_at_exit(reference: weakref.ref[BlockingBus]) -> None:
    bus = reference()
    if bus is not None:
        bus.close()


async def _close_forgotten(bus: Bus) -> None:
    try:
        await bus.close()
    finally:
        asyncio.get_running_loop().stop()


class BlockingPublisher(SendBuffer):
    """Publishes many messages, from any thread. `send` blocks while the buffer is full.

    Use it in a `with`, which flushes at its end.
    """

    def __init__(self, bus: BlockingBus, topic: str | None, options: dict[str, Any]) -> None:
        self._bus = bus
        self._room = threading.Condition(threading.Lock())
        self._handed_over: list[PendingRows] = []
        self._is_waking = False
        self._loop = bus.bus.loop

        async def open_publisher() -> Publisher:
            publisher = bus.bus.publisher(topic, on_room=self._notify, **options)
            await publisher.open()
            return publisher

        self._publisher = publisher = bus.run(open_publisher())
        super().__init__(
            topic,
            publisher.now_ns,
            chunk_messages=publisher.batch_messages_max,
            chunk_bytes_max=publisher.chunk_bytes_max,
        )

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._publisher)[1:]}"

    def send(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
    ) -> None:
        """Take a message; it is sent soon, in a batch. Blocks while the buffer is full."""
        with self._room:
            super().send(payload, topic, key, tags, event_time_ns, partition_key, uid)

    def submit(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
    ) -> concurrent.futures.Future[Receipt]:
        """Send a message; returns a future of its receipt."""
        future: concurrent.futures.Future[Receipt] = concurrent.futures.Future()
        with self._room:
            super().send(payload, topic, key, tags, event_time_ns, partition_key, uid)
            self._rows.futures[len(self._payloads) - 1] = future
        return future

    def flush(self) -> None:
        """Wait until everything sent so far is acknowledged. Raises the first failure since the last flush."""
        self._bus.run(self._flush())

    def close(self) -> None:
        """Flush, and accept no more messages."""

        async def close() -> None:
            self._drain()
            await self._publisher.close()

        self._bus.run(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- In the calling thread, with the lock held ---

    def _make_room(self) -> None:
        if rows := self._take():
            self._handed_over.append(rows)
        self._wake()
        publisher = self._publisher
        while self._is_over_full():
            self._room.wait()
        publisher.check_open()
        self._open()

    def _is_over_full(self) -> bool:
        publisher = self._publisher
        waiting_bytes = sum(rows.size for rows in self._handed_over)
        is_full = publisher.buffered_bytes + waiting_bytes > publisher.buffer_bytes_max
        return is_full and not publisher.is_ended

    def _wake(self) -> None:
        """Schedule `_drain` in the loop. One call serves all rows that come until it runs."""
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                raise ClosedError("the bus has been closed") from None

    # --- In the loop's thread ---

    def _drain(self) -> None:
        with self._room:
            self._is_waking = False
            handed_over, self._handed_over = self._handed_over, []
            if rows := self._take():
                handed_over.append(rows)
        for rows in handed_over:
            self._publisher.accept(rows)

    async def _flush(self) -> None:
        self._drain()
        await self._publisher.flush()

    def _notify(self) -> None:
        with self._room:
            self._room.notify_all()


class BlockingSubscription:
    """A subscription: iterate it for messages, `batches()` for batches, `to_arrow()` for record batches."""

    def __init__(self, bus: BlockingBus, subscription: Subscription) -> None:
        self._bus = bus
        self._subscription = subscription
        self._batches: Iterator[Batch] = iter(())
        self._messages: Iterator[Message] = iter(())

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._subscription)[1:]}"

    @property
    def gaps(self) -> list[Gap]:
        """The newest gaps, up to the position that has been read."""
        return list(self._subscription.gaps)

    def open(self) -> None:
        """Wait until the broker has accepted the subscription."""
        self._bus.run(self._subscription.open())

    def close(self) -> None:
        self._bus.run(self._subscription.close())

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def batches(self) -> Iterator[Batch]:
        while True:
            yield from self._batches
            arrived = self._bus.run(self._subscription.next_batches())
            if not arrived:
                return
            self._batches = iter(arrived)

    def to_arrow(self) -> Iterator[pyarrow.RecordBatch]:
        """Iterate over batches as pyarrow.RecordBatch: `pip install '.[arrow]'`."""
        for batch in self.batches():
            yield batch.to_arrow()

    def __iter__(self) -> Iterator[Message]:
        # Messages that were not yielded stay here: a `break` loses nothing, and the next loop continues.
        while True:
            yield from self._messages
            arrived = [*self._batches] or self._bus.run(self._subscription.next_batches())
            if not arrived:
                return
            self._messages = chain.from_iterable(map(Batch.messages, arrived))
