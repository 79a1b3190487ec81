"""A consumer process: `python -m tests.server.worker URL MODE STYLE SEED FAILING`.

It consumes until SIGTERM and writes an event for each step to its standard output, a pipe. An event is in the pipe
before the next step begins, so a killed worker has reported all that it did.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final

from runnel.client import Consumer, Work, connect
from runnel.client.consumer import LateWork, WorkBatch
from runnel.errors import LateAckError, Unavailable
from tests.server import worker_events
from tests.server.worker_events import MessageId

SUBSCRIPTION: Final = "work"
PATTERN: Final = "*"
# No client gives up while the broker is down: a busy machine may need long to start one.
_DEADLINE_S: Final = 90.0
_WINDOW_MESSAGES: Final = 64
_RETRY_DELAY_S: Final = 0.02
_DONE_PER_FLUSH: Final = 40
_CONCURRENCY: Final = 4
# The part of the messages in style `loop` whose acks are awaited one by one.
_WAITED_FOR: Final = 0.1


class BadLuckError(Exception):
    """Makes a message fail."""


def tell(event: worker_events.WorkerEvent) -> None:
    data = worker_events.encode(event) + b"\n"
    while data:
        data = data[os.write(1, data) :]


class RecordingWorker:
    """Works in one of three styles: `loop`, `process` or `batches`."""

    def __init__(self, consumer: Consumer, random: Random, failing: float) -> None:
        self._consumer = consumer
        self._random = random
        self._failing = failing  # the part of the messages that fail
        self._unstored: list[MessageId] = []  # acknowledged, and perhaps not yet stored
        self._flush_due = asyncio.Event()
        self.styles: Mapping[str, Callable[[asyncio.Event], Awaitable[None]]] = {
            "loop": self._loop,
            "process": self._process,
            "batches": self._batches,
        }

    # --- Three styles ---

    async def _loop(self, stop: asyncio.Event) -> None:
        async for work in self._consumer:
            self._begin(work)
            await self._work()
            if self._fails():
                self._failed(work)
                await work.nack(reason="bad luck")
            elif self._random.random() < _WAITED_FOR:
                self._done(work)
                await self._ack_stored(work, [_id(work)])
            else:
                self._done(work)
                self._unstored.append(_id(work))
                await work.ack()
                if len(self._unstored) >= _DONE_PER_FLUSH:
                    await self.flush()
            if stop.is_set():
                return

    async def _process(self, stop: asyncio.Event) -> None:
        async def function(work: Work) -> None:
            self._begin(work)
            await self._work()
            if self._fails():
                self._failed(work)
                raise BadLuckError
            self._done(work)  # `process` acknowledges it before any other task runs
            self._unstored.append(_id(work))
            if len(self._unstored) >= _DONE_PER_FLUSH:
                self._flush_due.set()

        flushing = asyncio.create_task(self._flush_when_due())
        await self._consumer.process(function, concurrency=_CONCURRENCY, stop=stop)
        flushing.cancel()
        await asyncio.wait({flushing})

    async def _batches(self, stop: asyncio.Event) -> None:
        async for batch in self._consumer.batches():
            works = list(batch.works())
            for work in works:
                self._begin(work)
            await self._work()
            if self._fails():
                for work in works:
                    self._failed(work)
                await batch.nack(reason="bad luck")
            else:
                for work in works:
                    self._done(work)
                await self._ack_stored(batch, list(map(_id, works)))
            if stop.is_set():
                return

    # --- One message ---

    async def _work(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    def _fails(self) -> bool:
        return self._random.random() < self._failing

    def _begin(self, work: Work) -> None:
        key = None if work.key is None else work.key.decode()
        begun = worker_events.WorkBegun(
            worker_events.now_ns(), _id(work), key, work.payload.decode(), work.failures
        )
        tell(begun)

    def _done(self, work: Work) -> None:
        tell(worker_events.WorkDone(worker_events.now_ns(), _id(work)))

    def _failed(self, work: Work) -> None:
        tell(worker_events.WorkFailed(worker_events.now_ns(), _id(work)))

    # --- Stored acknowledgements ---

    async def _ack_stored(self, item: Work | WorkBatch, messages: list[MessageId]) -> None:
        try:
            await item.ack(stored=True)
        except (LateAckError, Unavailable):
            return  # it comes again, or its fate is unknown
        tell(worker_events.AcksStored(worker_events.now_ns(), messages))

    async def _flush_when_due(self) -> None:
        while True:
            await self._flush_due.wait()
            self._flush_due.clear()
            await self.flush()

    async def flush(self) -> None:
        """Wait until all acknowledgements so far are stored, except those that were late."""
        acked, self._unstored = self._unstored, []
        try:
            await self._consumer.flush()
        except Unavailable:
            return
        late = list(self._consumer.late)
        self._consumer.late.clear()
        stored = [
            message for message in acked if not any(_concerns(each, message) for each in late)
        ]
        tell(worker_events.AcksStored(worker_events.now_ns(), stored))


def _id(work: Work) -> MessageId:
    return MessageId(work.topic, work.partition, work.offset)


def _concerns(late: LateWork, message: MessageId) -> bool:
    if not late.topic or not late.count:
        return True  # its message is no longer known
    return (late.topic, late.partition) == message[:2] and late.begin <= message.offset < late.end


async def work(url: str, mode: str, style: str, seed: int, failing: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        connect(url, deadline_s=_DEADLINE_S) as bus,
        bus.consume(
            SUBSCRIPTION,
            PATTERN,
            mode=mode,
            start="earliest",
            window_messages=_WINDOW_MESSAGES,
            deliveries_max=0,  # workers die so often that messages would become dead letters
            retry_delay_s=_RETRY_DELAY_S,
            retry_delay_max_s=_RETRY_DELAY_S,
        ) as consumer,
    ):
        tell(worker_events.WorkerReady(worker_events.now_ns()))
        worker = RecordingWorker(consumer, Random(seed), failing)
        stopped = asyncio.create_task(stop.wait())
        working = asyncio.ensure_future(worker.styles[style](stop))
        await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
        if style != "process":  # `process` drains by itself; the others may wait for a message
            working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()
        await worker.flush()


if __name__ == "__main__":
    _, url, mode, style, seed, failing = sys.argv
    asyncio.run(work(url, mode, style, int(seed), float(failing)))
