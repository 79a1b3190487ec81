"""A real server with all its doors that is restarted, in good order and by force, under clients of each of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runnel.client import connect
from tests.server.load import SMALL, Found, read_stored
from tests.server.serving import serving
from tests.server.travellers import DEADLINE_S, Travellers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DOORS = ("native", "http", "grpc")
# Between two ends of the server everybody does so much.
MESSAGES = 20


def test_everybody_goes_on_after_a_restart_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, *SMALL, doors=("http", "grpc")) as server:
            travellers = Travellers(server, DOORS)
            try:
                travellers.set_out()
                for is_forced in (False, True, False):
                    await travellers.progress(MESSAGES)
                    if is_forced:
                        server.kill()
                    else:
                        await server.stop()
                    await server.start()
                await travellers.progress(MESSAGES)
                await travellers.end_publishing()
                stored = await all_stored(server.url)
                await check_all_is_done(travellers, stored, server.url)
            finally:
                await travellers.discard()
            await server.stop()
        assert "Traceback" not in server.told, server.told

    asyncio.run(scenario())


async def all_stored(url: str) -> dict[str, list[Found]]:
    async with connect(url) as bus:
        stored = await read_stored(bus, [f"t/{door}" for door in DOORS])
    return {place.topic: found for place, found in stored.items()}


async def check_all_is_done(
    travellers: Travellers, stored: dict[str, list[Found]], url: str
) -> None:
    for publisher in travellers.publishers:
        there = {found.offset: found.payload for found in stored[publisher.topic]}
        assert publisher.acknowledged.items() <= there.items()
    count = sum(map(len, stored.values()))
    for reader in travellers.readers:
        await travellers.wait_for(lambda: reader.count >= count)  # noqa: B023 - called here only
        assert reader.found == stored
    everything = {
        (topic, found.offset): found.payload for topic, all_of in stored.items() for found in all_of
    }
    async with connect(url) as bus:
        for worker in travellers.workers:
            await travellers.wait_for(lambda: worker.count >= count)  # noqa: B023 - called here only
            assert worker.taken == everything
            async with asyncio.timeout(DEADLINE_S):
                while (await bus.subscription(worker.subscription)).members[0].backlog:
                    pass  # what was taken last is acknowledged soon
