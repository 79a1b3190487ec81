"""A data directory that is removed under a running server, or opened by a second one."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from runnel.client import Bus, connect
from runnel.embedded import Broker
from runnel.errors import LockedError, ReadOnlyError, TimeoutExpiredError
from tests.server.server_process import running_server

pytestmark = pytest.mark.slow

# The last refusal; or, on a slow machine, no answer in time, with an error that names the refusal before it.
REFUSED = (ReadOnlyError, TimeoutExpiredError)


async def fill_segment(bus: Bus) -> int:
    """Publish until another segment is needed. Returns the number of stored messages."""
    stored = 0
    with suppress(*REFUSED):
        while True:
            await bus.publish("a", b"." * 500)
            stored += 1
    return stored


def test_nothing_is_promised_once_the_directory_has_been_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_server(tmp_path, listeners=("http",)) as server,
            connect(server.url, deadline_s=0.5) as bus,
            httpx.AsyncClient(base_url=f"http://{server.addresses['http']}") as http,
        ):
            await bus.publish("a", b"stored")
            shutil.rmtree(tmp_path / "data")
            for _ in range(2):  # reopening the shard does not help
                with pytest.raises(REFUSED, match="removed while it was in use") as refused:
                    await bus.publish("a", b"into nothing")
                assert refused.value.retriable
                async with asyncio.timeout(30):
                    while (await http.get("/readyz")).status_code != 503:
                        pass
            assert (await bus.fetch("a", 1)).messages[0].payload == b"stored"
            server.send_signal(signal.SIGTERM)
            assert await server.wait_end() != 0
            assert "removed while it was in use" in server.stderr

    asyncio.run(scenario())


def test_a_directory_that_was_away_for_a_while_has_lost_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        small = 'topics=[{ match = "*", rotate = { bytes = "4KiB" } }]'
        async with (
            running_server(tmp_path, small) as server,
            connect(server.url, deadline_s=0.1) as hasty,
            connect(server.url) as bus,
        ):
            stored = (await bus.publish("a", b"before")).offset
            (tmp_path / "data").rename(tmp_path / "away")
            stored += await fill_segment(hasty)
            async with asyncio.timeout(30):
                while "shard_reopen_failed" not in server.stderr:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            (tmp_path / "away").rename(tmp_path / "data")
            assert (await bus.publish("a", b"here again")).offset == stored + 1
            assert (await bus.fetch("a", 1)).end_offset == stored + 2
            await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["as it is", "by a link", "without its lock file"])
def test_a_directory_in_use_is_not_opened_by_a_second_broker(tmp_path: Path, way: str) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server, connect(server.url) as bus:
            directory = tmp_path / "data"
            if way == "by a link":
                (tmp_path / "link").symlink_to(directory)
                directory = tmp_path / "link"
            elif way == "without its lock file":
                (directory / "lock").unlink()
            with pytest.raises(LockedError, match="stop that process or use another directory"):
                async with Broker.open(directory):
                    pass
            await bus.publish("a", b"1")

    asyncio.run(scenario())
