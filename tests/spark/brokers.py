"""A broker on disk in a thread, with an address: Spark's workers are processes of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from runnel.client import BlockingBus, connect_blocking
from runnel.config import LogSettings, Settings, TopicRule
from runnel.embedded import Broker

LOG = LogSettings(allocate_bytes=65_536, disk_reserve_bytes=0)


class DiskBroker:
    """Use it in a `with`; again with the same directory and address, it goes on where it was."""

    def __init__(
        self,
        directory: Path | str,
        rules: Sequence[TopicRule] = (),
        address: str = "127.0.0.1:0",
        log: LogSettings = LOG,
    ) -> None:
        self.directory = str(directory)
        self.url = ""
        self._settings = Settings(log=log, topics=tuple(rules))
        self._address = address
        self._begun: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    @property
    def address(self) -> str:
        return self.url.removeprefix("runnel://")

    def connect(self) -> BlockingBus:
        return connect_blocking(self.url)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = self._begun.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        try:
            async with (
                Broker.open(self.directory, settings=self._settings) as broker,
                broker.listen(self._address) as url,
            ):
                self._begun.set_result(url)
                await self._end.wait()
        except BaseException as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)
