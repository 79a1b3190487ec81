"""Brokers in memory for tests: in the test's event loop, or in a thread with an address."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager

from runnel.client import BlockingBus, Opening, connect, connect_blocking
from runnel.config import Settings
from runnel.embedded import Broker
from runnel.testing.clock import NS_PER_SECOND, VirtualClock


def open_broker(
    settings: Settings | None = None, *, clock: VirtualClock | None = None
) -> AbstractAsyncContextManager[Broker]:
    """Open a broker in memory. With a clock, time stands still for it and its clients until the clock is advanced."""
    return Broker.open("memory:", settings=settings, clock=clock)


class BrokerThread:
    """A broker in memory that runs in a thread, for tests that have no event loop, or several.

    Its time stands still until the test lets it pass with `advance`.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._clock = VirtualClock()
        self._begun: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="runnel-test-broker")

    def start(self) -> None:
        """Open the broker; then `url` is its address. The fixture `runnel_broker` does that for you."""
        self._thread.start()
        self.url = self._begun.result()

    def stop(self) -> None:
        """Close the broker, and wait until its thread has ended."""
        if self._begun.exception() is None:
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def connect(self, *, name: str | None = None) -> Opening:
        """Connect a client in the test's own event loop."""
        return connect(self.url, name=name)

    def connect_blocking(self, *, name: str | None = None) -> BlockingBus:
        """Connect a blocking client, for a test without an event loop."""
        return connect_blocking(self.url, name=name)

    def advance(self, seconds: float) -> None:
        """Advance the broker's clock, and wait until the broker has noticed."""
        passing = asyncio.run_coroutine_threadsafe(self._advance(seconds), self._loop)
        passing.result()

    async def _advance(self, seconds: float) -> None:
        self._clock.advance(round(seconds * NS_PER_SECOND))
        await asyncio.sleep(0)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        try:
            async with (
                open_broker(self._settings, clock=self._clock) as broker,
                broker.listen() as url,
            ):
                self._begun.set_result(url)
                await self._end.wait()
        except BaseException as error:
            if not self._begun.done():
                self._begun.set_exception(error)
                return
            raise
