"""A broker that may open no more files logs it once, serves its clients, and accepts others when it can again."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

import httpx
import pytest

import runnel
from tests.server.server_process import ServerProcess, running_server

_TOLD = "no connection can be accepted for now"
# More than it can accept, and fewer than fill the kernel's backlog.
_VISITORS = 100


def _keep_to(server: ServerProcess, more: int) -> None:
    """From now on the server may open only so many more files."""
    files = server.process.num_fds() + more
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files, files))


async def _until_told(server: ServerProcess) -> None:
    async with asyncio.timeout(30):
        while _TOLD not in server.stderr:  # noqa: ASYNC110 - another process logs it
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux's prlimit")
@pytest.mark.parametrize("listener", ["native", "http"])
def test_running_out_of_files_is_reported_once_and_accepting_goes_on(
    listener: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, listeners=["http"]) as server:
            port = (
                server.port if listener == "native" else int(server.addresses["http"].split(":")[1])
            )
            async with await runnel.connect(server.url) as bus:
                await bus.publish("a", b"1")
                _keep_to(server, 10)
                visitors = [socket.create_connection(("127.0.0.1", port)) for _ in range(_VISITORS)]
                await _until_told(server)
                # It retries ten times a second, and does not log each time.
                await asyncio.sleep(0.5)
                assert server.stderr.count(_TOLD) == 1
                assert f'"listener": "{listener}"' in server.stderr
                await bus.publish("a", b"2")
                for visitor in visitors:
                    visitor.close()
                async with httpx.AsyncClient() as http:
                    answer = await http.get(
                        f"http://{server.addresses['http']}/healthz", timeout=30
                    )
                    assert answer.status_code == 200
                async with await runnel.connect(server.url, connect_timeout_s=30) as another:
                    assert len((await another.fetch("a", offset=1)).messages) == 2
            assert "Traceback" not in server.stderr
            await server.stop()

    asyncio.run(scenario())
