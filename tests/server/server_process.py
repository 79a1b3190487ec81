"""`runnel serve` as a subprocess, at an address that stays the same for every start."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

# Far more than a start or an end takes, also on a busy machine.
SECONDS_MAX: Final = 60.0
_LISTENING: Final = b"listening on "


class ServerProcess:
    """One data directory and one port, for one server process after the other.

    The HTTP and gRPC listeners are closed, unless they are given a port.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        settings: tuple[str, ...],
        options: Sequence[str] = (),
        **other_ports: int,
    ) -> None:
        self.url = f"runnel://127.0.0.1:{port}"
        self.port = port
        self.directory = directory
        self.addresses = {name: f"127.0.0.1:{other}" for name, other in other_ports.items()}
        self._words = ["--data", str(directory / "data"), "--listen", f"127.0.0.1:{port}"]
        for name in ("http", "grpc"):
            self._words += ["--set", f"{name}.listen={self.addresses.get(name, 'none')}"]
        for setting in settings:
            self._words += ["--set", setting]
        self._words += options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> psutil.Process:
        """The running process, for its resources."""
        return psutil.Process(self._running.pid)

    def nodes(self) -> dict[str, psutil.Process]:
        """The processes that it has started (`--processes`), by the names of their nodes."""
        found = {}
        for child in self.process.children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                words = child.cmdline()
                if "runnel.cli.child" in words:
                    found[words[-2]] = child
        return found

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "no server was started"
        return self._process

    @property
    def stderr(self) -> str:
        """The standard error of all its processes."""
        path = self.directory / "stderr"
        return path.read_text() if path.exists() else ""

    def spawn(self) -> None:
        """Start it, and do not wait."""
        assert self._process is None or self._process.poll() is not None, "one is running"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RUNNEL_")}
        with (self.directory / "stderr").open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runnel", "serve", *self._words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        self.spawn()
        await asyncio.to_thread(self._wait_listening)

    def _wait_listening(self) -> None:
        stdout = self._running.stdout
        assert stdout is not None
        ends_at = time.monotonic() + SECONDS_MAX
        said = b""
        while b"\n" not in said:
            left_s = max(0.0, ends_at - time.monotonic())
            assert select.select([stdout], [], [], left_s)[0], "the server has not started in time"
            chunk = os.read(stdout.fileno(), 4096)
            assert chunk, f"the server has not started:\n{self.stderr}"
            said += chunk
        assert said.startswith(_LISTENING), said

    def kill(self) -> None:
        """Kill it, without a warning."""
        self._running.kill()
        assert self._running.wait(SECONDS_MAX) == -signal.SIGKILL, self.stderr
        self._close()

    def wait_some(self, seconds: float) -> int:
        """Its exit code, if it ends in time; else raises subprocess.TimeoutExpired."""
        return self._running.wait(seconds)

    def send_signal(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    async def wait_end(self) -> int:
        """Wait for its exit code."""
        code = await asyncio.to_thread(self._running.wait, SECONDS_MAX)
        self._close()
        return code

    async def stop(self) -> None:
        """Shut it down in good order."""
        self.send_signal(signal.SIGTERM)
        assert await self.wait_end() == 0, self.stderr

    def _close(self) -> None:
        if self._running.stdout is not None:
            self._running.stdout.close()

    def discard(self) -> None:
        """End it and the processes that it has started, in whatever state they are."""
        if self._process is not None:
            children = [] if self._process.poll() is not None else self.process.children()
            self._process.kill()
            self._process.wait(SECONDS_MAX)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, SECONDS_MAX)
            self._close()


@contextmanager
def held_port() -> Iterator[int]:
    """A free port that no other process gets, not even while the server is down.

    A socket that is bound and does not listen keeps the port from being chosen for others; a server that says
    SO_REUSEADDR may still listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@asynccontextmanager
async def running_server(
    directory: Path, *settings: str, listeners: Sequence[str] = (), options: Sequence[str] = ()
) -> AsyncIterator[ServerProcess]:
    """A running server with these listeners besides the native one. Settings are `key=value`, as for `--set`."""
    with ExitStack() as held:
        port = held.enter_context(held_port())
        other_ports = {name: held.enter_context(held_port()) for name in listeners}
        server = ServerProcess(directory, port, settings, options, **other_ports)
        try:
            await server.start()
            yield server
        finally:
            server.discard()
