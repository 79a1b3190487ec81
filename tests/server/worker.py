"""A consumer in a process of its own: `python -m tests.server.worker URL MODE STYLE SEED FAILING`.

It consumes until SIGTERM and tells its standard output, a pipe, what it was given and what became of that. A note is
in the pipe before the next step is taken, so a worker that is killed has said all that it did.
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
from runnel.client.work import LateWork, WorkBatch
from runnel.errors import LateAckError, Unavailable
from tests.server import notes
from tests.server.notes import Where

SUBSCRIPTION: Final = "work"
PATTERN: Final = "*"
# No client gives up while the broker is away: a busy machine may take its time to start one.
_DEADLINE_S: Final = 90.0
_WINDOW_MESSAGES: Final = 64
_RETRY_DELAY_S: Final = 0.02
_DONE_PER_FLUSH: Final = 40
_CONCURRENCY: Final = 4
_WAITED_FOR: Final = (
    0.1  # of the messages of a plain loop, the part whose acks are waited for one by one
)


class BadLuckError(Exception):
    """What makes a message fail."""


def tell(note: notes.Note) -> None:
    data = notes.encode(note) + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Worker:
    """Works in one of three styles: `loop`, `process` or `batches`."""

    def __init__(self, consumer: Consumer, random: Random, failing: float) -> None:
        self._consumer = consumer
        self._random = random
        self._failing = failing  # so many of the messages do
        self._unstored: list[Where] = []  # acknowledged, and perhaps not stored
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
            await self._labour()
            if self._fails():
                self._failed(work)
                await work.nack(reason="bad luck")
            elif self._random.random() < _WAITED_FOR:
                self._done(work)
                await self._ack_stored(work, [_where(work)])
            else:
                self._done(work)
                self._unstored.append(_where(work))
                await work.ack()
                if len(self._unstored) >= _DONE_PER_FLUSH:
                    await self.flush()
            if stop.is_set():
                return

    async def _process(self, stop: asyncio.Event) -> None:
        async def function(work: Work) -> None:
            self._begin(work)
            await self._labour()
            if self._fails():
                self._failed(work)
                raise BadLuckError
            self._done(work)  # and is acknowledged before anybody else runs
            self._unstored.append(_where(work))
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
            await self._labour()
            if self._fails():
                for work in works:
                    self._failed(work)
                await batch.nack(reason="bad luck")
            else:
                for work in works:
                    self._done(work)
                await self._ack_stored(batch, list(map(_where, works)))
            if stop.is_set():
                return

    # --- One message ---

    async def _labour(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    def _fails(self) -> bool:
        return self._random.random() < self._failing

    def _begin(self, work: Work) -> None:
        key = None if work.key is None else work.key.decode()
        begun = notes.Begun(notes.now_ns(), _where(work), key, work.payload.decode(), work.failures)
        tell(begun)

    def _done(self, work: Work) -> None:
        tell(notes.Done(notes.now_ns(), _where(work)))

    def _failed(self, work: Work) -> None:
        tell(notes.Failed(notes.now_ns(), _where(work)))

    # --- What is stored ---

    async def _ack_stored(self, item: Work | WorkBatch, places: list[Where]) -> None:
        try:
            await item.ack(stored=True)
        except (LateAckError, Unavailable):
            return  # it comes again, or nobody knows
        tell(notes.Stored(notes.now_ns(), places))

    async def _flush_when_due(self) -> None:
        while True:
            await self._flush_due.wait()
            self._flush_due.clear()
            await self.flush()

    async def flush(self) -> None:
        """Everything acknowledged so far is stored then, but for what was late."""
        places, self._unstored = self._unstored, []
        try:
            await self._consumer.flush()
        except Unavailable:
            return
        late = list(self._consumer.late)
        self._consumer.late.clear()
        stored = [where for where in places if not any(_concerns(each, where) for each in late)]
        tell(notes.Stored(notes.now_ns(), stored))


def _where(work: Work) -> Where:
    return Where(work.topic, work.partition, work.offset)


def _concerns(late: LateWork, where: Where) -> bool:
    if not late.topic or not late.count:
        return True  # nobody knows any more what it was
    return (late.topic, late.partition) == where[:2] and late.begin <= where.offset < late.end


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
            deliveries_max=0,  # whoever holds it dies so often that it would be given up
            retry_delay_s=_RETRY_DELAY_S,
            retry_delay_max_s=_RETRY_DELAY_S,
        ) as consumer,
    ):
        tell(notes.Ready(notes.now_ns()))
        worker = Worker(consumer, Random(seed), failing)
        stopped = asyncio.create_task(stop.wait())
        working = asyncio.ensure_future(worker.styles[style](stop))
        await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
        if style != "process":  # which drains by itself; the others may wait for a message
            working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()
        await worker.flush()


if __name__ == "__main__":
    _, url, mode, style, seed, failing = sys.argv
    asyncio.run(work(url, mode, style, int(seed), float(failing)))
