"""The broker: `runnel serve` with its defaults, on free ports that it keeps when it is started again."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Final

from examples.demo.child import Child

_LISTENING: Final = "listening on "
_START_MAX_S: Final = 30.0
_TRIES: Final = 5
_RETRY_S: Final = 1.0


class BrokerProcess:
    """All three doors of one broker."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.native_url = self.http_url = self.grpc_url = ""
        self.child = Child("broker", directory, "runnel", "serve", "--data", str(self.data))
        self._places = ["127.0.0.1:0"] * 3

    async def start(self) -> float:
        """Seconds until it listened."""
        begin = time.perf_counter()
        for _ in range(_TRIES):
            native, http, grpc = self._places
            await self.child.start("--listen", native, "--http", http, "--grpc", grpc)
            line = await self.child.first_line(within_s=_START_MAX_S)
            if line.startswith(_LISTENING):
                urls = line.removeprefix(_LISTENING).split()
                self.native_url, self.http_url, self.grpc_url = urls
                self._places = [url.partition("://")[2] for url in urls]
                return time.perf_counter() - begin
            # While it was away somebody else may have got one of its ports, for a moment.
            await self.child.end(signal.SIGKILL)
            await asyncio.sleep(_RETRY_S)
        raise self.child.failure("did not start")

    async def watch(self) -> None:
        """Until it ends; DemoFailedError if nobody asked for that."""
        async for _ in self.child.lines():
            pass  # it has no more to say

    async def kill(self) -> None:
        """As a crash would: it can say and save nothing."""
        await self.child.end(signal.SIGKILL)

    async def stop(self) -> int:
        """As systemd would; its exit code."""
        return await self.child.end(signal.SIGTERM)
