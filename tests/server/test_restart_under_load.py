"""A real server with all its listeners is stopped and killed under load, and starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runnel.client import connect
from tests.server.load import SMALL, FoundMessage, read_stored
from tests.server.restart_clients import DEADLINE_S, RestartClients
from tests.server.server_process import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LISTENERS = ("native", "http", "grpc")
# Each client handles so many messages between two ends of the server.
MESSAGES = 20


def test_everybody_goes_on_after_a_restart_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL, listeners=("http", "grpc")) as server:
            clients = RestartClients(server, LISTENERS)
            try:
                clients.start()
                for is_forced in (False, True, False):
                    await clients.progress(MESSAGES)
                    if is_forced:
                        server.kill()
                    else:
                        await server.stop()
                    await server.start()
                await clients.progress(MESSAGES)
                await clients.end_publishing()
                stored = await all_stored(server.url)
                await check_all_is_done(clients, stored, server.url)
            finally:
                await clients.discard()
            await server.stop()
        assert "Traceback" not in server.stderr, server.stderr

    asyncio.run(scenario())


async def all_stored(url: str) -> dict[str, list[FoundMessage]]:
    async with connect(url) as bus:
        stored = await read_stored(bus, [f"t/{listener}" for listener in LISTENERS])
    return {place.topic: found for place, found in stored.items()}


async def check_all_is_done(
    clients: RestartClients, stored: dict[str, list[FoundMessage]], url: str
) -> None:
    for publisher in clients.publishers:
        there = {found.offset: found.payload for found in stored[publisher.topic]}
        assert publisher.acknowledged.items() <= there.items()
    count = sum(map(len, stored.values()))
    for reader in clients.readers:
        await clients.wait_for(lambda: reader.count >= count)  # noqa: B023 - called here only
        assert reader.found == stored
    everything = {
        (topic, found.offset): found.payload for topic, all_of in stored.items() for found in all_of
    }
    async with connect(url) as bus:
        for worker in clients.workers:
            await clients.wait_for(lambda: worker.count >= count)  # noqa: B023 - called here only
            assert worker.taken == everything
            async with asyncio.timeout(DEADLINE_S):
                while (await bus.subscription(worker.subscription)).members[0].backlog:
                    pass  # the last messages are acknowledged soon
