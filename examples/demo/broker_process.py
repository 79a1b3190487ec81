"""The broker: `runnel serve` with its defaults, on free ports that it keeps after a restart."""

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
    """The addresses of the three listeners of one broker."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.native_url = self.http_url = self.grpc_url = ""
        self.child = Child("broker", directory, "runnel", "serve", "--data", str(self.data))
        self._places = ["127.0.0.1:0"] * 3

    async def start(self) -> float:
        """Start it. Returns the seconds until it listened."""
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
            # While it was down, another process may have got one of its ports for a moment.
            await self.child.end(signal.SIGKILL)
            await asyncio.sleep(_RETRY_S)
        raise self.child.failure("did not start")

    async def watch(self) -> None:
        """Wait until it ends. Raises DemoFailedError if it ended by itself."""
        async for _ in self.child.lines():
            pass  # it has no more output

    async def kill(self) -> None:
        """Kill it, like a crash: it can say and save nothing."""
        await self.child.end(signal.SIGKILL)

    async def stop(self) -> int:
        """Stop it like systemd does. Returns its exit code."""
        return await self.child.end(signal.SIGTERM)
